"""The mean over unequal shares: the loss that one process would report for all items.

Each rank has computed the losses of its own items. The ranks have different numbers of items; one
may have none at all. Write global_mean, so that each rank returns the mean over all items.

Read before: 04_collectives.py, the section all_reduce. A collective is a call that every rank makes
with a tensor of the same shape and dtype. If one does not come, the others wait.

    python exercises/02_mean_of_unequal_shares.py
"""

import math

import torch
import torch.distributed as dist
from checker import Exchanges, expect, main


def global_mean(losses):
    """Return the mean of the losses of all ranks, as a float; the same one on each rank.

    losses: this rank's, shape (n,); n differs from rank to rank, and may be 0, but not on all
    ranks. Do not change it.
    A few numbers are sent, however many losses there are: 64 bytes on a rank at most.
    """
    raise NotImplementedError


# ---- The check: what must hold, and what to say if it does not ----


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for case, counts in enumerate(([3, 1, 5, 2], [4, 0, 2, 0])):
        shares = [torch.randn(n, generator=torch.Generator().manual_seed(10 * case + r)) + r
                  for r, n in enumerate(counts[:world_size])]
        mine, right = shares[rank].clone(), torch.cat(shares).mean().item()
        with Exchanges() as exchanges:
            answer = global_mean(mine)
        expect(isinstance(answer, float), f"{answer!r} came back", "return a float: tensor.item()")
        expect(torch.equal(mine, shares[rank]), "the losses were changed",
               "all_reduce works in place: give it a tensor of your own")
        told = (f"with {counts[:world_size]} items, the mean is {right:.4f}, and this rank returns"
                f" {answer:.4f}")
        if abs(answer - right) < 1e-5:
            continue
        expect(math.isfinite(answer), told,
               "the mean of no items is 0 / 0: exchange sums, not means")
        expect(len(mine), told, "a rank without items has something to add, too: which numbers?",
               "if it leaves before the exchange, the others wait for it there")
        expect(abs(answer - shares[rank].mean().item()) > 1e-5, f"{told}: that of its own items",
               "which collective adds up over the ranks, and leaves the sum on each of them?")
        of_means = torch.stack([share.mean().nan_to_num() for share in shares]).mean().item()
        expect(abs(answer - of_means) > 1e-5, f"{told}: the mean of the ranks' means",
               "an item of a small share must not count more than one of a large share",
               "exchange two numbers: the sum of the losses, and how many there are")
        expect(False, told, "what has the same shape on all ranks, and what is it divided by?",
               "a sum, and by the number of items of all ranks, which no rank knows by itself")
    sent = exchanges.bytes_sent()
    expect(sent <= 64, f"{sent} bytes were sent for a mean",
           "two numbers from each rank are enough, in one tensor; the losses themselves can stay"
           " where they are (and an object travels as a pickle, which is larger)")
    off = abs(answer - right)
    return f"off by {off:.0e}, {len(exchanges.calls)} exchange(s), {sent} bytes sent"


if __name__ == "__main__":
    main(__file__)
