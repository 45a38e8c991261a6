"""The check of exercises/02_mean_of_unequal_shares.py."""

import math
import pickle

import answer
import torch
import torch.distributed as dist
from checker import Waiting, expect

# Losses on each rank. In the last case, ranks 0 and 1 have the same ones.
CASES = [3, 1, 5, 2], [4, 0, 2, 0], [0, 3, 0, 1], [701, 300, 2, 514], [2, 2, 5, 2]
MOST = 128  # bytes


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for case, counts in enumerate(CASES):
        counts = counts[:world_size]
        shares = [
            torch.randn(n, generator=torch.Generator().manual_seed(10 * case + r)) + r
            for r, n in enumerate(counts)
        ]
        for share in shares:
            share[2:3] = 0  # a loss of 0 is one, too
        if counts[0] == counts[1]:
            shares[1] = shares[0].clone()
        mine = shares[rank].clone()
        with Waiting() as exchanges:
            found = answer.global_mean(mine)
        exchanges.look_for_waits(f"with {counts} items,")
        expect(isinstance(found, float), f"{found!r} came back", "return a float: tensor.item()")
        expect(
            torch.equal(mine, shares[rank]),
            "the losses were changed",
            "all_reduce works in place: give it a tensor of your own",
        )
        off = check_value(found, shares, f"with {counts} items")
        sent = exchanges.bytes_sent()
        expect(
            exchanges.calls,
            f"with {counts} items, the mean is right, but nothing was sent",
            "which collective adds up over the ranks?",
        )
        expect(
            sent <= MOST,
            f"with {counts} items, {sent} bytes were sent for a mean",
            "two numbers from each rank are enough, in one tensor; the losses themselves can"
            " stay where they are (and an object travels as a pickle, which is larger)",
        )
        each = gathered(case, found)
        expect(
            len(set(each)) == 1,
            f"with {counts} items, the ranks return {each}: not the same",
            "the order in which numbers are added changes the last digits: add in the same one"
            " on all ranks",
            "ranks that decide by such a number do not decide alike",
        )
    look_at_few(rank, world_size)
    return f"off by {off:.0e}, {len(exchanges.calls)} exchange(s), {sent} bytes sent"


def look_at_few(rank, world_size):
    """Losses of which one is nan; and losses whose sum depends on the order, in float64, too."""
    found = answer.global_mean(torch.tensor([1, math.nan] if rank == 0 else [1.0]))
    expect(
        math.isnan(found),
        f"a loss on rank 0 is nan, and this rank returns {found}",
        "a mean that hides a nan hides that the training has failed",
    )
    found = answer.global_mean(torch.tensor([2.0**-23 if rank else 2.0**30]))
    each = gathered("few", found)
    expect(
        len(set(each)) == 1,
        f"the ranks return {each}: not the same",
        "the order in which"
        " numbers are added changes the last digits: add in the same one on all ranks",
        "ranks that decide by such a number do not decide alike",
    )


def check_value(found, shares, told):
    """Return by how much the mean is off."""
    mine, right = shares[dist.get_rank()], torch.cat(shares).double().mean().item()
    told += f", the mean is {right:.4f}, and this rank returns {found:.4f}"
    off = abs(found - right)
    if off < 1e-5:
        return off
    expect(math.isfinite(found), told, "the mean of no items is 0 / 0: exchange sums, not means")
    expect(
        len(mine),
        told,
        "a rank without items has something to add, too: which numbers?",
        "if it leaves before the exchange, the others wait for it there",
    )
    expect(
        abs(found - mine.mean().item()) > 1e-5,
        f"{told}: that of its own items",
        "which collective adds up over the ranks, and leaves the sum on each of them?",
    )
    expect(
        len(shares[0]) != len(shares[1]),
        told,
        "ranks 0 and 1 have the same losses here: do both count?",
        "a set keeps one of two equal pairs, a dict one of two equal keys",
    )
    of_means = torch.stack([share.mean().nan_to_num() for share in shares]).mean().item()
    expect(
        abs(found - of_means) > 1e-5,
        f"{told}: the mean of the ranks' means",
        "an item of a small share must not count more than one of a large share",
        "exchange two numbers: the sum of the losses, and how many there are",
    )
    expect(
        False,
        told,
        "what has the same shape on all ranks, and what is it divided by?",
        "a sum, and by the number of items of all ranks, which no rank knows by itself. And"
        " which dtype is sent? torch.tensor([0, 0]) holds integers alone",
    )


def gathered(key, value):
    """Return what all ranks have given, by way of the store: it meets no call of the learner's."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key} of {dist.get_rank()}", pickle.dumps(value))
    return [pickle.loads(store.get(f"{key} of {r}")) for r in range(dist.get_world_size())]
