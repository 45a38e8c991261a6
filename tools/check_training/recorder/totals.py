"""Running totals: tensors of few numbers that are summed over the ranks in place, again and again.

A total that nobody sets back to 0 holds all ranks' parts after a sum. Each rank gives them to the
next sum once more.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .fingerprints import readable
from .state import kept

FEW = 16  # numbers of a tensor that is looked at, at most
LARGEST = 4  # what is added between two sums is at most so many times what the first sum was given


@dataclass(slots=True)
class Total:
    """A tensor that was summed."""

    first: list[float]  # what it held before the first sum of the row
    given: list[float]  # what it held before the last one
    last: list[float]  # and after that
    again: int  # as Call.again


@dataclass
class Totals:
    """The tensors that were summed, as long as the script keeps them."""

    known: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # {tensor: Total}


state = kept(Totals())


def numbers_of_a_sum(args, kwargs, step):
    """Return the numbers that an all_reduce is given; None: it is no sum, or not looked at."""
    if not args or kwargs.get("async_op") or len(args) > 3:
        return None
    operation = args[1] if len(args) > 1 else kwargs.get("op", dist.ReduceOp.SUM)
    if operation != dist.ReduceOp.SUM:
        return None
    return _numbers_in(args[0], step)


def _numbers_in(tensor, step):
    if not isinstance(tensor, torch.Tensor) or not 0 < tensor.numel() <= FEW:
        return None
    if tensor.is_complex() or tensor.dtype == torch.bool or tensor.requires_grad:
        return None
    if not readable(tensor, step):
        return None
    return tensor.detach().reshape(-1).tolist()


def summed(tensor, given):
    """Return Call.again of a sum that has ended. given: the numbers that it was given."""
    total = state.known.get(tensor)
    if total is None or not _goes_on(total, given):
        total = Total(first=given, given=given, last=given, again=-1)
        state.known[tensor] = total
    total.again += 1
    total.given, total.last = given, tensor.detach().reshape(-1).tolist()
    return total.again


def _goes_on(total, given):
    """Return whether a sum is given the last one's result, and a part of usual size added to it.

    The other ranks must have added something to the last one: else it may come later, in a call
    that does several at once.
    """
    added = [now - before for now, before in zip(given, total.last, strict=True)]
    from_others = [after - before for after, before in zip(total.last, total.given, strict=True)]
    if min(total.last) < 0 or min(added) < 0:
        return False
    places = zip(added, from_others, total.first, strict=True)
    return any(0 < part <= LARGEST * first and others > 0 for part, others, first in places)
