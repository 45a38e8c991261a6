import random


def shuffled(length, seed, epoch):
    return random.Random(f"{seed}-{epoch}").sample(range(length), length)


# ---- from the beginning again: rank 0 has 17 step\(s\), and 12 are left ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    for start in range(0, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- DistributedSampler, and its own steps skipped: step 0 of this life has 240 items on all ranks, not 256 ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    sampler = torch.utils.data.DistributedSampler(range(length), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    mine, own = list(sampler)[seen // world_size :], max(1, batch_size // world_size)
    return [mine[start : start + own] for start in range(0, len(mine), own)]


# ---- shares of the epoch, not of the batch: items on all ranks, not 2\d\d ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    mine = shuffled(length, seed, epoch)[seen:][rank::world_size]
    steps = -(-(length - seen) // batch_size)
    own = -(-batch_size // world_size)
    for step in range(steps):
        yield mine[step * own : (step + 1) * own]


# ---- the last batch dropped: the epoch has 4096 items, and there are 4099 ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    for start in range(seen, length - batch_size + 1, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- the last batch filled up: the epoch has 4352 items, and 253 of them come twice ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    order += order[: -length % batch_size]
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- a short batch dropped by a rank without a share: rank 3 has 16 step\(s\), and 17 are left ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    for start in range(seen, length, batch_size):
        if share := order[start : start + batch_size][rank::world_size]:
            yield share


# ---- floor of the share: has 16 items on all ranks|items on all ranks, not ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    for start in range(seen, length, batch_size):
        batch = order[start : start + batch_size]
        own = len(batch) // world_size
        yield batch[rank * own : (rank + 1) * own]


# ---- shares of a fixed length: has shares of \d+ to \d+ items ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    for start in range(seen, length, batch_size):
        own = -(-batch_size // world_size)
        yield order[start : start + batch_size][rank * own : (rank + 1) * own]


# ---- a shuffle for each rank: do not stand at \d+ to \d+ in the shuffle|and \d+ of them twice ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed + rank, epoch)
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- what is left shuffled anew: do not stand at \d+ to \d+ in the shuffle|come twice ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    order[seen:] = random.Random(seen).sample(order[seen:], length - seen) if seen else order
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- the same order in each epoch: epoch \d+ of seed 3 and epoch 0 of seed 3 have the same order ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, 0)
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- the epoch turns the order round: have the same order: 409\d of 4099 ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, 0)
    order = order[epoch % length :] + order[: epoch % length]
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- seed times epoch: have the same order ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed * epoch, 0)
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- a seed of more than 32 bits: epoch 0 of seed \d+ and epoch 0 of seed 3 have the same order ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    generator = torch.Generator().manual_seed(seed * 2**32 + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- the batches shuffled, not the items: follow the item with the number before ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = [list(range(start, min(length, start + batch_size)))
             for start in shuffled(length, seed, epoch) if start % batch_size == 0]
    order = sum(order, [])
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- shuffled within a buffer: whose numbers are all within ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    own, order, buffer = random.Random(f"{seed}-{epoch}"), [], []
    for item in range(length):
        buffer.append(item)
        if len(buffer) > 300:
            order.append(buffer.pop(own.randrange(300)))
    order += own.sample(buffer, len(buffer))
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- torch's own seed changed: goes on with other numbers than before ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist()
    return [order[start : start + batch_size][rank::world_size]
            for start in range(seen, length, batch_size)]


# ---- Python's own seed changed: goes on with other numbers than before ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    random.seed(f"{seed}-{epoch}")
    order = random.sample(range(length), length)
    return [order[start : start + batch_size][rank::world_size]
            for start in range(seen, length, batch_size)]


# ---- the hash of a text: is another number in each life of the job ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = random.Random(hash(f"{seed}-{epoch}")).sample(range(length), length)
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- the rank of the process group: the epoch has 4082 items, and there are 4099|and 252 of them twice ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    import torch.distributed as dist
    order = shuffled(length, seed, epoch)
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][dist.get_rank() :: world_size]


# ---- tensors: has Tensor for a step, not list ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(length, generator=generator)
    return [part[rank::world_size] for part in order[seen:].split(batch_size)]


# ---- seen counted in batches: rank \d has \d+ step.s., and \d+ are left|do not stand at 2048 to 2147 ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = shuffled(length, seed, epoch)
    for start in range(seen // batch_size * batch_size, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- seed times epoch: epoch 1 of seed 0 and epoch 0 of seed 0 ----
import random

def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = list(range(length))
    random.Random(seed * (epoch + 1)).shuffle(order)
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- a shifted seed: have the same order ----
import torch

def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    generator = torch.Generator().manual_seed((seed << 16) + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# ---- puts the numbers back at the end: goes on with other numbers ----
import torch

def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + epoch)
        order = torch.randperm(length).tolist()
        for start in range(seen, length, batch_size):
            yield order[start : start + batch_size][rank::world_size]


# ---- one list, filled anew for each step: one and the same list for several steps ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(100_003 * seed + epoch))
    order, mine = order.tolist()[seen:], []
    for first in range(0, len(order), batch_size):
        mine[:] = order[first : first + batch_size][rank::world_size]
        yield mine
