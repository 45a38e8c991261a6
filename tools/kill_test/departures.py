"""What happens to machines: which kinds of events there are, and how they are drawn."""

from dataclasses import dataclass

from .drawing import draw_kill
from .options import KINDS, MACHINE_KINDS
from .records import PlannedKill

AT_ONCE = 0.4  # so many machines are back before the others may have noticed
SOONEST, LATEST = 1.0, 6.0  # seconds: between them a machine comes back, or a link is mended
JOINS = 0.5  # a machine that joins is started in this part of a run
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
    if kind == "join":
        part *= JOINS  # it needs some time to start
    drawn = draw_kill([kind if kind in KINDS else "rank"], draws, reference, part)
    return PlannedEvent(
        marks=drawn.marks,
        seconds=drawn.seconds,
        kind=kind,
        which=drawn.which,
        away=draws.uniform(SOONEST, LATEST),
        at_once=draws.random() < AT_ONCE,
        way=draws.choice(FIRST_WAYS),
    )
