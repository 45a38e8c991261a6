"""Where the time of a step goes: notes StepTimes, and Gap."""

import threading
from dataclasses import dataclass, field

from ..records.times import LONG, Gap, Span, StepTimes
from .notebook import note, now
from .state import kept


@dataclass(slots=True, eq=False)
class Stretch:
    """A stretch of time in one part of records.times.PARTS, in one thread."""

    part: str
    begin: float  # seconds, as time
    end: float | None  # None: it goes on
    thread: int


@dataclass
class Times:
    """The stretches of the step that runs."""

    spans: list[Stretch] = field(default_factory=list)
    open: list[Stretch] = field(default_factory=list)  # forward passes that go on
    timed: bool = True  # the parts of this step are noted
    last_end: float | None = None  # of the step before
    usual: float | None = None  # seconds of a step: an average of the last ones, without gaps
    gaps: int = 0  # that were noted


state = kept(Times())


def span(part, begin, end):
    """Keep a stretch of time, in a part of records.times.PARTS, for the record of this step.

    What other parts took of it in the same thread is theirs: optimizer.step(closure) runs a whole
    forward and backward pass.
    """
    if state.timed or end - begin > LONG:
        _keep(part, begin, end, threading.get_ident())


def _keep(part, begin, end, thread):
    if len(state.spans) > 400:  # a long evaluation: the last ones are enough
        del state.spans[:100]
    inside = []
    for each in reversed(state.spans):  # what ended before it begins stands before the rest
        if each.end <= begin:
            break
        if each.thread == thread:
            inside.append(each)
    for each in sorted(inside, key=lambda each: each.begin):
        _add(part, begin, each.begin, thread)
        begin = each.end
    _add(part, begin, end, thread)


def _add(part, begin, end, thread):
    if end > begin:
        state.spans.append(Stretch(part, begin, end, thread))


def begins(part, begin):
    """Return a Stretch that begins, and may go on when the step ends; close it with ended()."""
    stretch = Stretch(part, begin, None, threading.get_ident())
    state.open.append(stretch)
    return stretch


def ended(stretch, end):
    """Keep what has not been noted yet of a Stretch that has begun."""
    if stretch in state.open:
        state.open.remove(stretch)
    if state.timed or end - stretch.begin > LONG:
        _keep(stretch.part, stretch.begin, end, stretch.thread)


def step_ended(number, end):
    """Note the spans of a step of the main optimizer, and choose whether the next one is timed."""
    for each in state.open:  # a trainer may take the step inside the model's forward
        if state.timed:
            _keep(each.part, each.begin, end, each.thread)
        each.begin = end
    if state.timed:
        # What another thread did meanwhile, such as one that fetches batches, took no time of it.
        thread = threading.get_ident()
        spans = _spans_of([each for each in state.spans if each.thread == thread])
        note(StepTimes, number=number, spans=spans, end=end, own=round(now() - end, 6))
    if state.last_end is not None:
        _look_for_a_gap(number, state.last_end, end)
    state.spans = []
    following = number + 1
    if following < 200:
        state.timed = True
    else:
        state.timed = following % 100 == 0 or following < 5000 and following % 10 == 0
    state.last_end = now()  # without what the recorder took itself


def begin_anew():
    """Forget the step before: from now on, another optimizer is the main one."""
    state.last_end = state.usual = None


def _spans_of(stretches):
    return [Span(each.part, round(each.begin, 6), round(each.end, 6)) for each in stretches]


def _look_for_a_gap(number, begin, end):
    """Note a step as a Gap, if it took far longer than those before it."""
    took, usual = end - begin, state.usual
    if usual is None:
        state.usual = took
    elif took <= max(LONG, 5 * usual):
        state.usual += (took - usual) / 8
    elif state.gaps < 1000:
        state.gaps += 1
        long = [each for each in state.spans if each.end - each.begin > LONG]
        note(Gap, number=number, begin=begin, end=end, spans=_spans_of(long[:50]))
