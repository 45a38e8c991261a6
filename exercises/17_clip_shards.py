"""Clip the gradient by its norm, where each rank holds another part of it.

Clipping limits the norm of the whole gradient: if it is too long, all of it is scaled by one
factor. torch.nn.utils.clip_grad_norm_ does so in one process. With shards (ZeRO, FSDP), experts or
stages, each rank has the gradients of its own parameters only. The norm of these is not the norm of
all. If each rank clips by its own, the gradient gets another direction, and no error says so. Write
clip_by_norm, which clips by the norm over all ranks.

Read before: recipes/clip_and_scale.py, and 04_collectives.py, the section all_reduce.

    python exercises/17_clip_shards.py
"""

import torch
import torch.distributed as dist


def clip_by_norm(parameters, max_norm):
    """Scale all gradients in place by their norm over all ranks. Return this norm.

    All ranks call it together. parameters: a list of this rank's tensors. Each has a .grad, a
    tensor on the CPU in float32 or bfloat16, or None. Each rank has other parameters, more or fewer
    than the others, or none at all.

    The norm is the square root of the sum of the squares of all numbers in all ranks' gradients, as
    it was before the clipping. It is a Python float, the same to the last bit on all ranks.
    Squares, and sums of them, are taken in float32 or float64, also for bfloat16 (which has 3
    digits). The factor is max_norm / (norm + 1e-6), as in clip_grad_norm_. No gradient gets longer:
    a factor above 1 changes nothing. Each .grad stays the same tensor object.

    If one number on one rank is nan or infinite, the norm is nan or infinite. All ranks return the
    same one, and all gradients stay as they are. (So all ranks can skip the step together.)

    The ranks exchange a few numbers, however many parameters there are: a rank sends at most 64
    bytes for each other rank.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
