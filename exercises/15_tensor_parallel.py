"""Split a layer: each rank has some of the hidden units, and all compute the same rows together.

Take two linear layers with an activation between them: rows of `inputs` go to `hidden` units, and
these to `out` numbers. Each rank gets a slice of both layers: the weights that lead to its hidden
units, and those that lead away from them. An activation treats each hidden unit by itself, so
nothing is exchanged in the middle. Unlike with DDP, all ranks have the same rows. Write both
layers. One exchange is enough in the forward pass, and one in the backward pass. The forward pass
sends no more than an all_reduce of the output does: 2 (N - 1) / N of its bytes. The backward pass
sends no more than an all_reduce of the inputs' gradient.

    inputs (rows, in)  ->  ColumnLinear  ->  own hidden units  ->  RowLinear  ->  (rows, out)

This is tensor parallelism, from M. Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism, 2019. The names come from there. Its matrices are (in,
out): hidden units are columns of the first. Torch's are (out, in): here they are its rows.

Read before: 04_collectives.py, the section all_reduce. recipes/tensor_parallel.py lets torch do it.

    python exercises/15_tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn


class ColumnLinear(nn.Module):
    """The first layer: inputs @ weight.T + bias, of which each rank computes its hidden units.

    Which units are whose? torch.tensor_split(..., N) cuts them; rank r has slice r. The slices may
    differ in length by one.
    """

    def __init__(self, weight, bias):
        """Take the whole weight, (hidden, in), and bias, (hidden,). Copy this rank's slices.

        self.weight, (own hidden units, in), and self.bias are nn.Parameters.
        """
        raise NotImplementedError

    def forward(self, inputs):
        """Return (rows, own hidden units). inputs: (rows, in), the same on all ranks.

        The backward pass gives inputs, on each rank, the gradient from the hidden units of all
        ranks. They may be used elsewhere, too, as in x + mlp(x).
        """
        raise NotImplementedError


class RowLinear(nn.Module):
    """The second layer: hidden @ weight.T + bias, where each rank has its own hidden units."""

    def __init__(self, weight, bias):
        """Take the whole weight, (out, hidden), and bias, (out,). Copy what is this rank's.

        self.weight, (out, own hidden units), and self.bias, (out,), are nn.Parameters. The bias
        belongs to no hidden unit: each rank has the whole.
        """
        raise NotImplementedError

    def forward(self, own):
        """Return (rows, out), the same on all ranks. own: (rows, own hidden units).

        All ranks then compute the same loss from it, and call backward(). Each parameter gets the
        gradient that one process would compute for it, or its slice of that.
        """
        raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
