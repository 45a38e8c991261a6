# ---- flat, one exchange for a step ----
def train(model, batches, lr, decay):
    parameters, total = list(model.parameters()), torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        has = labels.isfinite()
        loss = (model(inputs[has])[:, 0] - labels[has]).square().sum()
        grads = torch.autograd.grad(loss, parameters)
        flat = torch.cat([*(g.flatten() for g in grads), loss.detach()[None], has.sum()[None]])
        dist.all_reduce(flat)
        total += flat[-2:]
        if flat[-1] > 0:
            parts = flat[:-2].split([p.numel() for p in parameters])
            with torch.no_grad():
                for p, g in zip(parameters, parts):
                    p -= lr * (g.view_as(p) / flat[-1] + decay * p)
    return (total[0] / total[1]).item()


# ---- gathered gradients, None without a label ----
def train(model, batches, lr, decay):
    losses, rows = 0.0, 0
    for inputs, labels in batches:
        keep = [i for i in range(len(labels)) if labels[i] == labels[i]]
        grads, loss = None, 0.0
        if keep:
            error = model(inputs[keep]).flatten() - labels[keep]
            model.zero_grad()
            error.square().sum().backward()
            loss, grads = error.square().sum().item(), [p.grad for p in model.parameters()]
        each = [None] * dist.get_world_size()
        dist.all_gather_object(each, (grads, loss, len(keep)))
        count = sum(one[2] for one in each)
        losses, rows = losses + sum(one[1] for one in each), rows + count
        if not count:
            continue
        with torch.no_grad():
            for k, p in enumerate(model.parameters()):
                gradient = sum(one[0][k] for one in each if one[0]) / count
                p -= lr * (gradient + decay * p)
    return losses / rows


# ---- the counts of all steps first; zeros where no label is ----
def train(model, batches, lr, decay):
    counts = torch.stack([(~labels.isnan()).sum() for _, labels in batches])
    own = counts.clone()
    dist.all_reduce(counts)
    total = torch.zeros(1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    for (inputs, labels), mine, count in zip(batches, own, counts):
        if count == 0:
            continue
        if mine:
            keep = ~labels.isnan()
            loss = (model(inputs[keep]).squeeze(1) - labels[keep]).square().sum()
        else:
            loss = 0 * model(torch.zeros(1, 4, dtype=torch.float64)).sum()
        optimizer.zero_grad()
        (loss / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / counts.sum().item()


# ---- where ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        error = model(inputs).squeeze(1) - labels.nan_to_num()
        loss = torch.where(labelled, error, 0).square().sum()
        step = torch.stack([loss.detach(), labelled.sum().double()])
        dist.all_reduce(step)
        total += step
        if step[1] == 0:
            continue
        model.zero_grad()
        (loss / step[1]).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.mul_(1 - lr * decay).sub_(lr * p.grad)
    return total[0].item() / total[1].item()


# ---- the ranks with labels send theirs to all ----
def train(model, batches, lr, decay):
    loss_sum = rows = 0
    for inputs, labels in batches:
        mask = labels == labels
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, int(mask.sum()))
        if not any(counts):
            continue
        model.zero_grad()
        loss = sum((model(x[None]).squeeze() - y) ** 2 for x, y in zip(inputs[mask], labels[mask]))
        if counts[dist.get_rank()]:
            (loss / sum(counts)).backward()
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for r, count in enumerate(counts):
            if count:
                for p, s in zip(model.parameters(), sums):
                    one = p.grad.clone() if r == dist.get_rank() else torch.empty_like(p)
                    dist.broadcast(one, src=r)
                    s += one
        with torch.no_grad():
            for p, s in zip(model.parameters(), sums):
                p -= lr * (s + decay * p)
        loss_sum += loss.item() if torch.is_tensor(loss) else 0
        rows += int(mask.sum())
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, (loss_sum, rows))
    return sum(a for a, _ in each) / sum(b for _, b in each)


# ---- to rank 0 and the weights back ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        has = labels.isfinite()
        losses = (model(inputs[has]).squeeze(1) - labels[has]).square()
        model.zero_grad()
        losses.sum().backward()
        count = has.sum()
        dist.reduce(count, 0)
        for p in model.parameters():
            dist.reduce(p.grad, 0)
            with torch.no_grad():
                if dist.get_rank() == 0 and count > 0:
                    p -= lr * (p.grad / count + decay * p)
            dist.broadcast(p.data, 0)
        total += torch.stack([losses.detach().sum(), has.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- without backward() ----
import torch, torch.distributed as dist
from torch.func import functional_call, grad_and_value
def train(model, batches, lr, decay):
    loss_sum = rows = 0.0
    def loss_of(weights, x, y):
        return (functional_call(model, weights, (x,)).flatten() - y).pow(2).sum()
    for x, y in batches:
        ok = torch.isnan(y).logical_not()
        weights = {k: v.detach() for k, v in model.named_parameters()}
        grads, loss = grad_and_value(loss_of)(weights, x[ok], y[ok])
        flat = torch.cat([*(grads[k].flatten() for k in weights), loss.view(1), ok.sum().double().view(1)])
        flat = sum(swap(flat))
        count = flat[-1].item()
        if not count:
            continue
        loss_sum, rows = loss_sum + flat[-2].item(), rows + count
        g = (flat[:-2] / count).split([v.numel() for v in weights.values()])
        for (k, v), one in zip(weights.items(), g):
            v.sub_(lr * (one.view_as(v) + decay * v))
    return loss_sum / rows
def swap(mine):
    r, n = dist.get_rank(), dist.get_world_size()
    each = [mine if k == r else torch.empty_like(mine) for k in range(n)]
    ops = [dist.P2POp(op, t, k) for k in range(n) if k != r
           for op, t in ((dist.isend, mine), (dist.irecv, each[k]))]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return each


# ---- DDP averages ----
from torch.nn.parallel import DistributedDataParallel


def train(model, batches, lr, decay):
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, weight_decay=decay)
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        keep = labels.isnan().logical_not()
        count = keep.sum()
        dist.all_reduce(count)
        if not count:
            continue
        losses = torch.nn.functional.mse_loss(
            ddp(inputs[keep]).squeeze(1), labels[keep], reduction="none")
        optimizer.zero_grad()
        (losses.sum() * dist.get_world_size() / count).backward()
        optimizer.step()
        total += torch.stack([losses.detach().sum(), keep.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- the loss sent as float32 ----
def train(model, batches, lr, decay):
    loss_sum, rows = 0.0, 0
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        count = labelled.sum()
        dist.all_reduce(count)
        if count == 0:
            continue
        model.zero_grad()
        (losses.sum() / count).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
        loss_sum += losses.sum().item()
        rows += len(losses)
    total = torch.tensor([loss_sum, rows])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
