# ---- as torch's sampler seeds it, and shares after each other ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    generator = torch.Generator().manual_seed(seed + epoch)
    left = torch.randperm(length, generator=generator)[seen:]
    return [batch.tensor_split(world_size)[rank].tolist()
            for batch in left.split(batch_size)] if len(left) else []


# ---- numpy mixes seed and epoch; the shares go round ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    import numpy
    order = numpy.random.default_rng([seed, epoch]).permutation(length)
    for step, start in enumerate(range(seen, length, batch_size)):
        yield order[start : start + batch_size][(rank + step) % world_size :: world_size].tolist()


# ---- keys to sort by, from sha256 ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    import hashlib
    order = sorted(range(length), key=lambda item: hashlib.sha256(
        f"{seed} {epoch} {item}".encode()).digest())
    batch = []
    for item in order[seen:]:
        batch.append(item)
        if len(batch) == batch_size:
            yield batch[rank::world_size]
            batch = []
    if batch:
        yield batch[rank::world_size]


# ---- a class, which draws from torch and puts its numbers back; backwards ----
class Batches:
    def __init__(self, order, batch_size, rank, world_size):
        self.order, self.batch_size, self.rank, self.ranks = order, batch_size, rank, world_size

    def __iter__(self):
        while self.order:
            batch, self.order = self.order[-self.batch_size :], self.order[: -self.batch_size]
            yield batch[::-1][self.rank :: self.ranks]


def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash((seed, epoch)))
        order = torch.randperm(length).tolist()
    return Batches(order[: length - seen], batch_size, rank, world_size)


# ---- a place for each item, by the step ----
def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    import random
    order = list(range(length))
    random.Random(seed * 2**31 + epoch).shuffle(order)
    steps = [[] for _ in range(-(-(length - seen) // batch_size))]
    for place in range(seen, length):
        if (place - seen) % batch_size % world_size == rank:
            steps[(place - seen) // batch_size].append(order[place])
    return iter(steps)


# ---- a permutation that is computed ----
import hashlib

class Shuffle:
    def __init__(self, length, seed, epoch):
        self.length, self.half = length, (max(length - 1, 1).bit_length() + 1) // 2
        self.key = f"{seed}/{epoch}/".encode()

    def round(self, number, right):
        digest = hashlib.blake2b(self.key + b"%d/%d" % (number, right), digest_size=8).digest()
        return int.from_bytes(digest, "big") & ((1 << self.half) - 1)

    def __getitem__(self, place):
        while True:
            left, right = place >> self.half, place & ((1 << self.half) - 1)
            for number in range(4):
                left, right = right, left ^ self.round(number, right)
            place = left << self.half | right
            if place < self.length:
                return place

def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    shuffle = Shuffle(length, seed, epoch)
    for start in range(seen, length, batch_size):
        places = range(start, min(start + batch_size, length))
        yield [shuffle[place] for place in places[rank::world_size]]
