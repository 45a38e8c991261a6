import torch.distributed as dist


def overlap(model):
    # The calls of all ranks must meet, so they must come in one order: backward() goes through the
    # same layers in the same order everywhere. The division comes after wait(), as the tensor is
    # not ours before. DDP's reducer has such a hook on each parameter, too. But it exchanges whole
    # buckets, in an order that it fixes beforehand, and waits at the end of backward(): so there is
    # no finish() to forget.
    exchanges = []

    def begin(p):
        exchanges.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        for work, p in exchanges:
            work.wait()
            p.grad /= dist.get_world_size()
        exchanges.clear()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish
