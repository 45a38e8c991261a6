"""Parameters of modules that no DDP object and no optimizer has: notes Stray.

A model does not have the layers that its script keeps in a plain list. They get gradients, and stay
as they are.
"""

from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..records.model import Stray
from . import model
from .fingerprints import bits, readable
from .hooks import at_start, safely
from .notebook import note
from .script_lines import where
from .state import kept

MOST = 20  # strays that are followed


@dataclass(slots=True)
class Registered:
    """A parameter that was put into a module."""

    name: str  # of the module's class and in it, "Linear.weight"
    line: str


@dataclass
class Parameters:
    """All parameters that were put into modules, and strays that had a gradient."""

    registered: WeakIdKeyDictionary = field(  # {parameter: Registered}
        default_factory=WeakIdKeyDictionary
    )
    strays: WeakIdKeyDictionary = field(  # {stray: bits of (its gradient, its values)}
        default_factory=WeakIdKeyDictionary
    )


state = kept(Parameters())


@at_start
def follow_parameters():
    """Follow the parameters that are put into modules."""
    torch.nn.modules.module.register_module_parameter_registration_hook(_before_registration)


def _before_registration(module, name, parameter):
    safely(registered, module, name, parameter)


def registered(module, name, parameter):
    """Remember where a parameter was put into a module first."""
    if isinstance(parameter, torch.nn.Parameter) and parameter not in state.registered:
        state.registered[parameter] = Registered(f"{type(module).__name__}.{name}", where())


def are_copies(owned):
    """Return whether the optimizers have copies of all parameters, in another precision.

    owned: a parameter list of each optimizer.
    """
    return not any(each in state.registered for parameters in owned for each in parameters)


def look_for_strays(owned, step):
    """Remember the gradients and the values of strays, before a step.

    owned: a parameter list of each optimizer.
    """
    ids = {id(each) for parameters in owned for each in parameters}
    if are_copies(owned):
        return
    for parameter in list(state.registered):
        gradient = parameter.grad
        if gradient is None or id(parameter) in ids or not parameter.requires_grad:
            continue
        both_are_readable = readable(gradient, step) and readable(parameter, step)
        if model.known_parameter(parameter) is None and both_are_readable:
            state.strays[parameter] = bits(gradient), bits(parameter)
        if len(state.strays) >= MOST:
            break


def note_strays(step):
    """Note those strays whose gradient has changed since look_for_strays(), and not their values.

    Values may come from elsewhere, as from an optimizer that has a shard of the parameter.
    """
    for parameter, (gradient_before, values_before) in list(state.strays.items()):
        gradient = parameter.grad
        if gradient is None or not readable(gradient, step) or not readable(parameter, step):
            continue
        if bits(gradient) != gradient_before and bits(parameter) == values_before:
            place = state.registered[parameter]
            note(Stray, name=place.name, line=place.line)
    state.strays = WeakIdKeyDictionary()
