"""Where the time of a step goes: notes StepTimes."""

from dataclasses import dataclass, field

from ..records.times import Span, StepTimes
from .notebook import note, now
from .state import kept


@dataclass
class Times:
    """The spans of the step that runs."""

    spans: list[tuple] = field(default_factory=list)  # (part, begin, end) of each
    timed: bool = True  # the parts of this step are noted


state = kept(Times())


def span(part, begin, end):
    """Keep a stretch of time, in a part of records.times.PARTS, for the record of this step."""
    if not state.timed:
        return
    if len(state.spans) > 400:  # a long evaluation: the last ones are enough
        del state.spans[:100]
    state.spans.append((part, begin, end))


def step_ended(number, end):
    """Note the spans of a step of the main optimizer, and choose whether the next one is timed."""
    if state.timed:
        spans = [Span(part, round(begin, 6), round(until, 6)) for part, begin, until in state.spans]
        note(StepTimes, number=number, spans=spans, end=end, own=round(now() - end, 6))
    state.spans = []
    following = number + 1
    if following < 200:
        state.timed = True
    else:
        state.timed = following % 100 == 0 or following < 5000 and following % 10 == 0
