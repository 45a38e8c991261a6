"""Stop together: all ranks leave the loop in the same step, whoever wants to.

In each step, the ranks wait for each other to average their gradients. If one leaves the loop
alone, the others wait for it until their timeout. But a rank knows what the others do not: that it
has no more data, or that someone has asked it to end. (SIGTERM is how a cluster asks.) Write train,
so that all ranks take the same number of steps.

Read before: recipes/agree.py, pitfalls/uneven_inputs.py, and 04_collectives.py, the section
all_reduce.

    python exercises/09_stop_together.py
"""

import torch
import torch.distributed as dist


def train(batches, step, asked_to_stop):
    """Take steps until a rank has no batch left, or is asked to stop; return how many, as an int.

    Before each step, the ranks agree, in an exchange. If one of them has no batch for the step by
    then, or has heard from asked_to_stop(), no rank takes the step. What it hears later may wait
    for the next exchange.

    batches: an iterator over this rank's batches, any objects but None. Only next(batches) tells
    whether there is one more: ranks may have different numbers of them, also none. Take one for
    each step, and at most one that you do not use: it is lost.
    step(batch): one training step. Use each batch once, in order.
    asked_to_stop(): has someone asked this rank to stop? That may happen at any moment: before the
    first step, or while next() or step() runs. Once True, it stays True. Ask before each step.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
