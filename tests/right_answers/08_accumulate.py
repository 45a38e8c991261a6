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
