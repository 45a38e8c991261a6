"""Running totals: few numbers that are summed over the ranks again and again.

A total that nobody sets back to 0 holds all ranks' parts after a sum. Each rank gives them to the
next sum once more: in the same tensor, or in another one that the script has made of it.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .fingerprints import readable
from .state import kept

FEW = 128  # numbers of a tensor that is looked at, at most
LARGEST = 4  # what is added between two sums is at most so many times what the first sum was given
GATHERS = "all_gather", "all_gather_into_tensor"  # the script sums up what they bring
PLACES = 1000  # that are remembered


@dataclass(slots=True)
class Total:
    """Numbers that were summed."""

    first: list[float]  # what was given to the first sum of the row
    given: list[float]  # what was given to the last one
    last: list[float]  # and what that has brought
    again: int  # as Call.again
    is_at_place: bool = False  # as Call.again_at_place


@dataclass
class Totals:
    """What was summed, by the tensor as long as the script keeps it, and by the place."""

    known: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # {tensor: Total}
    # {(name of the call, its line, its group): the Total that was summed there at last}
    at_places: dict[tuple[str, str, str], Total] = field(default_factory=dict)


state = kept(Totals())


def numbers_given(name, args, kwargs, step):
    """Return the numbers that a call is given to be summed; None: they are not looked at.

    name: of the call. A gather counts as a sum: the script adds up what it brings.
    """
    if kwargs.get("async_op") or not args:
        return None
    if name in GATHERS:
        return numbers_in(args[1], step) if len(args) == 2 else None
    if name != "all_reduce" or len(args) > 3:
        return None
    operation = args[1] if len(args) > 1 else kwargs.get("op", dist.ReduceOp.SUM)
    return numbers_in(args[0], step) if operation == dist.ReduceOp.SUM else None


def numbers_in(tensor, step):
    """Return the numbers in a tensor; None: they are too many, or may not be read."""
    if not isinstance(tensor, torch.Tensor) or not 0 < tensor.numel() <= FEW:
        return None
    if tensor.is_complex() or tensor.dtype == torch.bool or tensor.requires_grad:
        return None
    if not readable(tensor, step):
        return None
    return tensor.detach().reshape(-1).tolist()


def summed(name, args, given, line, group):
    """Return the Total of a call that has ended. given: the numbers that it was given."""
    tensor, place = args[name in GATHERS], (name, line, group)
    in_place = state.known.get(tensor)
    total = in_place or state.at_places.get(place)
    if total is None or not _goes_on(total, given):
        total = Total(first=given, given=given, last=given, again=-1)
    elif in_place is None:
        total.is_at_place = True
    state.known[tensor] = total
    if len(state.at_places) < PLACES:
        state.at_places[place] = total
    total.again += 1
    total.given, total.last = given, _brought(name, args, len(given))
    return total


def _brought(name, args, count):
    """Return so many numbers, the sums over the ranks that a call has brought."""
    result = args[0]
    if isinstance(result, torch.Tensor):
        result = result.detach().reshape(-1, count)
    else:
        result = torch.stack([each.detach().reshape(-1) for each in result])
    return result.double().sum(0).tolist()


def _goes_on(total, given):
    """Return whether a sum is given the last one's result, and a part of usual size added to it.

    The other ranks must have added something to the last one: else it may come later, in a call
    that does several at once.
    """
    if len(given) != len(total.last):
        return False
    added = [now - before for now, before in zip(given, total.last, strict=True)]
    from_others = [after - before for after, before in zip(total.last, total.given, strict=True)]
    if min(total.last) < 0 or min(added) < 0:
        return False
    places = zip(added, from_others, total.first, strict=True)
    return any(0 < part <= LARGEST * first and others > 0 for part, others, first in places)
