"""The check of exercises/01_share_the_data.py."""

from itertools import pairwise

import answer
import torch
import torch.distributed as dist
from checker import expect

COUNTS = 103, 103, 103, 104  # in each epoch; on 2 or 3 ranks, 0 to 2 are left over


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    epochs, neighbours = [], []
    for epoch, count in enumerate(COUNTS):
        torch.manual_seed(1000 * rank + epoch)  # ranks do not draw the same numbers by themselves
        mine = answer.my_share(count, epoch, rank, world_size)
        torch.manual_seed(7 + rank)
        expect(isinstance(mine, list), f"a {type(mine).__name__} came back", "return a list")
        expect(not any(map(torch.is_tensor, mine)), "the list has tensors in it",
               "a whole tensor has tolist()")
        expect(mine == answer.my_share(count, epoch, rank, world_size),
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
