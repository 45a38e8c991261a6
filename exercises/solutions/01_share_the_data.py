import torch


def my_share(count, epoch, rank, world_size):
    # The seed is the epoch alone: so all ranks shuffle alike without a word between them. Slices
    # with a step differ by one item at most, and, with equal batches, step k of any number of ranks
    # has the same items. DistributedSampler does the same, then fills up the shares: with unequal
    # ones, a rank would have a batch more, and wait in it for the others.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[rank::world_size]
