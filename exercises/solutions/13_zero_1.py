import torch
import torch.distributed as dist
from torch.nn.functional import pad


class ShardedAdamW:
    # An all_reduce is a reduce_scatter and an all_gather. AdamW's step goes between the two: it
    # treats each weight by itself, so a part needs no more than the gradients of this part. That is
    # why sharding the state sends nothing on top (ZeRO, section 7). FSDP2 makes the same two calls.
    # torch's ZeroRedundancyOptimizer deals out whole parameters, not slices of a flat tensor, and
    # leaves the averaging to DDP: an all_reduce, and a broadcast from each owner.
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks  # zeros at the end: collectives want equal parts
        # Without clone(), the part would be a view that keeps the whole padded tensor alive.
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    @torch.no_grad()
    def step(self):
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(self.part.grad, pad(self.weights.grad, (0, self.fill)))
        self.part.grad /= dist.get_world_size()
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.copy_(whole[: len(self.weights)])
