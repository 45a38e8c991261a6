"""The check of exercises/19_middle_of_an_epoch.py."""

import random
from itertools import islice, pairwise

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect

LENGTH = 4099
# The lives of a job: (ranks, batch_size, steps until it is killed; None: to the end of the epoch).
JOBS = [
    [(64, 256, 5), (24, 256, 2), (1, 256, 1), (7, 100, 9), (32, 256, None)],
    [(16, 250, 3), (5, 64, 2), (2, 997, 1), (3, 100, None)],
]


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    answer.hash = no_hash
    before = torch.get_rng_state(), random.getstate()
    with Exchanges() as exchanges:
        order = dealt(LENGTH, 256, 3, 0, 0, 0, 1)
    expect(not exchanges.calls, "it makes an exchange", "rank and world_size say all that it needs")
    order = [item for share in order for item in share]
    look_at_order(order)
    others = [
        (3, 1),
        (3, 2),
        (3, 1000),
        (3, 2**31 - 1),
        (4, 0),
        (2**31 - 1, 0),
        (0, 0),
        (3, 256),
        (3 + 2**30, 0),
        (3, 2**30),
    ]
    for seed, epoch in others[rank::world_size]:
        other = [item for share in dealt(LENGTH, 256, seed, epoch, 0, 0, 1) for item in share]
        look_at_two(f"epoch {epoch} of seed {seed} and epoch 0 of seed 3", order, other)
    of_0 = [
        [item for share in dealt(LENGTH, 256, 0, epoch, 0, 0, 1) for item in share]
        for epoch in (0, 1)
    ]
    look_at_two("epoch 1 of seed 0 and epoch 0 of seed 0", *of_0)
    for job in JOBS[rank % 2 :: 2]:
        look_at_job(order, job)
    for length, batch_size, seen, ranks in [(5, 8, 0, 9), (9, 4, 7, 3), (1, 1, 0, 2), (6, 3, 6, 2)]:
        few = [item for share in dealt(length, batch_size, 5, 6, 0, 0, 1) for item in share]
        look_at_life(few, length, batch_size, (5, 6), seen, ranks, None)
    expect(
        torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate(),
        "after the call, torch.rand or random.random goes on with other numbers than before",
        "torch.manual_seed and random.seed change what all others draw, too, and a DataLoader"
        " draws a number for its workers, if it gets no generator",
        "torch.Generator() and random.Random() have numbers of their own",
    )
    lives = [ranks for job in JOBS for ranks, *_ in job]
    return f"each of {LENGTH} items once, in jobs of {lives[:5]} and {lives[5:]} ranks"


def dealt(*args):
    """Call what the learner wrote; return a list of lists."""
    length, batch_size, seed, epoch, seen, rank, world_size = args
    called = (
        f"batches({length}, {batch_size}, seed={seed}, epoch={epoch}, seen={seen},"
        f" rank={rank}, world_size={world_size})"
    )
    steps = answer.batches(*args)
    expect(
        hasattr(steps, "__iter__"),
        f"{called} returned {steps!r}",
        "return a list, or write a generator with yield",
    )
    before, steps = (torch.get_rng_state(), random.getstate()), iter(steps)
    first = list(islice(steps, 1))
    expect(
        torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate(),
        "when the first step is taken, torch.rand or random.random goes on with other numbers"
        " than before",
        "torch.Generator() and random.Random() have numbers of their own. (A"
        " DataLoader draws a number, if it gets no generator)",
        "a function with yield stands still there while the training runs: what it has changed"
        " stays changed",
    )
    steps = first + list(steps)
    full = [id(one) for one in steps if len(one)]
    expect(
        len(set(full)) == len(full),
        f"{called} has one and the same list for several steps",
        "a list that is filled anew changes what was given before: make one for each step",
    )
    kinds = {type(one).__name__ for one in steps} - {"list"}
    expect(
        not kinds,
        f"{called} has {min(kinds, default='')} for a step, not list",
        "yield one list for each step. A tensor becomes a list by tolist()",
    )
    kinds = {type(item).__name__ for share in steps for item in share} - {"int"}
    expect(
        not kinds,
        f"{called} has a {min(kinds, default='')} in a step, not an int",
        "a tensor becomes a list of ints by tolist()",
    )
    wrong = [item for share in steps for item in share if not 0 <= item < length]
    expect(
        not wrong,
        f"{called} has {len(wrong)} numbers that no item has, such as {wrong[:1]}",
        f"the items have the numbers 0 to {length - 1}",
    )
    return steps


def look_at_order(order):
    told = f"with seen=0 on one rank, the epoch has {len(order)} items"
    expect(
        len(set(order)) == len(order),
        f"{told}, and {len(order) - len(set(order))} of them come twice",
        "a shuffle has each item once: torch.randperm, random.shuffle",
    )
    expect(
        len(order) == LENGTH,
        f"{told}, and there are {LENGTH}",
        "nothing is left out: the last"
        " batch is shorter, and with rank=0 and world_size=1, a share is the whole batch",
        "rank and world_size are the arguments, not those of a process group",
    )
    after = sum(b - a == 1 for a, b in pairwise(order))
    expect(
        after < LENGTH / 50,
        f"{after} of {LENGTH} items follow the item with the number before theirs",
        "an epoch is a shuffle of all items",
    )
    spread = min(
        max(order[at : at + 256]) - min(order[at : at + 256]) for at in range(0, LENGTH - 256, 256)
    )
    expect(
        spread > LENGTH / 2,
        f"there are 256 items after each other whose numbers are all within {spread + 1}",
        "shuffle all items at once, then cut the batches",
    )


def look_at_two(what, order, other):
    """Two shuffles share next to no pair of neighbours."""
    pairs = [set(pairwise(one)) for one in (order, other)]
    same = len(pairs[0] & pairs[1])
    expect(
        same < LENGTH / 50,
        f"{what} have the same order: {same} of {LENGTH} items are followed by the same one",
        "seed and epoch both say how to shuffle, and torch.Generator, on the"
        " CPU, looks only at the lower 32 bits of its seed",
    )


def look_at_job(order, job):
    """Play all lives of a job, on all its ranks."""
    seen, once = 0, []
    for ranks, batch_size, killed in job:
        done = look_at_life(order, LENGTH, batch_size, (3, 0), seen, ranks, killed)
        once += done
        seen += len(done)
    expect(
        sorted(once) == list(range(LENGTH)),
        f"over the lives of {[n for n, *_ in job]} ranks,"
        f" {len(once) - len(set(once))} items come twice, and {LENGTH - len(set(once))} never",
        "each life goes on behind the items that were seen",
    )


def look_at_life(order, length, batch_size, seed_and_epoch, seen, ranks, killed):
    """Play one life. Return the items that it has seen when it is killed."""
    told = f"with world_size={ranks}, length={length}, batch_size={batch_size}, seen={seen}:"
    shares = [
        dealt(length, batch_size, *seed_and_epoch, seen, rank, ranks) for rank in range(ranks)
    ]
    counts, right = [len(steps) for steps in shares], -(-(length - seen) // batch_size)
    for rank, count in enumerate(counts):
        expect(
            count == right,
            f"{told} rank {rank} has {count} step(s), and {right} are left",
            "the steps are those of all ranks together, each with batch_size items",
            "all ranks have equally many steps, the last one with an empty list if need be",
        )
    for step in range(right)[:killed]:
        start = seen + step * batch_size
        batch = order[start : start + batch_size]
        found = [item for steps in shares for item in steps[step]]
        told_step = f"{told} step {step} of this life"
        expect(
            len(found) == len(set(found)),
            f"{told_step} has {len(found)} items on all ranks,"
            f" and {len(found) - len(set(found))} of them twice",
            "cut a batch into shares",
            "rank and world_size are the arguments, not those of a process group",
        )
        expect(
            len(found) == len(batch),
            f"{told_step} has {len(found)} items on all ranks, not {len(batch)}",
            "batch_size counts the items of all ranks; a share may be one longer than others",
        )
        expect(
            set(found) == set(batch),
            f"{told_step} has {len(set(found) - set(batch))} items"
            f" that do not stand at {start} to {start + len(batch) - 1} in the shuffle",
            "first cut what is left of the shuffle into batches, as on one rank, then each batch"
            " into shares. seen need not be a multiple of batch_size",
            "what depends on rank or world_size, and should not?",
        )
        lengths = sorted(len(steps[step]) for steps in shares)
        expect(
            lengths[-1] - lengths[0] < 2,
            f"{told_step} has shares of {lengths[0]} to {lengths[-1]} items",
            "deal them out like cards",
        )
    return [item for step in range(right)[:killed] for steps in shares for item in steps[step]]


def no_hash(value):
    expect(
        isinstance(value, (int, tuple)) and "'" not in repr(value),
        f"hash({value!r}) is another number in each life of the job",
        "Python salts the hash of a text, in each process",
    )
    return hash(value)
