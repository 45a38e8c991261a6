# ---- nothing shared: more than once ----
def my_share(count, epoch, rank, world_size):
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()


# ---- a seed for each rank: in more than one share, and \d+ in none ----
def my_share(count, epoch, rank, world_size):
    seeded = torch.Generator().manual_seed(1000 * epoch + rank)
    return torch.randperm(count, generator=seeded).tolist()[rank::world_size]


# ---- the global generator: two calls for epoch 0 gave different lists ----
def my_share(count, epoch, rank, world_size):
    return torch.randperm(count).tolist()[rank::world_size]


# ---- filled up, as DistributedSampler does: more than once ----
from torch.utils.data import DistributedSampler


def my_share(count, epoch, rank, world_size):
    sampler = DistributedSampler(range(count), world_size, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


# ---- the rest dropped: in no share ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[rank::world_size][: count // world_size]


# ---- hard-coded for two ranks: more than once ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[: count // 2] if rank == 0 else order[count // 2 :]


# ---- the rest to the last rank: have lengths of ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    size = count // (2 * world_size)
    return order[rank * size : None if rank == world_size - 1 else (rank + 1) * size]


# ---- always the same order: two epochs have the same order ----
def my_share(count, epoch, rank, world_size):
    return list(range(count))[rank::world_size]


# ---- own items shuffled: the same items in two epochs ----
def my_share(count, epoch, rank, world_size):
    mine = torch.arange(count)[rank::world_size]
    seeded = torch.Generator().manual_seed(epoch)
    return mine[torch.randperm(len(mine), generator=seeded)].tolist()


# ---- tensors in the list: has Tensor in it, and not int ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return list(order[rank::world_size])


# ---- one order, begun elsewhere in each epoch: items have the same item after them ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).roll(5 * epoch)
    return order[rank::world_size].tolist()


# ---- equal shares, and the rest to the last: have lengths of ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    size = count // world_size
    return order[rank * size : None if rank == world_size - 1 else (rank + 1) * size]


# ---- as many ranks as the job has: for 64 ranks and 1000 items, .* in more than one share ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[dist.get_rank() :: dist.get_world_size()]


# ---- a seed from the hash of a string: two calls for epoch 0 (?s:.*)hash.. of a string ----
def my_share(count, epoch, rank, world_size):
    seed = hash(f"epoch {epoch}") % 2**31
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[rank::world_size]


# ---- drawn once, and remembered by each process: different lists|in more than one share ----
orders = {}


def my_share(count, epoch, rank, world_size):
    order = orders.setdefault((count, epoch), torch.randperm(count).tolist())
    return order[rank::world_size]


# ---- the epochs repeat themselves: 1000 epochs have 100 orders ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch % 100))
    return order[rank::world_size].tolist()


# ---- every k-th item: the order is not random: \d+ items have the same distance ----
def my_share(count, epoch, rank, world_size):
    step = 3 + 2 * (epoch % 4)
    return [(step * place + epoch) % count for place in range(count)][rank::world_size]


# ---- sorted shares: the order is not random: it is sorted ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return sorted(order[rank::world_size])


# ---- items numbered from 1: item \d+ is taken, and the items have the numbers 0 to ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)) + 1
    return order[rank::world_size].tolist()


# ---- the shares go round, own items shuffled: the same items in two epochs|the same item ----
import random


def my_share(count, epoch, rank, world_size):
    mine = [item for item in range(count) if (item + epoch) % world_size == rank]
    random.Random(epoch).shuffle(mine)
    return mine


# ---- a shuffle buffer: come before one whose number ----
import random
def my_share(count, epoch, rank, world_size):
    rng, buffer, order = random.Random(epoch), [], []
    for item in range(count):
        buffer.append(item)
        if len(buffer) > 16:
            order.append(buffer.pop(rng.randrange(len(buffer))))
    rng.shuffle(buffer)
    order += buffer
    return order[rank::world_size]


# ---- parts shuffled, and what is in them: come before one whose number ----
import random
def my_share(count, epoch, rank, world_size):
    rng = random.Random(epoch)
    shards = [list(range(i, min(i + 8, count))) for i in range(0, count, 8)]
    rng.shuffle(shards)
    order = []
    for shard in shards:
        rng.shuffle(shard)
        order += shard
    return order[rank * count // world_size : (rank + 1) * count // world_size]


# ---- rounds dealt out: of 1000 items on 8 rank\(s\), step by step, \d+ come before one ----
import random


def my_share(count, epoch, rank, world_size):
    rng, mine = random.Random(epoch), []
    starts = list(range(0, count, world_size))
    rng.shuffle(starts)
    for start in starts:
        dealt = list(range(start, min(start + world_size, count)))  # one card for each rank
        rng.shuffle(dealt)
        mine += dealt[rank : rank + 1]
    return mine


# ---- a seed from the clock: two calls for epoch 0 gave different lists ----
import time


def my_share(count, epoch, rank, world_size):
    generator = torch.Generator().manual_seed(int(time.time()) + epoch)  # another order in each run
    return torch.randperm(count, generator=generator).tolist()[rank::world_size]


# ---- the rest dealt from the last rank on: more than one share(?s:.*)order\[-0\] is order\[0\] ----
def my_share(count, epoch, rank, world_size):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    each = count // world_size
    share = order[rank * each : (rank + 1) * each]
    return share + [order[-rank]] * (rank < count % world_size)
