"""What happens to machines: which kinds of events there are, and how they are drawn."""

import bisect
from dataclasses import dataclass

from .drawing import draw_kill
from .options import KINDS, MACHINE_KINDS
from .records import PlannedKill

AT_ONCE = 0.4  # so many machines are back before the others may have noticed
SOONEST, LATEST = 1.0, 6.0  # seconds: between them a machine comes back, or a link is mended
# A machine that goes or joins needs some time to do so: no event comes in the last part of a run.
NOT_AT_THE_END, JOINS = 0.8, 0.5
WHILE_IT_STARTS = 0.2  # so many may come before the first step
FIRST_WAYS = ("machine", "launcher", "leave")  # how the first machine may go


@dataclass
class PlannedEvent(PlannedKill):
    """An event as it was drawn. (kind: also of MACHINE_KINDS.)"""

    away: float = 0.0  # seconds until the machine comes back, or its link is mended
    at_once: bool = True  # counted from the event; else since the others were seen to go on
    way: str = ""  # of kind "first": how that machine goes, of FIRST_WAYS


def draw_events(options, draws, reference, part):
    """Return a list of PlannedEvent, in the order in which they come.

    The arguments are those of drawing.draw_kills(). A machine that joins later is the first event.
    """
    kinds = [kind for kind in options.victims if kind in reference.seen or kind in MACHINE_KINDS]
    count = draws.randint(1, options.kills)
    events = [draw_event(draws.choice(kinds), draws, reference, part) for _ in range(count)]
    events.sort(key=lambda event: (event.kind != "join", event.marks, event.seconds))
    for event in [event for event in events if event.kind == "join"][options.machines - 1 :]:
        events.remove(event)  # so many machines there are
    return events


def draw_event(kind, draws, reference, part):
    """Return one PlannedEvent of a kind."""
    if kind in KINDS:
        drawn = draw_kill([kind], draws, reference, part)
        marks, seconds, which = drawn.marks, drawn.seconds, drawn.which
    else:
        marks, seconds = draw_moment(kind, draws, reference, part)
        which = draws.random()
    return PlannedEvent(
        marks=marks,
        seconds=seconds,
        kind=kind,
        which=which,
        away=draws.uniform(SOONEST, LATEST),
        at_once=draws.random() < AT_ONCE,
        way=draws.choice(FIRST_WAYS),
    )


def draw_moment(kind, draws, reference, part):
    """Return (how many steps come before an event of MACHINE_KINDS, seconds after the last)."""
    first, last = reference.seen["rank"].first, reference.seen["rank"].last
    times = reference.times or [first, last]
    if draws.random() >= WHILE_IT_STARTS:
        first = times[0]
    length = (JOINS if kind == "join" else NOT_AT_THE_END) * (times[-1] - first)
    seconds = part * (first + draws.random() * length)
    times = [0, *reference.times]
    marks = bisect.bisect(times, seconds) - 1
    return marks, seconds - times[marks]
