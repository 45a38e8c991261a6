"""A module's state_dict() and load_state_dict(): notes LoadedIntoModel.

A state_dict() shares the memory of its module. One that is saved later than it was made holds what
the module has become by then.
"""

import collections
import weakref
from dataclasses import dataclass, field

import torch

from ..records.model import LoadedIntoModel
from . import model, optimizer
from .fingerprints import bits, readable, tensors_in
from .hooks import after
from .notebook import count, note
from .script_lines import where
from .state import kept

PREFIXES = ("module.", "_orig_mod.", "model.")  # that DDP, torch.compile and AveragedModel add


@dataclass(slots=True)
class KnownState:
    """A result of state_dict()."""

    reference: weakref.ref
    module: weakref.ref
    steps: int  # when it was made
    memory: int  # address of its first tensor
    marks: list[int]  # as of _marks_of(), when it was made


@dataclass
class StateDicts:
    """The results of state_dict() that may still be there."""

    made: dict[int, KnownState] = field(default_factory=dict)  # {id of each: it}


state = kept(StateDicts())


@after(torch.nn.Module, "state_dict", closed=True)
def made(result, args, kwargs):
    """Remember at which step a state_dict() was made."""
    if len(state.made) > 200:
        state.made = {
            key: known for key, known in state.made.items() if known.reference() is not None
        }
    first = next(tensors_in(result), None)
    if first is not None and isinstance(result, collections.OrderedDict):
        state.made[id(result)] = KnownState(
            weakref.ref(result),
            weakref.ref(args[0]),
            optimizer.steps(),
            first.data_ptr(),
            _marks_of(result),
        )


def is_known(content):
    """Return whether something is the result of a module's state_dict()."""
    known = state.made.get(id(content))
    return known is not None and known.reference() is content


def _marks_of(content):
    """Return what changes with the tensors of a state_dict(): their versions, and bits of some.

    A change by way of Tensor.data counts for no version, nor does one by a fused optimizer.
    """
    tensors = [each for each in content.values() if isinstance(each, torch.Tensor)]
    some = {0, len(tensors) // 2, len(tensors) - 1}
    counted = [each._version for each in tensors if not each.is_inference()]
    return counted + [bits(tensors[n], 4096) for n in sorted(some) if readable(tensors[n])]


def age(content):
    """Return by how many steps a state_dict() that has changed with its module is older; or 0."""
    if not is_known(content):
        return 0
    known = state.made[id(content)]
    module = known.module()
    if module is None or not _has_memory(module, known.memory):
        return 0
    if _marks_of(content) == known.marks and not _may_change_unseen(module):
        return 0
    return optimizer.steps() - known.steps


def _may_change_unseen(module):
    """Return whether an optimizer has parameters of a module that cannot be read, as on a GPU."""
    owned = {
        id(each) for its in list(optimizer.state.known) for each in optimizer.parameters_of(its)
    }
    return any(id(each) in owned and not readable(each) for each in module.parameters())


def _has_memory(module, address):
    """Return whether a parameter of a module is at an address in memory."""
    return address in {each.data_ptr() for each in module.parameters()}


def is_saved_in(content, module, names):
    """Return whether a dict, or one in it, is the state of a module as it is now.

    names: those in its state. An average of the weights may have the same names, and other values,
    or a count beside them: then trainers put the weights into it, and the average into the model's
    place. Of the values, those of the first trained parameter are compared; they are taken to be
    equal where they cannot be read, as of a shard. A save waits for its GPU anyhow.
    """
    trained = ((name, each) for name, each in module.named_parameters() if each.requires_grad)
    name, parameter = next(trained, ("", None))
    saved = [values[name] for values in _dicts_in(content) if name and {*values} == names]
    for value in saved:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue
        if not (readable(value, step=0) and readable(parameter, step=0)):
            return True
        if bits(value) == bits(parameter):
            return True
    return False


def _dicts_in(value, depth=0):
    """Yield a dict, and the dicts in it."""
    if isinstance(value, dict) and depth < 4:
        yield value
        for item in list(value.values())[:3000]:
            yield from _dicts_in(item, depth + 1)


@after(torch.nn.Module, "load_state_dict", closed=True)
def loaded(result, args, kwargs):
    """Note what a module has loaded."""
    if count("loaded into a model") >= 100:
        return
    module, given = args[0], args[1] if len(args) > 1 else kwargs.get("state_dict", {})
    own = {*module.state_dict()}
    missing = getattr(result, "missing_keys", None)
    # A module may translate the names that it is given.
    found = 0 if missing is None else len(own) - len(missing)
    before = state.made.get(id(given))
    note(
        LoadedIntoModel,
        line=where(),
        steps=optimizer.steps(),
        entries=len(given),
        fitting=max(found, len(own & {*given})),
        prefix=next((prefix for prefix in PREFIXES if _between(prefix, own, given)), ""),
        # Into another module, it brings what the first has become.
        age=age(given) if before and _has_memory(module, before.memory) else 0,
        is_ddp=any(module in (ddp, ddp.module) for ddp in list(model.state.wrappers)),
        missing=None if missing is None else len(missing),
    )


def _between(prefix, own, given):
    """Return whether a prefix is what keeps names of one side from fitting those of the other."""
    others = {*given} - own
    without = {key.removeprefix(prefix) for key in others if key.startswith(prefix)}
    with_it = {prefix + key for key in others}
    return bool(own & without or own & with_it)
