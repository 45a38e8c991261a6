"""Share the data: each rank trains on items of its own, and none is left out or taken twice.

A rank is one process of the job; the ranks are numbered from 0 to world_size - 1. Each can read
the whole dataset, and decides by itself which items are its own: nothing has to be sent. Write
my_share.

Read before: 01_single_node_multi_gpu.py, where DistributedSampler does this. It makes the shares
equal: it leaves some items out, or takes some twice. Yours shall do neither.

    python exercises/01_share_the_data.py
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from checker import expect, main


def my_share(count, epoch, rank, world_size):
    """Return the numbers of the items that this rank takes in this epoch: a list of int.

    They stand in the order in which the rank takes them, which is random, too: not sorted.

    The items have the numbers 0 to count - 1. Over all ranks, each item is in one share, once. The
    lengths of two shares differ by 1 at most. Each epoch has another random order of all items,
    and a call with the same arguments gives the same list again.
    """
    raise NotImplementedError


# ---- The check: what must hold, and what to say if it does not ----

COUNTS = 103, 103, 103, 104  # in each epoch; on 2 or 3 ranks, 0 to 2 are left over


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    epochs, neighbours = [], []
    for epoch, count in enumerate(COUNTS):
        torch.manual_seed(1000 * rank + epoch)  # ranks do not draw the same numbers by themselves
        mine = my_share(count, epoch, rank, world_size)
        torch.manual_seed(7 + rank)
        expect(isinstance(mine, list), f"a {type(mine).__name__} came back", "return a list")
        expect(not any(map(torch.is_tensor, mine)), "the list has tensors in it",
               "a whole tensor has tolist()")
        expect(mine == my_share(count, epoch, rank, world_size),
               f"two calls for epoch {epoch} gave different lists",
               "a job that resumes must see the same order: seed a generator of your own",
               "torch.randperm(count, generator=torch.Generator().manual_seed(...))")
        shares = [None] * world_size
        dist.all_gather_object(shares, mine)
        taken = sorted(item for share in shares for item in share)
        times = {item: taken.count(item) for item in range(count)}
        twice = [item for item, number in times.items() if number > 1]
        missing = [item for item, number in times.items() if number == 0]
        expect(not (twice and missing),
               f"in epoch {epoch}, {len(twice)} items are in more than one share,"
               f" and {len(missing)} in none",
               "do all ranks begin with the same order of all items?",
               "the seed must not depend on the rank")
        expect(not twice, f"in epoch {epoch}, {len(twice)} items are taken more than once",
               "which items are this rank's? Do not fill up the shares to equal lengths")
        expect(not missing, f"in epoch {epoch}, {len(missing)} items are in no share",
               "what becomes of the rest, if the number of ranks does not divide the count?")
        lengths = [len(share) for share in shares]
        expect(max(lengths) - min(lengths) <= 1, f"the shares have lengths of {lengths}",
               "all[rank::world_size] takes every world_size-th item")
        epochs.append(mine)
        neighbours.append({pair for share in shares for pair in pairwise(share)})
    expect(epochs[0] != epochs[1] != epochs[2] != epochs[0], "two epochs have the same order",
           "let the seed depend on the epoch")
    expect(set(epochs[0]) != set(epochs[1]),
           "this rank gets the same items in each epoch, in another order",
           "shuffle all items first, then take a share")
    same = len(neighbours[0] & neighbours[1])  # by chance, one or two
    expect(same < count / 4, f"in two epochs, {same} items have the same item after them",
           "not the old order from another place, and not sorted: draw a new one")
    expect(epochs[0] != sorted(epochs[0]), "the order is not random",
           "shuffle all items first, then take a share")
    return f"{count} items, shares of {lengths}, each item once, in another order each epoch"


if __name__ == "__main__":
    main(__file__)
