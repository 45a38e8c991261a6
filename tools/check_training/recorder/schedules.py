"""Schedules of the learning rate, and averaged models: notes Schedule, Average, Plateau."""

import weakref
from dataclasses import dataclass, field

import torch
from torch.optim import lr_scheduler, swa_utils

from ..records.optimizer import Average, Plateau, Schedule
from . import optimizer
from .fingerprints import readable
from .hooks import after
from .notebook import count, note
from .script_lines import where
from .state import kept

LENGTHS = ("total_steps", "T_max", "total_iters")  # attributes with the length of a schedule


@dataclass
class Schedules:
    """The schedules and averaged models of this process."""

    schedules: weakref.WeakKeyDictionary = field(  # {schedule: line that made it}
        default_factory=weakref.WeakKeyDictionary
    )
    averages: weakref.WeakKeyDictionary = field(  # {AveragedModel: line that made it}
        default_factory=weakref.WeakKeyDictionary
    )


state = kept(Schedules())


@after(lr_scheduler.LRScheduler, "__init__")
def made_schedule(result, args, kwargs):
    """Remember a schedule."""
    state.schedules[args[0]] = where()


@after(swa_utils.AveragedModel, "__init__")
def made_average(result, args, kwargs):
    """Remember an averaged model."""
    state.averages[args[0]] = where()


def note_all():
    """Note how all of them stand; called when a pass over a loader is over."""
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
            parts=[id(part) for part in getattr(schedule, "_schedulers", ())],
        )
    for average, line in list(state.averages.items()):
        updates = getattr(average, "n_averaged", None)
        note(
            Average,
            average=id(average),
            line=line,
            steps=optimizer.steps(),
            updates=int(updates) if torch.is_tensor(updates) and readable(updates) else None,
        )


@after(lr_scheduler.ReduceLROnPlateau, "step")
def stepped(result, args, kwargs):
    """Note the figure that ReduceLROnPlateau was given."""
    value = args[1] if len(args) > 1 else kwargs.get("metrics")
    if count("plateau") >= 300:
        return
    if not torch.is_tensor(value) or readable(value, optimizer.steps()):
        note(Plateau, line=where(), value=float(value))
