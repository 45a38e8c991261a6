import random


def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    # The number of ranks comes last: it cuts a batch, and says nothing about which items are in it.
    # So the global position is all that a snapshot needs. It counts what the training has done, not
    # what a DataLoader's workers have fetched already.
    # The generator is one of our own. From a text, random.Random makes a seed by sha512; hash()
    # would be another one in each process. (seed + epoch, which torch's DistributedSampler takes,
    # gives epoch 1 of seed 0 the order of epoch 0 of seed 1. And torch's generator for the CPU
    # looks only at the lower 32 bits of its seed.)
    order = list(range(length))
    random.Random(f"{seed} {epoch}").shuffle(order)
    for start in range(seen, length, batch_size):
        yield order[start : start + batch_size][rank::world_size]


# DistributedSampler cannot do this: it starts at the beginning, it fills up the shares, and a
# share depends on the number of ranks. torchdata's StatefulDataLoader goes on, but on as many ranks
# as before. If the shares of a batch differ, a mean over the ranks must weigh them: exercise 2.
