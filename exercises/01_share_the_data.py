"""Share the data: each rank trains on items of its own, and none is left out or taken twice.

A rank is one process of the job; the ranks are numbered from 0 to world_size - 1. Each can read
the whole dataset, and decides by itself which items are its own: nothing has to be sent. Write
my_share.

Read before: 01_single_node_multi_gpu.py, where DistributedSampler does this. It makes the shares
equal: it leaves some items out, or takes some twice. Yours must do neither.

    python exercises/01_share_the_data.py

Next: exercises/02_mean_of_unequal_shares.py
"""

import torch
import torch.distributed as dist


def my_share(count, epoch, rank, world_size):
    """Return the numbers of the items that this rank takes in this epoch: a list of int.

    The list is in the order of use, and that order is random, too: do not sort it.

    The items have the numbers 0 to count - 1. Over all ranks, each item is in one share, once. The
    lengths of two shares differ by 1 at most. Each epoch has another random order of all items.

    A call with the same arguments gives the same list again, in any process. Use the arguments
    alone: the checker also asks for the shares of 64 ranks, with two processes. There may be fewer
    items than ranks.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
