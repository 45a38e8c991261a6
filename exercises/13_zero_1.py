"""Shard the optimizer's state: each rank keeps AdamW's numbers for its part of the weights alone.

AdamW keeps two numbers for each weight: an average of its gradient, and one of the gradient's
square. With DistributedDataParallel (DDP), each rank keeps them for all weights, and all ranks
compute the same step. Write ShardedAdamW: each of the N ranks owns a part of the weights. It keeps
the two numbers for this part, updates it, and gets the other parts from their owners. So the state
on a rank is an Nth, and after each step all ranks have the weights that one AdamW would have.

This is stage 1 of ZeRO (S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, 2020). Exercise 14 shards gradients and weights, too.

Read before: 04_collectives.py, the sections reduce_scatter and all_gather.

    python exercises/13_zero_1.py
"""

import torch
import torch.distributed as dist


class ShardedAdamW:
    """AdamW over all ranks, with the settings of torch.optim.AdamW(..., lr=lr).

    Between two steps, a rank keeps AdamW's two numbers for each weight of its own part, and, if you
    like, one copy of this part, but no gradient. Besides weights, it keeps nothing that is as long.
    No rank has more than the length divided by N, rounded up. (Collectives want parts of equal
    length: fill up the last.) You may let torch.optim.AdamW update the part.
    """

    def __init__(self, weights, lr):
        """Take the weights: one flat tensor, float64, the same on all ranks.

        Its length is more than N, and may be no multiple of N. It requires gradients: change it
        under torch.no_grad().
        """
        raise NotImplementedError

    def step(self):
        """Update the weights in place, with the mean of weights.grad over all ranks.

        weights.grad is this rank's gradient, of the same shape. It may be changed or freed. A step
        sends no more than one all_reduce of the weights does: 2 (N - 1) / N of their bytes. (Zeros
        that fill up the last part do not count. An all_reduce and an all_gather are too much.)
        """
        raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
