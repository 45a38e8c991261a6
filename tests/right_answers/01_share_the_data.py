# ---- the random module, in blocks ----
import random


def my_share(count, epoch, rank, world_size):
    order = list(range(count))
    random.Random(epoch).shuffle(order)
    return order[rank * count // world_size : (rank + 1) * count // world_size]


# ---- the global generator, seeded ----
def my_share(count, epoch, rank, world_size):
    torch.manual_seed(epoch)
    order = torch.rand(count).argsort()
    return [item for place, item in enumerate(order.tolist()) if place % world_size == rank]


# ---- one stream of random numbers, as far as the epoch ----
def my_share(count, epoch, rank, world_size):
    generator = torch.Generator().manual_seed(1234 + epoch)
    weights = torch.ones(count)
    order = torch.multinomial(weights, count, generator=generator)
    return order.tensor_split(world_size)[rank].tolist()


# ---- sorted by a hash of numbers ----
def my_share(count, epoch, rank, world_size):
    order = sorted(range(count), key=lambda item: hash((epoch, item, 17)))
    return order[rank::world_size]


# ---- rank 0 draws, the others get it from there ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    dist.broadcast(order, src=0)
    return order[rank::world_size].tolist()


# ---- numpy's generator ----
import numpy as np
def my_share(count, epoch, rank, world_size):
    order = np.random.default_rng([17, epoch]).permutation(count)
    return np.array_split(order, world_size)[rank].tolist()


# ---- the order after so many others ----
def my_share(count, epoch, rank, world_size):
    generator = torch.Generator().manual_seed(0)
    for _ in range(epoch + 1):
        order = torch.randperm(count, generator=generator)
    return order[rank::world_size].tolist()
