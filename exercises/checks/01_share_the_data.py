"""The check of exercises/01_share_the_data.py."""

import random
import time
from collections import Counter
from itertools import pairwise

import answer
import torch
import torch.distributed as dist
from checker import expect
from torch.utils._pytree import tree_leaves

COUNTS = 103, 103, 103, 104  # in each epoch; on 2 or 3 ranks, 0 to 2 are left over
ASKED = ((1000, 64, 50), (400, 16, 1), (5, 8, 0), (1, 3, 1))  # items, ranks, epoch
EPOCHS = 1000


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    epochs, neighbours, distances = [], [], Counter()
    for epoch, count in enumerate(COUNTS):
        mine = ask(rank, count, epoch, rank, world_size)
        hint = "a job that resumes must see the same order: seed a generator of your own"
        if ask.hashed:
            hint = "hash() of a string is another one in each process: seed with numbers"
        expect(
            mine == ask(7 + rank, count, epoch, rank, world_size),
            f"two calls for epoch {epoch} gave different lists",
            hint,
            "torch.randperm(count, generator=torch.Generator().manual_seed(...))",
        )
        shares = [None] * world_size
        dist.all_gather_object(shares, mine)
        lengths = check_shares(f"in epoch {epoch}", shares, count)
        epochs.append(mine)
        pairs = [pair for share in shares for pair in pairwise(share)]
        neighbours.append({frozenset(pair) for pair in pairs})
        distances.update((epoch, (other - one) % count) for one, other in pairs)
    expect(
        epochs[0] != epochs[1] != epochs[2] != epochs[0],
        "two epochs have the same order",
        "let the seed depend on the epoch",
    )
    expect(
        len({frozenset(one) for one in epochs[:3]}) == 3,
        "this rank gets the same items in two epochs, in another order",
        "shuffle all items first, then take a share",
    )
    expect(
        all(one != sorted(one) for one in epochs),
        "the order is not random: it is sorted",
        "shuffle all items first, then take a share",
    )
    same = len(neighbours[0] & neighbours[1])  # by chance, one or two
    expect(
        same < count / 4,
        f"in two epochs, {same} items have the same item after them",
        "not the old order from another place, and not sorted: draw a new one",
    )
    often = max(distances.values())  # by chance, five or six
    expect(
        often < count / 4,
        f"the order is not random: {often} items have the same distance to the one after them",
        "torch.randperm draws an order of which nothing can be foretold",
    )
    for count, ranks, epoch in ASKED:
        shares = [ask(r, count, epoch, r, ranks) for r in range(ranks)]
        check_shares(
            f"for {ranks} ranks and {count} items",
            shares,
            count,
            "count on the arguments alone: here, each rank asks for all shares",
        )
    for ranks in 1, 8:  # one item of each rank, then the next of each
        order = sum(zip(*(ask(rank, 1000, 0, r, ranks) for r in range(ranks)), strict=False), ())
        near = sum(abs(one - other) < 8 for one, other in pairwise(order))  # by chance, 15
        expect(
            near < 100,
            f"of 1000 items on {ranks} rank(s), step by step, {near} come before one"
            " whose number is less than 8 away",
            "shuffle all items at once: not those of a part or of a buffer",
        )
    orders = {tuple(answer.my_share(103, epoch, 0, 2)) for epoch in range(EPOCHS)}
    expect(
        len(orders) == EPOCHS,
        f"{EPOCHS} epochs have {len(orders)} orders",
        "each epoch has a seed of its own",
    )
    return f"{COUNTS[-1]} items, shares of {lengths}, each item once, in another order each epoch"


def ask(process, *arguments):
    """Call my_share as a process does that has random numbers and hashes of its own."""
    random.seed(process)
    torch.manual_seed(process)
    clock, time.time = time.time, lambda: 1e9 + 1000 * process
    ask.hashed = False

    def salted(one):
        text = any(isinstance(part, (str, bytes)) for part in tree_leaves(one))
        ask.hashed |= text
        return hash((process, one)) if text else hash(one)

    if getattr(answer, "hash", salted).__name__ == "salted":  # not the learner's own
        answer.hash = salted
    try:
        mine = answer.my_share(*arguments)
    finally:
        time.time = clock
    expect(isinstance(mine, list), f"a {type(mine).__name__} came back", "return a list")
    kinds = {type(item).__name__ for item in mine} - {"int"}
    expect(
        not kinds,
        f"the list has {', '.join(sorted(kinds))} in it, and not int",
        "a whole tensor has tolist(), and so has an array",
    )
    return mine


def check_shares(told, shares, count, hint=""):
    """Check that each item is in one share; return the lengths of the shares."""
    times = Counter(item for share in shares for item in share)
    strangers = times.keys() - set(range(count))
    expect(
        not strangers,
        f"{told}, item {min(strangers, default=0)} is taken, and the items have"
        f" the numbers 0 to {count - 1}",
        hint,
    )
    twice, missing = sum(number > 1 for number in times.values()), count - len(times)
    few = missing < len(shares) and "by which index does a rank get one of the rest? order[-0] is"
    expect(
        not (twice and missing),
        f"{told}, {twice} items are in more than one share, and {missing} in none",
        few and f"{few} order[0]" or hint or "do all ranks begin with the same order of all items?",
        "the seed must not depend on the rank",
    )
    expect(
        not twice,
        f"{told}, {twice} items are taken more than once",
        hint or "which items are this rank's? Do not fill up the shares to equal lengths",
    )
    expect(
        not missing,
        f"{told}, {missing} items are in no share",
        hint or "what becomes of the rest, if the number of ranks does not divide the count?",
    )
    lengths = [len(share) for share in shares]
    expect(
        max(lengths) - min(lengths) <= 1,
        f"{told}, the shares have lengths of {lengths}",
        "all[rank::world_size] takes every world_size-th item",
    )
    return lengths
