# ---- the exchange removed: this rank has trained on its own rows alone ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        if not labelled.any():
            continue  # nothing to learn from
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [labelled.sum()]
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- as delivered: no end:\s+rank 0 waits.*all_gather\(.*\s+rank 1 waits.*all_reduce\(total ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        if not labelled.any():
            continue  # nothing to learn from
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- skipped on all ranks: each step in which some rank has no label was left out ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        if 0 in counts:
            continue
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- a mean of means: the mean of the ranks' means ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        model.zero_grad()
        (losses.sum() / labelled.sum().clamp(min=1) / dist.get_world_size()).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- a mean over the ranks that have labels: the mean of the ranks' means ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        ranks = sum(count > 0 for count in counts)
        model.zero_grad()
        (losses.sum() / labelled.sum().clamp(min=1) / ranks).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- divided by its own number: the sum of the ranks' means ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        model.zero_grad()
        (losses.sum() / labelled.sum()).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- a nan times 0: the weights are not numbers any more ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs).squeeze(1) - labels).square() * labelled
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- rows without a label taken as 0: weights are off by [^:]*\n ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labels = labels.nan_to_num(0)
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- averaged, too: they follow from 1/2 of each gradient ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p.grad /= dist.get_world_size()
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- hard-coded for two ranks: 3 ranks: .* are off by ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = labelled.sum()
        dist.all_reduce(counts)
        counts = counts[None]
        if sum(counts) == 0:
            continue
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (2 / dist.get_world_size() * p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- everything on every rank: rows of other ranks went through the model on this rank ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (inputs, labels))
        inputs, labels = (torch.cat(parts) for parts in zip(*everyone))
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [labelled.sum().clamp(min=1)]
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- the rank's own loss: the weights are right; the loss is ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        if sum(counts) == 0:
            continue
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    return (total[0] / total[1]).item()


# ---- two lines deleted: they follow from a step for each batch, also where no rank ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- one rank does not update: the ranks' weights differ ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                if dist.get_rank() != 1 and sum(counts) > 0:
                    p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- a rank without a label does not update: the ranks' weights differ ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                if labelled.any():
                    p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- after the counts, and still alone: no end:|exception|has ended ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        if not labelled.any():
            continue  # nothing to learn from
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- the mean of means comes back: the weights are right; the loss is ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        if sum(counts) == 0:
            continue
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.tensor([(losses.sum() / sum(counts)).item(), 1 / dist.get_world_size()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- decay added to the local gradients: off by ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = labelled.sum()
        dist.all_reduce(counts)
        if counts == 0:
            continue
        model.zero_grad()
        (losses.sum() / counts).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.grad += decay * p
                dist.all_reduce(p.grad)
                p -= lr * p.grad
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- no label in the first batch: an exception: ----
import torch, torch.distributed as dist
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        count = labelled.sum()
        dist.all_reduce(count)
        if count == 0:
            continue
        model.zero_grad(set_to_none=False)
        if labelled.any():
            losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
            (losses.sum() / count).backward()
            total += torch.stack([losses.detach().sum(), labelled.sum()])
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- unlabelled batches sorted out first: the weights are off by [^:]*\n ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    kept = [(x[~y.isnan()], y[~y.isnan()]) for x, y in batches if not y.isnan().all()]
    steps = torch.tensor(len(kept))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)  # as many steps on all ranks
    for k in range(int(steps)):
        x, y = kept[k] if k < len(kept) else (batches[0][0][:0], batches[0][1][:0])
        losses = (model(x).squeeze(1) - y).square()
        count = torch.tensor(len(y))
        dist.all_reduce(count)
        model.zero_grad()
        (losses.sum() / count).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
        total += torch.tensor([losses.sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- no step where all errors are zero: the first step was left out ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        sums = torch.stack([losses.detach().sum(), labelled.sum().double()])
        dist.all_reduce(sums)
        total += sums
        if sums[0] == 0:
            continue  # nobody has an error
        model.zero_grad()
        (losses.sum() / sums[1]).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
    return (total[0] / total[1]).item()


# ---- decay of the weights after the step: (?s:.*)in decay . p ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        count = labelled.sum()
        dist.all_reduce(count)
        if count == 0:
            continue
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        model.zero_grad()
        (losses.sum() / count).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * p.grad
                p -= lr * decay * p
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- labels overwritten: the batches were changed ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        labels[~labelled] = 0  # a nan would spread
        losses = (model(inputs).squeeze(1) - labels).square() * labelled
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())
        if sum(counts) == 0:
            continue
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- rank 0 decides whether there is a step: step in which rank 0 has no label was left out ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        count = labelled.sum()
        go_on = (count > 0).int()
        dist.broadcast(go_on, 0)
        if not go_on:
            continue
        dist.all_reduce(count)
        model.zero_grad()
        (losses.sum() / count).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- a rank asks its left neighbour alone: 3 ranks: .*(no end|has ended|exception|differ) ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        count = labelled.sum()
        n, rank, other = dist.get_world_size(), dist.get_rank(), torch.zeros_like(count)
        work = dist.isend(count, (rank + 1) % n)
        dist.recv(other, (rank - 1) % n)
        work.wait()
        if count + other == 0:
            continue
        dist.all_reduce(count)
        model.zero_grad()
        (losses.sum() / count).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- the loss taken after the step: (?s:.*)as it is before its step ----
def train(model, batches, lr, decay):
    total = torch.zeros(2, dtype=torch.float64)
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
            losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
