# ---- all_gather and a mean ----
def average_gradients(model):
    for p in model.parameters():
        if p.requires_grad:
            each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(each, p.grad)
            p.grad = torch.stack(each).mean(dim=0)


# ---- objects ----
def average_gradients(model):
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    for name in mine:
        model.get_parameter(name).grad.copy_(sum(one[name] for one in each) / len(each))


# ---- one flat tensor, reduce_scatter and all_gather ----
def average_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    world_size = dist.get_world_size()
    flat = torch.cat([g.flatten() for g in grads])
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % world_size)])
    part = padded.new_empty(len(padded) // world_size)
    dist.reduce_scatter_tensor(part, padded)
    dist.all_gather_into_tensor(padded, part / world_size)
    for g, mean in zip(grads, padded[: len(flat)].split([g.numel() for g in grads])):
        g.copy_(mean.view_as(g))


# ---- to rank 0 and back, all at once ----
def average_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for work in [dist.reduce(g, dst=0, async_op=True) for g in grads]:
        work.wait()
    for g in grads:
        g /= dist.get_world_size()
        dist.broadcast(g, src=0)


# ---- broadcast from each rank ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            continue
        own, p.grad = p.grad, torch.zeros_like(p)
        for source in range(dist.get_world_size()):
            one = own.clone()
            dist.broadcast(one, src=source)
            p.grad += one / dist.get_world_size()


# ---- functional, an average ----
import torch.distributed._functional_collectives as functional


def average_gradients(model):
    for p in filter(lambda p: p.grad is not None, model.parameters()):
        p.grad = functional.all_reduce(p.grad, "sum", dist.group.WORLD) / dist.get_world_size()


# ---- coalesced ----
def average_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    with dist._coalescing_manager(async_ops=True) as manager:
        for g in grads:
            dist.all_reduce(g)
    manager.wait()
    torch._foreach_div_(grads, dist.get_world_size())


# ---- all to all and all_gather ----
def average_gradients(model):
    n = dist.get_world_size()
    for p in model.parameters():
        if p.grad is None:
            continue
        flat = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % n))
        out = torch.empty_like(flat)
        dist.all_to_all_single(out, flat)
        part = out.view(n, -1).mean(dim=0)
        dist.all_gather_into_tensor(out, part)
        p.grad = out[: p.numel()].view_as(p)


# ---- gather and scatter ----
import torch, torch.distributed as dist
def average_gradients(model):
    rank, n = dist.get_rank(), dist.get_world_size()
    for k, p in enumerate(model.parameters()):
        if p.grad is None:
            continue
        root = k % n
        each = [torch.empty_like(p.grad) for _ in range(n)] if rank == root else None
        dist.gather(p.grad, each, dst=root)
        mean = torch.stack(each).mean(0) if rank == root else None
        dist.scatter(p.grad, [mean] * n if rank == root else None, src=root)


# ---- the function of the library ----
from torch.distributed.algorithms.model_averaging.utils import average_parameters


def average_gradients(model):
    average_parameters(iter([p.grad for p in model.parameters() if p.grad is not None]),
                       dist.group.WORLD)


# ---- a custom op that changes its argument ----
@torch.library.custom_op("learner::average_", mutates_args={"x"})
def average_(x: torch.Tensor) -> None:
    dist.all_reduce(x)
    x /= dist.get_world_size()


def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            average_(p.grad)
