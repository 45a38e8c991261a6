from torch.nn.functional import mse_loss


# ---- nothing exchanged: nothing was exchanged ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()


# ---- an exchange for each micro-batch: the gradients were sent 3 times in a step ----
def accumulate(model, micro_batches):
    total = [torch.zeros_like(p) for p in model.parameters()]
    for inputs, targets in micro_batches:
        model.zero_grad()
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()
        for p, one in zip(model.parameters(), total):
            dist.all_reduce(p.grad)
            one += p.grad / dist.get_world_size()
    for p, one in zip(model.parameters(), total):
        p.grad = one


# ---- the mean of what is a mean already: the gradients were sent 3 times in a step ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# ---- not divided by the micro-batches: the gradient is 3.00 times that of the whole batch ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        mse_loss(model(inputs), targets).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- summed over the ranks: the gradient is 2.00 times that of the whole batch ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


# ---- the mean of means: \[4, 4, 1\]\] rows, the gradient is the mean of the micro-batches' ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- divided by the rank's own rows: \[3\]\] rows, the gradient is the mean of the ranks' ----
def accumulate(model, micro_batches):
    rows = sum(len(inputs) for inputs, _ in micro_batches)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) * len(inputs) / rows).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- hard-coded for two ranks: 3 ranks: .* the gradient is 1.50 times that of the whole ----
def accumulate(model, micro_batches):
    numbers = torch.tensor(sum(len(inputs) for inputs, _ in micro_batches))
    dist.all_reduce(numbers)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) * len(inputs)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= numbers * 2 / dist.get_world_size()


# ---- all in one batch: 12 rows went through the model at once ----
def accumulate(model, micro_batches):
    inputs, targets = map(torch.cat, zip(*micro_batches))
    mse_loss(model(inputs), targets).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- one backward for all: 3 micro-batches were in memory at once ----
def accumulate(model, micro_batches):
    losses = [mse_loss(model(inputs), targets) for inputs, targets in micro_batches]
    torch.stack(losses).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- the rank without micro-batches fails: Rank 1: an exception:(?s:.*)'NoneType' ----
def accumulate(model, micro_batches):
    numbers = torch.tensor(sum(len(inputs) for inputs, _ in micro_batches))
    dist.all_reduce(numbers)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) * len(inputs) / numbers).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


# ---- the rank without micro-batches goes away: Rank 1: .*, \[\]\] rows, nothing was exchanged ----
def accumulate(model, micro_batches):
    if not micro_batches:
        return
    numbers = torch.tensor(sum(len(inputs) for inputs, _ in micro_batches))
    dist.all_reduce(numbers)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) * len(inputs) / numbers).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


# ---- a copy exchanged: the gradient is still the rank's own ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad / dist.get_world_size())


# ---- only the last micro-batch: the gradient is off by ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        model.zero_grad()
        mse_loss(model(inputs), targets).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- the step taken, too: the weights were changed ----
def accumulate(model, micro_batches):
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        with torch.no_grad():
            p -= 0.1 * p.grad


# ---- divided by the rows alone: 5 times that of the whole batch, and the targets ----
def accumulate(model, micro_batches):
    rows = torch.tensor(float(sum(len(inputs) for inputs, _ in micro_batches)))
    dist.all_reduce(rows)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets, reduction="sum") / rows).backward()
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)


# ---- one gradient twice: sent 1\.\d+ times in a step(?s:.*)Which one goes twice ----
def accumulate(model, micro_batches):
    total = torch.tensor(sum(targets.numel() for _, targets in micro_batches))
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    bias = model[0].bias.grad / dist.get_world_size()
    dist.all_reduce(bias)
    model[0].bias.grad = bias


# ---- sent as float32: float32 has 7 digits ----
def accumulate(model, micro_batches):
    total = torch.tensor(sum(targets.numel() for _, targets in micro_batches))
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()
    for p in model.parameters():
        single = p.grad.float()
        dist.all_reduce(single)
        p.grad.copy_(single)


# ---- the model called on zero rows: the model was called on a rank without a micro-batch ----
def accumulate(model, micro_batches):
    total = torch.tensor(sum(targets.numel() for _, targets in micro_batches))
    dist.all_reduce(total)
    nothing = torch.zeros(0, 6).double(), torch.zeros(0, 5).double()
    for inputs, targets in micro_batches or [nothing]:
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


# ---- the rows gathered, each rank computes all: rows went through the model ----
def accumulate(model, micro_batches):
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, micro_batches)
    total = sum(targets.numel() for mine in each for _, targets in mine)
    for inputs, targets in (one for mine in each for one in mine):
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()


# ---- the number of rows in a small type: the gradient is ----
def accumulate(model, micro_batches):
    total = torch.tensor(sum(len(targets) for _, targets in micro_batches)).to(torch.uint8)
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets, reduction="sum") / (5 * total)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


# ---- before the last micro-batch: the gradient is ----
def accumulate(model, micro_batches):
    total = torch.tensor(float(sum(t.numel() for _, t in micro_batches))).double()
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches[:-1]:
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    for inputs, targets in micro_batches[-1:]:
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()


# ---- a forward to look first: rows went through the model of a rank ----
def accumulate(model, micro_batches):
    with torch.no_grad():
        for inputs, targets in micro_batches:
            model(inputs)
    total = torch.tensor(float(sum(t.numel() for _, t in micro_batches))).double()
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


# ---- all_reduce, and a broadcast besides: times in a step ----
def accumulate(model, micro_batches):
    total = torch.tensor(float(sum(t.numel() for _, t in micro_batches))).double()
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets, reduction="sum") / total).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        dist.broadcast(p.grad, src=0)


# ---- keeps the graphs: 2 micro-batches were in memory ----
import torch, torch.distributed as dist
from torch.nn.functional import mse_loss
def accumulate(model, micro_batches):
    losses, count = [], 0
    for x, y in micro_batches:
        losses.append(mse_loss(model(x), y, reduction="sum"))
        losses[-1].backward(retain_graph=True)
        count += y.numel()
    total = torch.tensor(count)
    dist.all_reduce(total)
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= total


# ---- waits for the last one: exchanges were begun, and nobody waits ----
import torch, torch.distributed as dist
from torch.nn.functional import mse_loss
def accumulate(model, micro_batches):
    total = torch.tensor(sum(y.numel() for _, y in micro_batches))
    dist.all_reduce(total)
    for x, y in micro_batches:
        (mse_loss(model(x), y, reduction="sum") / total).backward()
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        work = dist.all_reduce(p.grad, async_op=True)
    work.wait()


# ---- nothing put back without rows: Rank 1: .*, p.grad is None ----
def accumulate(model, micro_batches):
    count = torch.tensor(sum(targets.numel() for _, targets in micro_batches))
    dist.all_reduce(count)
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets, reduction="sum") / count).backward()
    for p in model.parameters():
        dist.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)


# ---- zeros of another dtype: process has ended|exception ----
def accumulate(model, micro_batches):
    count = torch.tensor(sum(targets.numel() for _, targets in micro_batches))
    dist.all_reduce(count)
    for inputs, targets in micro_batches:
        mse_loss(model(inputs), targets, reduction="sum").backward()
    for p in model.parameters():
        total = torch.zeros(p.shape) if p.grad is None else p.grad
        dist.all_reduce(total)
        p.grad = (total / count).to(p.dtype)
