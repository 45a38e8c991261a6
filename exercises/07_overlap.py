"""Overlap: exchange the gradients while backward() still computes.

backward() goes from the last layer to the first. The last layer's gradients are complete long
before the first layer's, so their exchange can run in the meantime. That hides most of the time
that exchanges take. It needs two things. A hook is a function of yours that PyTorch calls at a
certain moment: p.register_post_accumulate_grad_hook(function) has it call function(p) as soon as
p.grad is complete. And a call with async_op=True returns at once, with an object that has wait().
Write overlap.

Read before: exercise 3, and 04_collectives.py, the sections async_op and ddp.

    python exercises/07_overlap.py
"""

import torch
import torch.distributed as dist


def overlap(model):
    """Make backward() exchange the gradients while it runs; return a function, finish.

    It is called once, before the first step. From then on, each backward() through the model
    starts the exchange of a gradient as soon as that is complete, and waits for no other rank.

    finish() takes no arguments. It is called after each backward(), before the optimizer's step.
    It waits for each of the exchanges. Then each p.grad is the mean over all ranks. Between two
    steps, zero_grad() sets each p.grad to None; the next one is another tensor. Keep none of the
    old ones, so that zero_grad() frees them: memory must not grow from step to step.

    A parameter that does not train (requires_grad is False) has no gradient (None). All others get
    one in each backward(), in the same order on all ranks.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
