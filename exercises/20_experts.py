"""Experts on other ranks: send each row to its expert and back, with gradients both ways.

In a mixture of experts, a row (a token) goes through one of many networks, the experts. Here each
rank has one. So the rows travel to the ranks of their experts, and the results come back. This is
an all-to-all in which each pair of ranks exchanges another number of rows: the data say how many.
A rank does not know how many will come, so the counts travel first. Some experts get no row, and
one may get them all. In the backward pass, the gradients take the same ways, turned round. Write
through_experts.

Read before: 04_collectives.py, the section all_to_all; recipes/expert_parallel.py (it shows an
answer); and exercise 12, for torch.autograd.Function. You may use an exchange of PyTorch's that
knows autograd, if its gradients are right.

    python exercises/20_experts.py
"""

import torch
import torch.distributed as dist


def through_experts(rows, chosen, expert):
    """Return the results for this rank's rows, in the order of the rows, shape (n, d).

    All ranks call it together, and then all call backward() on what they make of it.

    rows: shape (n, d), float64. n differs from rank to rank, and may be 0. d is the same on all.
    chosen: shape (n,), int64: the rank whose expert treats the row. expert: this rank's, a function
    from (m, d) to (m, d), also for m = 0. It treats each row by itself. Call it once, with the rows
    of all ranks that chose it, also if there are 0: otherwise this rank's backward pass leaves out
    the exchanges in which the others wait.

    backward() gives rows their gradient. The expert gets the sum of the gradients of all ranks'
    losses, for all rows that it treated. (DDP divides by the number of ranks. Here, nobody does.)
    rows require a gradient on all ranks, or on none. The gradient that arrives may be not
    contiguous, and so may the expert's results. rows and chosen stay as they are.

    A row travels only if it leaves its rank, and once in each direction: nothing is filled up to
    equal lengths. Each pass sends the bytes of these rows, and at most 1000 more per rank.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
