"""Schedules, averaged models and copies: notes Schedule, Average, ModelCopy, Plateau."""

import copy
import weakref
import zlib
from dataclasses import dataclass, field

import torch
from torch.optim import lr_scheduler, swa_utils

from ..records.optimizer import Average, ModelCopy, Plateau, Schedule
from . import model, optimizer
from .fingerprints import looked_at, prints, readable
from .hooks import after
from .notebook import count, note, site
from .script_lines import where
from .state import kept

MOST_COPIES = 20  # of modules, that are looked at
LENGTHS = ("total_steps", "T_max", "total_iters")  # attributes with the length of a schedule


@dataclass(slots=True)
class KnownCopy:
    """An AveragedModel, or a copy of a module."""

    key: str
    line: str  # that made it
    calls: int = 0  # of an AveragedModel: its forward passes


@dataclass
class Schedules:
    """The schedules, averaged models and copied modules of this process."""

    schedules: weakref.WeakKeyDictionary = field(  # {schedule: line that made it}
        default_factory=weakref.WeakKeyDictionary
    )
    averages: weakref.WeakKeyDictionary = field(  # {AveragedModel: KnownCopy}
        default_factory=weakref.WeakKeyDictionary
    )
    copies: weakref.WeakKeyDictionary = field(  # {module that deepcopy() has made: KnownCopy}
        default_factory=weakref.WeakKeyDictionary
    )


state = kept(Schedules())


@after(lr_scheduler.LRScheduler, "__init__")
@after(lr_scheduler.SequentialLR, "__init__")  # this and the next one do not call that above
@after(lr_scheduler.ChainedScheduler, "__init__")
def made_schedule(result, args, kwargs):
    """Remember a schedule."""
    state.schedules[args[0]] = where()


@after(swa_utils.AveragedModel, "__init__")
def made_average(result, args, kwargs):
    """Remember an averaged model."""
    state.averages[args[0]] = KnownCopy(_key("a"), where())


@after(swa_utils.AveragedModel, "forward")
def called_average(result, args, kwargs):
    """Count a forward pass of an averaged model."""
    known = state.averages.get(args[0])
    if known is not None:
        known.calls += 1


@after(copy, "deepcopy")
def copied(result, args, kwargs):
    """Remember a copy of a module: it may be an average of the weights, made by hand."""
    if isinstance(result, torch.nn.Module) and any(True for _ in result.parameters()):
        state.copies[result] = KnownCopy(_key("c"), where())
        if count("module copied") < MOST_COPIES:
            _note_copy(result)


def _key(kind):
    lines, number = site(kind)
    return f"{lines} {number}"


def _note_copy(module):
    """Note how the weights of a copy stand."""
    known, step = state.copies[module], optimizer.steps()
    found = prints([*module.parameters()], step)
    bits = zlib.crc32(str([each.bits for each in found]).encode()) if all(found) else None
    note(ModelCopy, copy=known.key, line=known.line, steps=step, bits=bits)


def _like_a_wrapped_model(module):
    shapes = [each.shape for each in module.parameters()]
    wrappers = list(model.state.wrappers)
    return any(shapes == [each.shape for each in ddp.module.parameters()] for ddp in wrappers)


def note_all():
    """Note how all of them stand; called when a pass over a loader is over, and at the end."""
    for schedule, line in list(state.schedules.items()):
        lengths = [getattr(schedule, name) for name in LENGTHS if hasattr(schedule, name)]
        note(
            Schedule,
            schedule=id(schedule),
            name=type(schedule).__name__,
            line=line,
            steps=optimizer.steps(),
            calls=getattr(schedule, "_step_count", None),
            last=getattr(schedule, "last_epoch", 0),
            total=lengths[0] if lengths else None,
            parts=_parts(schedule),
            optimizer=_key_of_its_optimizer(schedule),
        )
    if looked_at(count("copies noted")):
        for module in list(state.copies)[:MOST_COPIES]:
            if _like_a_wrapped_model(module):
                _note_copy(module)
    for average, known in list(state.averages.items()):
        updates = getattr(average, "n_averaged", None)
        note(
            Average,
            average=known.key,
            line=known.line,
            steps=optimizer.steps(),
            calls=known.calls,
            updates=int(updates) if torch.is_tensor(updates) and readable(updates) else None,
        )


def _key_of_its_optimizer(schedule):
    """Return Schedule.optimizer."""
    owner = getattr(schedule, "optimizer", None)
    known = optimizer.state.known.get(owner) if owner is not None else None
    return None if known is None else known.key


def _parts(schedule):
    """Return the ids of the schedules that a schedule holds, as one that follows a warm-up does."""
    held = []
    for value in vars(schedule).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    return [id(each) for each in held if isinstance(each, lr_scheduler.LRScheduler)]


@after(lr_scheduler.ReduceLROnPlateau, "step")
def stepped(result, args, kwargs):
    """Note the figure that ReduceLROnPlateau was given."""
    value = args[1] if len(args) > 1 else kwargs.get("metrics")
    if count("plateau") >= 300:
        return
    if not torch.is_tensor(value) or readable(value, optimizer.steps()):
        note(Plateau, line=where(), value=float(value))
