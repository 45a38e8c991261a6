"""Go on in the middle of an epoch, with any number of ranks.

A job is killed in the middle of an epoch, and goes on with more ranks, or fewer. Each item is to be
seen once in the epoch all the same. So it must not matter for the order of the items how many ranks
there are, or how many there were. Then one number tells how far the job has come: how many items
all ranks together have seen in this epoch. Write batches, which deals out what is left.

Read before: recipes/resume_mid_epoch.py, and exercise 1.

    python exercises/19_middle_of_an_epoch.py
"""

import torch


def batches(length, batch_size, seed, epoch, seen, rank, world_size):
    """Return this rank's share of each step that is left in the epoch: a list of ints for a step.

    The result is a list, or an iterator, of such lists. The items have the numbers 0 to length - 1.

    An epoch is a shuffle of all items, which follows from length, seed and epoch alone: in each
    life of the job, and on all ranks, it is the same one. Another epoch has another shuffle, and so
    has another seed. (Epoch 1 of seed 3 may have that of epoch 0 of seed 4.) seed and epoch are
    ints from 0 to 2**31 - 1.

    A step takes the next batch_size items of the shuffle, for all ranks together. The first `seen`
    items of the shuffle are done: go on behind them. seen may be any number from 0 to length. (The
    jobs before may have had another batch_size.) The last batch of the epoch may be shorter:
    nothing is left out, and nothing comes twice.

    Each item of a step goes to one rank. The ranks' shares of a step have equal lengths, or differ
    by one item. All ranks have equally many steps: if a batch is too short for all, then some get
    an empty list for it. The numbers rank and world_size are given, and no process group: exchange
    nothing. torch's own random numbers (torch.rand, Dropout), and those of Python's random, go on
    afterwards as if this had not been called.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
