# ---- everything on every rank: this rank evaluates all 101 images ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    scores = torch.cat([model(batch) for batch in images.split(batch_size)])
    for part, mode in modes:
        part.training = mode
    return (scores.argmax(dim=1) == labels).double().mean().item()


# ---- everything on rank 0: Rank 0: this rank evaluates all 101 images ----
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


# ---- padded, as DistributedSampler does: right answers of 102 ----
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


# ---- the rest dropped: right answers of 100 ----
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


# ---- hard-coded for two ranks: 3 ranks: .* evaluates 51 of 101 images; its share is 34 ----
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
