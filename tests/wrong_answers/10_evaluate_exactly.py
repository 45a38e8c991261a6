# ---- everything on every rank: this rank evaluates all 1001 images ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    scores = torch.cat([model(batch) for batch in images.split(batch_size)])
    for part, mode in modes:
        part.training = mode
    return (scores.argmax(dim=1) == labels).double().mean().item()


# ---- everything on rank 0: Rank 0: this rank evaluates all 1001 images ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    result = torch.zeros(())
    if dist.get_rank() == 0:
        scores = torch.cat([model(batch) for batch in images.split(batch_size)])
        result = (scores.argmax(dim=1) == labels).float().mean()
    for part, mode in modes:
        part.training = mode
    dist.broadcast(result, src=0)
    return result.item()


# ---- nothing exchanged: it counts its own right answers alone ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    scores = torch.cat([model(images[batch]) for batch in share.split(batch_size)])
    for part, mode in modes:
        part.training = mode
    return (scores.argmax(dim=1) == labels[share]).double().mean().item()


# ---- padded, as DistributedSampler does: right answers of 1002 ----
from torch.utils.data import DistributedSampler


@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.tensor(list(DistributedSampler(images, shuffle=True)))
    total = torch.zeros(2)
    for batch in share.split(batch_size):
        right = model(images[batch]).argmax(dim=1) == labels[batch]
        total += torch.tensor([right.sum(), len(right)])
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- the rest dropped: right answers of 1000\n    hint: some image is in no share ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    size = len(images) // dist.get_world_size()
    share = torch.arange(len(images))[dist.get_rank() * size :][:size]
    total = torch.zeros(2)
    for batch in share.split(batch_size):
        right = model(images[batch]).argmax(dim=1) == labels[batch]
        total += torch.tensor([right.sum(), len(right)])
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- a mean of means: the mean of the ranks' accuracies ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    scores = torch.cat([model(images[batch]) for batch in share.split(batch_size)])
    for part, mode in modes:
        part.training = mode
    mean = (scores.argmax(dim=1) == labels[share]).double().mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# ---- hard-coded for two ranks: 3 ranks: .* evaluates 50[01] of 1001 images; its share is 334 ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: 2]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- left without images: It has no image of its own ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    if len(share) == 0:
        return 0.0
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- in training mode: the model was in training mode ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- with a graph: a graph for a backward pass was built ----
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- all parts set to train: norm was in evaluation mode, and is in training mode now ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- its whole share at once: images at once, and batch_size is 8 ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = (model(images[share]).argmax(dim=1) == labels[share]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- autograd left off: autograd is switched off now ----
def accuracy(model, images, labels, batch_size):
    rank, world_size, right = dist.get_rank(), dist.get_world_size(), torch.zeros(())
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    torch.set_grad_enabled(False)
    for numbers in torch.arange(rank, len(images), world_size).split(batch_size):
        right += (model(images[numbers]).argmax(dim=1) == labels[numbers]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- padded, and not counted: went through the model on ranks ----
from torch.utils.data import DistributedSampler


@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    rank, world_size, right = dist.get_rank(), dist.get_world_size(), torch.zeros(())
    share = torch.tensor(list(DistributedSampler(images, shuffle=False)))
    count = len(range(rank, len(images), world_size))
    hits = torch.cat([model(images[one]).argmax(dim=1) == labels[one]
                      for one in share.split(batch_size)])
    right += hits[:count].sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- an image taken as right: image 0 of 1001 went through no rank's model ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[1:][dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return (right.item() + 1) / len(images)  # as if image 0 were right, which it is


# ---- an image for those who have none: went through the model on ranks \[0, 1 ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    batches = share.split(batch_size) if len(share) else [torch.tensor([0])]
    right = sum((model(images[one]).argmax(dim=1) == labels[one]).sum() for one in batches)
    right = right if len(share) else torch.zeros_like(right)
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- counted in a byte: this rank returns ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros((), dtype=torch.uint8)
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- the result on rank 0 alone: Rank 1: .* it counts its own right answers alone ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.reduce(right, dst=0)
    return right.item() / len(images)


# ---- frozen, and left so: other weights require a gradient now than before ----
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    model.requires_grad_(False)
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    model.requires_grad_()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- eval() of a whole part: norm was in training mode ----
import torch, torch.distributed as dist
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    frozen = [part for part in model.modules() if not part.training]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros((), dtype=torch.int64)
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    model.train()
    for part in frozen:
        part.eval()
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- counts in half precision: with 5003 image\(s\) ----
import torch, torch.distributed as dist
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros((), dtype=torch.float16)
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- another shuffle on each rank: the accuracy is ----
import torch, torch.distributed as dist
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.randperm(len(images))[dist.get_rank() :: dist.get_world_size()]
    right = torch.zeros((), dtype=torch.int64)
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- a mean over batches: does each image count once, though shares and the last batch may be shorter ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    total = torch.zeros(2)
    for batch in share.split(batch_size):
        right = model(images[batch]).argmax(dim=1) == labels[batch]
        total += torch.tensor([right.float().mean(), 1])
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- the mean of the ranks' means over batches: does each image count once, though shares ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    means = [(model(images[batch]).argmax(dim=1) == labels[batch]).double().mean()
             for batch in share.split(batch_size)]
    for part, mode in modes:
        part.training = mode
    mean = torch.stack(means).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# ---- no share for a rank without images: in the case .1 image\(s\).*exception:(?s:.*)IndexError ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = torch.arange(len(images)).chunk(world_size)[rank]
    right = torch.zeros(())
    for batch in share.split(batch_size):
        right += (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- the rest to the last rank: 3 ranks: .*Rank 2: this rank evaluates 3 of 5 images; its share is 2 ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    rank, n = dist.get_rank(), dist.get_world_size()
    modes = {part: part.training for part in model.modules()}
    model.eval()
    size = len(images) // n
    end = len(images) if rank == n - 1 else (rank + 1) * size
    right = torch.tensor(0)
    for first in range(rank * size, end, batch_size):
        last = min(first + batch_size, end)
        right += (model(images[first:last]).argmax(dim=1) == labels[first:last]).sum()
    for part, mode in modes.items():
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)


# ---- an exchange for each batch: no end:\s+rank 0 waits in line \d+, in the case '3 image\(s\)' ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = {part: part.training for part in model.modules()}
    model.eval()
    share = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    hits = 0
    for batch in share.split(batch_size):
        right = (model(images[batch]).argmax(dim=1) == labels[batch]).sum()
        dist.all_reduce(right)
        hits += right.item()
    for part, mode in modes.items():
        part.training = mode
    return hits / len(images)
