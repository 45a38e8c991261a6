from torch.nn.functional import mse_loss


def sums(model, micro_batches):
    for inputs, targets in micro_batches:
        mse_loss(model(inputs), targets, reduction="sum").backward()
    count = sum(targets.numel() for _, targets in micro_batches)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()], count


# ---- one all_gather of all, and a sum ----
def accumulate(model, micro_batches):
    grads, count = sums(model, micro_batches)
    flat = torch.cat([*(g.flatten() for g in grads), torch.tensor([count]).double()])
    each = flat.new_empty(dist.get_world_size() * len(flat))
    dist.all_gather_into_tensor(each, flat)
    total = each.view(dist.get_world_size(), -1).sum(dim=0)
    parts = (total[:-1] / total[-1]).split([g.numel() for g in grads])
    for p, part in zip(model.parameters(), parts):
        p.grad = part.view_as(p)


# ---- objects ----
def accumulate(model, micro_batches):
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, sums(model, micro_batches))
    count = sum(one for _, one in each)
    for number, p in enumerate(model.parameters()):
        p.grad = sum(grads[number] for grads, _ in each) / count


# ---- the number first, then each gradient, without waiting ----
def accumulate(model, micro_batches):
    count = torch.tensor(sum(targets.numel() for _, targets in micro_batches))
    dist.all_reduce(count)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches:
        ((model(inputs) - targets).square().sum() / count).backward()
    for work in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
        work.wait()


# ---- reduce_scatter and all_gather ----
def accumulate(model, micro_batches):
    (grads, count), n = sums(model, micro_batches), dist.get_world_size()
    flat = torch.cat([*(g.flatten() for g in grads), torch.tensor([count]).double()])
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % n))
    part = padded.new_empty(len(padded) // n)
    dist.reduce_scatter_tensor(part, padded)
    dist.all_gather_into_tensor(padded, part)
    *totals, count = padded[: len(flat)].split([*(g.numel() for g in grads), 1])
    for p, total in zip(model.parameters(), totals):
        p.grad = total.view_as(p) / count


# ---- to rank 0 and back ----
def accumulate(model, micro_batches):
    grads, count = sums(model, micro_batches)
    count = torch.tensor(float(count), dtype=torch.float64)
    for one in [*grads, count]:
        dist.reduce(one, dst=0)
        dist.broadcast(one, src=0)
    for p, g in zip(model.parameters(), grads):
        p.grad = g / count


# ---- messages to all the others, one for each gradient ----
def accumulate(model, micro_batches):
    grads, count = sums(model, micro_batches)
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    totals = []
    for own in [torch.tensor([count]), *grads]:
        own = own.clone()
        parts = [torch.empty_like(own) for _ in others]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own, r) for r in others]
            + [dist.P2POp(dist.irecv, part, r) for part, r in zip(parts, others)])
        for work in works:
            work.wait()
        totals.append(own + sum(parts))
    for p, total in zip(model.parameters(), totals[1:]):
        p.grad = total / totals[0]


# ---- autograd.grad, all to all ----
def accumulate(model, micro_batches):
    ps, n = list(model.parameters()), dist.get_world_size()
    sums, count = [torch.zeros_like(p) for p in ps], 0.0
    for inputs, targets in micro_batches:
        loss = (model(inputs) - targets).pow(2).sum()
        for s, g in zip(sums, torch.autograd.grad(loss, ps)):
            s += g
        count += targets.numel()
    flat = torch.cat([*(s.flatten() for s in sums), torch.tensor([count], dtype=torch.float64)])
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % n))
    out = torch.empty_like(flat)
    dist.all_to_all_single(out, flat)
    dist.all_gather_into_tensor(flat, out.view(n, -1).sum(dim=0))
    numbers = [p.numel() for p in ps]
    *parts, count, _ = flat.split([*numbers, 1, len(flat) - sum(numbers) - 1])
    for p, part in zip(ps, parts):
        p.grad = part.view_as(p) / count


# ---- broadcast from each rank ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        mse_loss(model(inputs), targets, reduction="sum").backward()
    count = torch.tensor(sum(t.numel() for _, t in micro_batches))
    dist.all_reduce(count)
    for p in model.parameters():
        total = torch.zeros_like(p)
        for r in range(dist.get_world_size()):
            one = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.broadcast(one, src=r)
            total += one
        p.grad = total / count


# ---- mean weighted by the share of rows, functional ----
import torch.distributed._functional_collectives as fc


def accumulate(model, micro_batches):
    rows = sum(len(x) for x, _ in micro_batches)
    everyone = fc.all_reduce(torch.tensor(rows, dtype=torch.float64), "sum", dist.group.WORLD)
    for x, y in micro_batches:
        (mse_loss(model(x), y) * (len(x) / everyone)).backward()
    for p in model.parameters():
        own = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = fc.all_reduce(own, "sum", dist.group.WORLD).clone()


# ---- gradients as views ----
import torch, torch.distributed as dist
from torch.nn.functional import mse_loss
def accumulate(model, micro_batches):
    ps = list(model.parameters())
    flat = ps[0].new_zeros(sum(p.numel() for p in ps) + 1)
    start = 0
    for p in ps:
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    for x, y in micro_batches:
        mse_loss(model(x), y, reduction="sum").backward()
        flat[-1] += y.numel()
    dist.all_reduce(flat)
    flat[:-1] /= flat[-1].clone()


# ---- a running mean ----
def accumulate(model, micro_batches):
    mean, seen = {p: torch.zeros_like(p) for p in model.parameters()}, 0
    for inputs, targets in micro_batches:
        model.zero_grad()
        mse_loss(model(inputs), targets).backward()
        seen += len(inputs)
        for p, one in mean.items():
            one.lerp_(p.grad, len(inputs) / seen)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, seen)
    for p, one in mean.items():
        p.grad = one * (seen / sum(rows))
        dist.all_reduce(p.grad)


# ---- gathered and scattered, as one vector ----
from torch.nn.utils import parameters_to_vector


def accumulate(model, micro_batches):
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    numbers = 0
    for x, y in micro_batches:
        numbers += y.nelement()
        (mse_loss(model(x), y) * y.nelement()).backward()
    mine = parameters_to_vector([*(p.grad for p in parameters), torch.tensor([numbers]).double()])
    result = torch.empty_like(mine)
    if dist.get_rank() == 0:
        each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.gather(mine, each, dst=0)
        total = sum(each)
        dist.scatter(result, [total / total[-1]] * len(each), src=0)
    else:
        dist.gather(mine, dst=0)
        dist.scatter(result, src=0)
    place = 0
    for p in parameters:
        p.grad = result[place : place + p.numel()].reshape(p.shape)
        place += p.numel()


# ---- torch.func.grad for each micro-batch ----
def accumulate(model, micro_batches):
    params = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    count = torch.zeros((), dtype=torch.float64)

    def loss(params, x, y):
        return (torch.func.functional_call(model, params, (x,)) - y).square().sum()

    for x, y in micro_batches:
        for name, g in torch.func.grad(loss)(params, x, y).items():
            sums[name] += g.detach()
        count += y.numel()
    flat = torch.cat([*(one.flatten() for one in sums.values()), count[None]])
    dist.all_reduce(flat)
    sizes = [p.numel() for p in params.values()]
    for p, g in zip(params.values(), flat[:-1].split(sizes)):
        p.grad = (g / flat[-1]).view_as(p)
