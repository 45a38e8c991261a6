"""The check of exercises/02_mean_of_unequal_shares.py."""

import math

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for case, counts in enumerate(([3, 1, 5, 2], [4, 0, 2, 0])):
        shares = [torch.randn(n, generator=torch.Generator().manual_seed(10 * case + r)) + r
                  for r, n in enumerate(counts[:world_size])]
        mine, right = shares[rank].clone(), torch.cat(shares).mean().item()
        with Exchanges() as exchanges:
            found = answer.global_mean(mine)
        expect(isinstance(found, float), f"{found!r} came back", "return a float: tensor.item()")
        expect(torch.equal(mine, shares[rank]), "the losses were changed",
               "all_reduce works in place: give it a tensor of your own")
        told = (f"with {counts[:world_size]} items, the mean is {right:.4f}, and this rank returns"
                f" {found:.4f}")
        if abs(found - right) < 1e-5:
            continue
        expect(math.isfinite(found), told,
               "the mean of no items is 0 / 0: exchange sums, not means")
        expect(len(mine), told, "a rank without items has something to add, too: which numbers?",
               "if it leaves before the exchange, the others wait for it there")
        expect(abs(found - shares[rank].mean().item()) > 1e-5, f"{told}: that of its own items",
               "which collective adds up over the ranks, and leaves the sum on each of them?")
        of_means = torch.stack([share.mean().nan_to_num() for share in shares]).mean().item()
        expect(abs(found - of_means) > 1e-5, f"{told}: the mean of the ranks' means",
               "an item of a small share must not count more than one of a large share",
               "exchange two numbers: the sum of the losses, and how many there are")
        expect(False, told, "what has the same shape on all ranks, and what is it divided by?",
               "a sum, and by the number of items of all ranks, which no rank knows by itself")
    sent = exchanges.bytes_sent()
    expect(sent <= 64, f"{sent} bytes were sent for a mean",
           "two numbers from each rank are enough, in one tensor; the losses themselves can stay"
           " where they are (and an object travels as a pickle, which is larger)")
    off = abs(found - right)
    return f"off by {off:.0e}, {len(exchanges.calls)} exchange(s), {sent} bytes sent"
