"""Gather with gradients: each rank compares its rows with those of all, and all ranks learn.

A contrastive loss compares each row with its partner and with all other rows of the batch. But a
rank has only its share of the batch. dist.all_gather fetches the rows of the others, but PyTorch's
autograd does not see through it: what the loss says about a row of another rank never gets there.
Write gather, which sends the gradients back to the ranks from which the rows came.

Read before: 04_collectives.py, the sections all_gather and reduce_scatter, and, in PyTorch's notes,
"Extending torch.autograd": a torch.autograd.Function has a forward and a backward of your own.
recipes/contrastive.py compares what goes wrong here (and has the answer). (PyTorch's own gather
with gradients, in torch.distributed.nn.functional, is deprecated in 2.15, and wrong on a CPU if the
gradient of its result is not contiguous.)

    python exercises/12_gather_with_gradients.py
"""

import torch
import torch.distributed as dist


def gather(rows):
    """Return the rows of all ranks, in the order of the ranks, shape (world_size * n, d).

    rows: this rank's, shape (n, d), alike on all ranks.

    Then each rank computes a loss of its own from the result, and calls backward() on it. The
    gradient that reaches rows has to be that of the sum of all ranks' losses: a row's copies on all
    ranks count. (Why the sum, without a factor: DDP takes the mean of the weights' gradients
    later.) No rank sends more in backward() than an all_reduce of a tensor of the result's shape
    sends.

    Neither rows nor the gradient that comes from the loss need be contiguous (one row after the
    other in memory). NCCL wants that; Gloo does not complain. Both stay as they are. A loss may
    need several calls of gather.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
