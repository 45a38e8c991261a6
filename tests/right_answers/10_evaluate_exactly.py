# ---- a copy, frozen, and a loader ----
import copy

from torch.utils.data import DataLoader, Subset, TensorDataset


def accuracy(model, images, labels, batch_size):
    model = copy.deepcopy(model).eval().requires_grad_(False)
    places = range(dist.get_rank(), len(images), dist.get_world_size())
    loader = DataLoader(Subset(TensorDataset(images, labels), places), batch_size)
    total = torch.zeros(2, dtype=torch.float64)
    for some, wanted in loader:
        hits = model(some).max(dim=1).indices.eq(wanted)
        total += torch.tensor([hits.sum(), hits.numel()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- blocks, and the predictions gathered ----
@torch.inference_mode()
def accuracy(model, images, labels, batch_size):
    before = {part: part.training for part in model.modules()}
    model.train(False)
    size = -(-len(images) // dist.get_world_size())
    start = dist.get_rank() * size
    own = images[start : start + size]
    found = torch.full((size,), -1)
    for first in range(0, len(own), batch_size):
        batch = own[first : first + batch_size]
        found[first : first + len(batch)] = model(batch).argmax(-1)
    everyone = torch.empty(dist.get_world_size() * size, dtype=torch.int64)
    dist.all_gather_into_tensor(everyone, found)
    for part, mode in before.items():
        part.train(mode) if not list(part.children()) else setattr(part, "training", mode)
    return (everyone[: len(images)] == labels).float().mean().item()


# ---- batches dealt out, objects gathered ----
def accuracy(model, images, labels, batch_size):
    modes, hits = [part.training for part in model.modules()], 0
    model.eval()
    try:
        with torch.no_grad():
            batches = list(zip(images.split(batch_size), labels.split(batch_size)))
            for some, wanted in batches[dist.get_rank() :: dist.get_world_size()]:
                hits += int((model(some).argmax(dim=1) == wanted).count_nonzero())
    finally:
        for part, mode in zip(model.modules(), modes):
            part.training = mode
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, hits)
    return sum(counts) / len(labels)


# ---- messages to rank 0, which tells all ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    rank, ranks, right = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
    for some, wanted in zip(images[rank::ranks].split(batch_size),
                            labels[rank::ranks].split(batch_size)):
        if len(some):
            right += (model(some).argmax(dim=1) == wanted).sum()
    for part, mode in modes:
        part.training = mode
    if rank > 0:
        dist.send(right, 0)
        dist.recv(right, 0)
    else:
        theirs = torch.zeros(1)
        for other in range(1, ranks):
            dist.recv(theirs, other)
            right += theirs
        for other in range(1, ranks):
            dist.send(right, other)
    return (right / len(images)).item()


# ---- a context manager ----
import contextlib, torch, torch.distributed as dist
@contextlib.contextmanager
def evaluating(model):
    modes = {name: part.training for name, part in model.named_modules()}
    try:
        with torch.inference_mode():
            yield model.eval()
    finally:
        for name, part in model.named_modules():  # a parent comes before its children
            part.train(modes[name])
def accuracy(model, images, labels, batch_size):
    rank, n = dist.get_rank(), dist.get_world_size()
    wrong = 0
    with evaluating(model) as net:
        xs, ys = images.tensor_split(n)[rank], labels.tensor_split(n)[rank]
        for k in range(0, len(xs), batch_size):
            wrong += net(xs[k : k + batch_size]).argmax(1).ne(ys[k : k + batch_size]).sum().item()
    counts = torch.zeros(n, dtype=torch.int64)
    dist.all_gather_into_tensor(counts, torch.tensor([wrong]))
    return 1 - counts.sum().item() / len(images)


# ---- a confusion matrix ----
def accuracy(model, images, labels, batch_size):
    was = [part for part in model.modules() if part.training]
    model.eval()
    mine = torch.arange(len(images)) % dist.get_world_size() == dist.get_rank()
    some, wanted = images[mine], labels[mine]
    matrix = torch.zeros(9, dtype=torch.int64)
    with torch.no_grad():
        while len(some):
            found = model(some[:batch_size]).topk(1).indices.squeeze(1)
            matrix += torch.bincount(3 * wanted[:batch_size] + found, minlength=9)
            some, wanted = some[batch_size:], wanted[batch_size:]
    for part in was:
        part.training = True
    dist.all_reduce(matrix)
    return matrix.view(3, 3).trace().item() / matrix.sum().item()


# ---- filled up with zeros, which have no label ----
@torch.no_grad()
def accuracy(model, images, labels, batch_size):
    rank, world_size, count = dist.get_rank(), dist.get_world_size(), len(images)
    modes = [module.training for module in model.modules()]
    model.eval()
    missing = -count % world_size
    padded = torch.cat([images, images.new_zeros(missing, images.shape[1])])
    targets = torch.cat([labels, labels.new_full((missing,), -1)])
    correct = torch.tensor(0)
    for x, y in zip(padded[rank::world_size].split(batch_size),
                    targets[rank::world_size].split(batch_size)):
        correct += (model(x).argmax(dim=1) == y).sum()
    for module, mode in zip(model.modules(), modes):
        module.training = mode
    dist.all_reduce(correct)
    return correct.item() / count


# ---- a DataLoader with a worker ----
def accuracy(model, images, labels, batch_size):
    mine = torch.arange(len(images))[dist.get_rank() :: dist.get_world_size()]
    data = torch.utils.data.TensorDataset(images[mine], labels[mine])
    loader = torch.utils.data.DataLoader(data, 64 * batch_size, num_workers=1,
                                         multiprocessing_context="fork")  # else torch anew in each
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    right = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        for many in loader:
            for some, theirs in zip(*(part.split(batch_size) for part in many), strict=True):
                right += (model(some).argmax(dim=1) == theirs).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(right)
    return right.item() / len(images)
