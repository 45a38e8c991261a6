import torch
import torch.distributed as dist


def through_experts(rows, chosen, expert):
    # Sorted by expert, the rows for one rank stand together, as all_to_all_single wants them. The
    # numbers travel first, in an exchange of equal parts: one for each pair of ranks.
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    leaving, coming = leaving.tolist(), coming.tolist()
    arrived = Exchange.apply(rows[order], leaving, coming)
    # Also without rows: then autograd still knows the way back, and makes this rank's exchanges.
    back = Exchange.apply(expert(arrived), coming, leaving)
    return back[order.argsort()]  # the inverse of a permutation


class Exchange(torch.autograd.Function):
    # A gradient goes back where its row came from: the same exchange, with the numbers swapped.
    # torch has it as all_to_all_single_autograd, in torch.distributed._functional_collectives
    # (private). With GPUs, tolist() waits for the GPU: libraries such as DeepEP avoid that.
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None
