"""Modules of FSDP2: which of an optimizer's parameters are copies that it had gathered.

From a forward pass until the shards are back in their places, a module has whole weights for
parameters. They are copies: a backward pass leaves its gradients with the shards.
"""

import weakref
from dataclasses import dataclass, field

import torch

from .hooks import after
from .state import kept


@dataclass
class Shards:
    """The modules that fully_shard() was called with."""

    names: weakref.WeakKeyDictionary = field(  # {module: names of its parameters in shards}
        default_factory=weakref.WeakKeyDictionary
    )


state = kept(Shards())


@after("torch.distributed.fsdp", "fully_shard", closed=True)
def sharded(result, args, kwargs):
    """Remember which parameters of a module, or of several ones, are in shards now."""
    given = args[0] if args else kwargs["module"]
    for module in given if isinstance(given, (list, tuple)) else [given]:
        state.names[module] = {
            name for name, parameter in module.named_parameters() if not _is_whole(parameter)
        }


def gathered(parameters):
    """Return the names of those of an optimizer's parameters that FSDP2 has gathered."""
    ids = {id(parameter) for parameter in parameters if _is_whole(parameter)}
    found = []
    for module, names in reversed([*state.names.items()]):  # the outermost is sharded last
        for name, parameter in module.named_parameters():
            if name in names and id(parameter) in ids:
                ids.remove(id(parameter))
                found.append(name)
    return found


def _is_whole(parameter):
    """Return whether a parameter is no DTensor."""
    return type(parameter) is torch.nn.Parameter
