"""Where the time of a step goes on a GPU: notes GpuTimes.

The CPU only hands work to a GPU, and goes on. So in one step of ten, events go into the GPU's own
queue: at the begin of each part, and at its end. They are read when the GPU has passed them, in a
later step. That is asked, and never waited for: no step gets slower.

Not seen: work that the script puts into other streams than the current one.
"""

import threading
from dataclasses import dataclass, field

import torch

from ..records.times import GpuPart, GpuTimes
from .notebook import note
from .state import kept

FIRST = 25  # step that is measured: the first ones are slower, and are looked into
MOST_MARKS = 400  # in a step: one with more is not measured
MOST_PENDING = 8  # measured steps that the GPU has not finished


@dataclass(slots=True, eq=False)
class Mark:
    """An event in the GPU's queue, with which a part begins."""

    event: torch.Event
    part: str


@dataclass(slots=True, eq=False)
class Measured:
    """The marks of a step that has been handed to the GPU as a whole."""

    number: int  # as in GpuTimes
    marks: list[Mark]  # the last one is the end of the step


@dataclass
class GpuState:
    """The step that is measured now, and those that the GPU has still to finish."""

    device: torch.device | None = None  # of the parameters; None: a CPU, or it is not known yet
    thread: int | None = None  # which takes the step that is measured; None: none is
    marks: list[Mark] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # parts that have begun, the innermost last
    pending: list[Measured] = field(default_factory=list)


state = kept(GpuState())


def device_of(parameters):
    """Return the device of an optimizer's parameters, if it is one that has its own clock."""
    device = parameters[0].device
    return device if device.type in ("cuda", "xpu") else None


def begins(part):
    """Put the begin of a part into the GPU's queue, if this step is measured."""
    if state.thread is not None and state.thread == threading.get_ident():
        state.inside.append(part)
        _mark(part)


def ends():
    """Put the end of the innermost part into the GPU's queue: the one around it goes on."""
    if state.thread is None or state.thread != threading.get_ident() or not state.inside:
        return
    state.inside.pop()
    _mark(state.inside[-1] if state.inside else "rest")


def goes_over_to(part):
    """End the innermost part, and begin another one at the same moment.

    A callback of backward() calls this, in a thread of autograd's: the script's own one waits.
    """
    if state.thread is not None and state.inside:
        state.inside[-1] = part
        _mark(part)


def step_ended(number):
    """Close a step of the main optimizer, note what the GPU has finished, and choose the next."""
    if state.device is None:
        return
    if state.thread is not None:
        _mark("")
    if state.thread is not None:
        state.pending = [*state.pending, Measured(number, state.marks)][-MOST_PENDING:]
    state.thread, state.marks, state.inside = None, [], []
    note_what_is_done()
    following = number + 1
    every = 10 if following < 5000 else 100
    if following >= FIRST and following % every == FIRST % 10:
        state.thread = threading.get_ident()
        _mark("rest")


def note_what_is_done():
    """Note the steps whose last event the GPU has passed. What it has not is asked for later."""
    while state.pending and state.pending[0].marks[-1].event.query():
        measured = state.pending.pop(0)
        seconds = {}
        for mark, following in zip(measured.marks, measured.marks[1:], strict=False):
            took = mark.event.elapsed_time(following.event) / 1000
            seconds[mark.part] = seconds.get(mark.part, 0.0) + took
        parts = [GpuPart(part, round(took, 7)) for part, took in seconds.items()]
        note(GpuTimes, number=measured.number, parts=parts)


def _mark(part):
    """Put an event into the queue of the current stream, or give this step up.

    While a CUDA graph is captured, the queue runs nothing.
    """
    capturing = state.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or len(state.marks) == MOST_MARKS:
        state.thread, state.marks = None, []
        return
    event = torch.Event(device=state.device, enable_timing=True)
    event.record(torch.accelerator.current_stream(state.device))
    state.marks.append(Mark(event, part))
