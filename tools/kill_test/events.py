"""The data of a run on several machines: what has happened to them, and what was seen.

Moments and line numbers are those of records.py. The lines of all machines count together.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import foreign_command

from .records import Kill, Mark, Run


@dataclass
class Event(Kill):
    """What has happened to a machine; its name says it in words: "node2 died".

    kind: of KINDS or MACHINE_KINDS; or "back" (a machine is started again), "mended" (a link is),
    "anew" (all are started again).
    """

    machine: str = ""  # "node2"; "" for all
    # What the judge finds:
    next_step: float | None = None  # the moment of the first step after it; None: there was none
    next_ranks: int = 0  # how many ranks did that step


class PrintedBy(NamedTuple):
    """A line that says how far the script has come, with the machine that has printed it."""

    seconds: float
    line: int  # its number
    machine: str
    mark: Mark


@dataclass
class Leader:
    """A process with rank 0, as long as it lived. Two of them that both train are a split brain."""

    machine: str
    first: float  # the moments at which it was first and last seen
    last: float


class World(NamedTuple):
    """Ranks that were started together."""

    seconds: float  # when the first of them was seen
    size: int  # how many there are: their WORLD_SIZE; 0: not known


class End(NamedTuple):
    """A machine's command has ended by itself, and not well."""

    seconds: float
    machine: str
    status: int
    error: str  # the script's own; "" if there is none
    after: str  # the event before it, in words; "" if there was none
    expected: str  # why nobody could avoid it; "" if torchrun should have gone on
    used_up: bool  # whether its ranks used up the restarts without a step


@dataclass
class Machine:
    """A machine, and the command on it."""

    name: str  # "node2"
    words: list[str]  # the command, with what differs by machine filled in
    work: str  # the working directory, on its disk
    tmp: str  # a folder for temporary files
    command: foreign_command.Command | None = None  # None: nothing runs there
    starts: int = 0  # of the command
    started: float = 0.0  # the moment of the last one
    attempts: int = 0  # how often the command has started ranks, since its own start
    status: int | None = None  # with which the command has ended; None: it runs, or never did
    ended: float | None = None  # when it was seen to have ended, though others live; None: it runs
    cut: bool = False  # whether its link is down
    was_cut: bool = False  # whether its link was down since the command was started
    leaves: bool = False  # whether an event has ended its command
    back: float | None = None  # when it comes back, or its link is mended; None: not planned
    wait_for_others: float = 0.0  # it comes back so many seconds after the others have gone on
    ranks_until: float = 0.0  # the moment at which a rank was last seen there
    tracebacks: set[str] = field(default_factory=set)  # who prints one there, as in Run


@dataclass
class MachinesRun(Run):
    """The command, run on several machines until it has ended well on the first, or has failed.

    Run's kills are Events. Its folder has a working directory for each machine: "work" is that of
    the first, or of all, if they share one.
    """

    clock: float = 0.0  # what time.time() gave at its start: so are moments of files counted
    machines: list[Machine] = field(default_factory=list)
    printed_by: list[PrintedBy] = field(default_factory=list)
    leaders: dict[int, Leader] = field(default_factory=dict)  # by process id
    worlds: list[World] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else the reader should know
    last_step: str = ""  # the last that was printed: "step 20"
    lost: float | None = None  # the moment when the rendezvous was lost, until all are started anew
    at_the_end: list[Machine] = field(default_factory=list)  # those that had ranks at the end
