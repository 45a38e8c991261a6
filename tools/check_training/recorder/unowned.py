"""Parameters of DDP objects that no optimizer has, and whether they change all the same."""

from dataclasses import dataclass, field

from torch.utils.weak import WeakIdKeyDictionary

from . import model
from .fingerprints import bits, memory_of, readable
from .state import kept

MOST = 20  # that are followed


@dataclass
class Unowned:
    """The parameters that were in no optimizer in a step."""

    bits: WeakIdKeyDictionary = field(  # {parameter: its bits, when it was seen last}
        default_factory=WeakIdKeyDictionary
    )
    moved: set[str] = field(default_factory=set)  # names of those that have changed


state = kept(Unowned())


def names(owned, step):
    """Return (Step.outside, Step.outside_moved): of the DDP objects called since the last step.

    owned: the parameters of all optimizers. step: number of the step that is about to be taken.
    """
    ids, outside = {id(each) for each in owned}, []
    for key, known in model.state.parameters.items():
        if key in ids or known.ddp not in model.state.called:
            continue
        parameter = known.reference()
        if parameter is not None and parameter.grad is not None and parameter.requires_grad:
            outside.append((parameter, known.name))
    memory = {memory_of(each) for each in owned} - {None} if outside else ()
    # What is a part of a flat tensor changes with it.
    outside = [each for each in outside if memory_of(each[0]) not in memory][:MOST]
    for parameter, name in outside:
        if readable(parameter, step):
            now = bits(parameter)
            if state.bits.setdefault(parameter, now) != now:
                state.moved.add(name)
    return [name for _, name in outside], sorted(state.moved)
