"""Accumulate: a batch that does not fit into memory, in micro-batches, with one exchange a step.

A batch is cut into micro-batches. Each goes through the model, forward and backward, by itself,
and the gradients add up in p.grad. Then the ranks exchange them: once, not after each micro-batch.
The result is the gradient that one process would get with the rows of all ranks in one batch.

The shares are not always equal: the last micro-batch has the rest, and rows of different length
are packed in different numbers. Every row of the step must count the same, wherever it is.

Read before: exercises 2 and 3, recipes/accumulate.py and recipes/unequal_micro_batches.py. (They
have DistributedDataParallel exchange the gradients. You do it yourself.)

    python exercises/08_accumulate.py
"""

import torch
import torch.distributed as dist


def accumulate(model, micro_batches):
    """Compute the gradient of one step from the micro-batches of all ranks.

    micro_batches: this rank's, a list of (inputs, targets), float64, of shape (rows, 6) and
    (rows, 5). The number of rows differs, as does the number of micro-batches from rank to rank.
    One rank may have no micro-batch in a step, but not all: it does not call the model then.

    Before, each p.grad is None. Afterwards each is, on every rank, the gradient of
    mse_loss(model(inputs), targets), if inputs and targets were the rows of all micro-batches of
    all ranks. (mse_loss is a mean over all numbers: over the rows, and over their 5 columns.)

    Only one micro-batch is in memory at a time: backward() comes before the next forward. Each row
    goes through the model once, on its own rank.

    The gradient of each parameter is exchanged once in a step: by an all_reduce, or by calls that
    bring the sum to all ranks in another way. A few numbers more may be exchanged.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
