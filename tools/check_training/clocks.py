"""Machines have clocks of their own: brings the times that they have noted to one clock.

All ranks leave an exchange at the same moment, but for a millisecond or so. From many such moments
come the distance of two clocks, and by how much one of them runs faster: a straight line.
"""

import functools
import statistics
from dataclasses import dataclass, fields
from typing import get_args

from .records.base import Moment
from .records.process import Call
from .records.times import Gap, StepTimes

# Calls that no rank leaves before all have come. (A rank that only sends may leave earlier.)
LEFT_TOGETHER = {"all_reduce", "barrier", "all_gather", "all_gather_into_tensor", "all_to_all"}
LARGEST_DRIFT = 1e-3  # of clocks: NTP itself corrects them by half of that at most
LEAST = 15  # moments that are needed to tell a drift
LONG_ENOUGH = 5.0  # seconds between the first and the last of them


@dataclass(slots=True)
class Line:
    """How times of one clock become times of another one."""

    offset: float = 0.0  # seconds that are added at a moment
    drift: float = 0.0  # seconds that are added for each second after it
    origin: float = 0.0  # that moment, in seconds of the clock itself

    def moved(self, time):
        """Return a time of the other clock, in seconds."""
        return time + self.offset + self.drift * (time - self.origin)


def line_through(moments):
    """Return the Line through [(seconds of one clock, seconds of the other)]; not empty.

    By medians, so that moments which a busy machine has noted late do not count.
    """
    moments = sorted(moments)
    origin = moments[0][0]
    third = len(moments) // 3
    drift = 0.0
    if len(moments) >= LEAST and moments[-third][0] - moments[third][0] > LONG_ENOUGH:
        pairs = zip(moments[:third], moments[-third:], strict=True)
        drift = statistics.median(
            (later[1] - earlier[1]) / (later[0] - earlier[0]) - 1 for earlier, later in pairs
        )
    if abs(drift) > LARGEST_DRIFT:
        drift = 0.0
    offset = statistics.median(other - time - drift * (time - origin) for time, other in moments)
    return Line(offset, drift, origin)


class Clocks:
    """The clocks of all machines, whose times become those of the first one's clock."""

    def __init__(self):
        """Know none yet."""
        self.lines = {}  # {clock: its Line, as of the group that was aligned at last}
        self.midnight = 0.0  # seconds since 1970 when the first clock was at 0, by its calendar

    def align(self, ranks):
        """Move the times that the ranks of one group have noted. ranks: a list of Rank."""
        ranks = sorted(ranks, key=lambda rank: rank.number)
        first = ranks[0]
        clock = first.machine.clock
        if not self.lines:
            self.lines[clock], self.midnight = Line(), first.calendar - first.begin
        elif clock not in self.lines:
            self.lines[clock] = Line(first.calendar - first.begin - self.midnight)
        same = [rank for rank in ranks if rank.machine.clock == clock]
        others = [rank for rank in ranks if rank.machine.clock != clock]
        for rank in same:
            move(rank, self.lines[clock])
        for other in sorted({rank.machine.clock for rank in others}):
            there = [rank for rank in others if rank.machine.clock == other]
            self.lines[other] = line_of(first, there)
            for rank in there:
                move(rank, self.lines[other])


def line_of(first, others):
    """Return the Line by which times of others, a list of Rank, become those of another Rank."""
    coarse = line_through([(rank.begin, first.begin) for rank in others])
    calls = [pair for rank in others for pair in in_calls(first, rank)]
    if calls:
        coarse = line_through(calls)
    exchanges = [pair for rank in others for pair in in_exchanges(first, rank, coarse)]
    moments = calls + exchanges
    return line_through(moments) if moments else coarse


def in_calls(first, rank):
    """Return [(when a Rank left a collective call, when another Rank, first, left it)]."""
    found = [
        {
            (call.group, call.number, call.name): call.time
            for call in each.records(Call)
            if call.name in LEFT_TOGETHER and not call.failed and not call.is_async
        }
        for each in (rank, first)
    ]
    return _pairs(*found)


def in_exchanges(first, rank, coarse):
    """Return the same of the exchanges in backward(). coarse: a Line that is about right.

    A rank may have taken some steps alone before: then its steps have higher numbers.
    """
    theirs, ours = exchanges_of(rank), exchanges_of(first)
    if not theirs or not ours:
        return []
    more = max(theirs) - max(ours)

    def distance(shift):
        moved = {number - shift: time for number, time in theirs.items()}
        begin = _pairs(moved, ours)[:100]  # before a drift counts
        far = [abs(coarse.moved(time) - other) for time, other in begin]
        return statistics.median(far) if far else float("inf")

    shift = min({0, more}, key=distance)
    return _pairs({number - shift: time for number, time in theirs.items()}, ours)


def exchanges_of(rank):
    """Return {step: when a Rank left its last exchange in backward()}."""
    found = {}
    for step in rank.records(StepTimes):
        ends = [span.end for span in step.spans if span.part == "exchange"]
        if ends:
            found[step.number] = ends[-1]
    return found


def _pairs(theirs, ours):
    """Return [(time, other time)] of what is in both, in the order of time."""
    return sorted((theirs[key], ours[key]) for key in theirs.keys() & ours.keys())


def move(rank, line):
    """Move all times that a Rank has noted. (Where the line changes nothing, nothing is done.)"""
    if line == Line():
        return
    for record in rank.all_records():
        move_times(record, line)


def move_times(record, line):
    """Move the times in a record, and in what it is made of."""
    for name in _names_of_moments(type(record)):
        time = getattr(record, name)
        if time is not None:
            setattr(record, name, line.moved(time))
    if isinstance(record, StepTimes | Gap):
        for span in record.spans:
            move_times(span, line)


@functools.cache
def _names_of_moments(kind):
    """Return the names of the fields of a class that are a Moment, or one or None."""
    return [each.name for each in fields(kind) if Moment in (each.type, *get_args(each.type))]
