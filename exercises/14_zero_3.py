"""Shard weights and gradients, too: gather a layer's weights when it runs, and free them after.

With DistributedDataParallel (DDP), each of the N ranks has rows of its own, and all weights. Here a
rank keeps an Nth of each layer's weights. To run a layer, all ranks gather its whole weights, use
them, and free them; in the backward pass they gather them again. Each rank computes a gradient for
the whole layer from its own rows. But what it keeps of the mean is the gradient of its part alone.
Write ShardedLinear, one such layer.

This is stage 3 of ZeRO (S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, 2020), and how FSDP2 works: recipes/shard_with_fsdp2.py. Read before:
04_collectives.py, the sections reduce_scatter and all_gather, and exercise 13. A class derived from
torch.autograd.Function lets you write both passes of a layer by hand.

    python exercises/14_zero_3.py
"""

import torch
import torch.distributed as dist
from torch import nn


class ShardedLinear(nn.Module):
    """A linear layer without bias, inputs @ weight.T, of which each rank keeps an Nth.

    Between two passes, a rank keeps self.part, its gradient, and what the layer's backward pass
    needs of the inputs. Whole weights exist while a forward or backward pass of this layer runs.
    A forward and a backward pass together send no more than 3 (N - 1) / N of the weights' bytes.
    """

    def __init__(self, weight):
        """Take the whole weight, (out, in), the same on all ranks, and keep this rank's part of it.

        self.part: an nn.Parameter, flat. Lay the rows of the weight end to end, and cut them into N
        parts; each has the length divided by N, rounded up. Zeros fill up the last part. Rank r
        keeps part r.
        """
        raise NotImplementedError

    def forward(self, inputs):
        """Return inputs @ weight.T, made from the parts as they are now. All ranks call it.

        inputs: (rows, in), other rows on each rank, the same number of them. The backward pass
        gives inputs the gradient of this rank's own loss. To self.part.grad it adds this rank's
        part of the weight's gradient, the mean over all ranks.
        """
        raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
