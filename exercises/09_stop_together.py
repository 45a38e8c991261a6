"""Stop together: all ranks leave the loop in the same step, whoever wants to.

In every step the ranks wait for each other, because they average their gradients. If one leaves
the loop alone, the others wait for it until their timeout. And each rank knows something that the
others do not: that it has no more data, or that someone has asked it to end, by SIGTERM for one
(the signal by which a cluster takes a machine back). Write train, so that all ranks take the same
number of steps.

Read before: recipes/agree.py, and pitfalls/uneven_inputs.py for what happens else. You need the
section all_reduce of 04_collectives.py.

    python exercises/09_stop_together.py
"""

import torch
import torch.distributed as dist


def train(batches, step, asked_to_stop):
    """Take steps until a rank has no batch left, or is asked to stop; return how many, as an int.

    batches: an iterator over this rank's batches. Its length is not known, and may differ from
    rank to rank; it may be 0. Only next(batches) tells whether there is one more. One that was
    taken, and then not used, is lost: take one for each step, and at most one more.
    step(batch): one training step. All ranks wait for each other in it, so all must call it equally
    often. Each batch is used once, in order; it may be any object but None. (In the check, step
    only counts.)
    asked_to_stop(): True as soon as this rank has been asked to stop. That may be at any moment,
    also before the first step, and between two calls. It never goes back to False.

    As soon as one rank has no batch for the next step, or has been asked to stop, no rank takes
    another step.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
