"""The data that the files of kill_test share.

A moment is a number of seconds since the start of the run, if nothing else is said. A line number
counts the lines that the run has printed, over all starts of the command, from 1.
"""

import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import foreign_command

from .options import Options

PAUSE = 0.05  # seconds between two looks at the processes


# ---- What is printed ----


class Bar(NamedTuple):
    """What tells a progress bar from others. It is drawn by the clock, so counts may be left out.

    A script may draw one over its steps, and a second one over the batches of an evaluation.
    """

    description: str  # the words in front, without numbers: "epoch"
    total: int  # 80 in "42/80"


class Mark(NamedTuple):
    """How far the script has come, as a line says it: "epoch 3 | step 20 | loss 0.5"."""

    words: tuple[str, ...]  # ("epoch", "step"); an empty one for the count in a progress bar
    numbers: tuple[int, ...]  # (3, 20)
    then: str  # the next word: "loss"; "" for a progress bar, which says "it/s" or "s/it"
    bar: Bar | None = None  # where the count in a progress bar is one of the numbers

    @property
    def kind(self):
        """What all lines of a kind share: "epoch 3 | loss" and "epoch 3 | saved" are two kinds."""
        return (*self.words, self.then, self.bar)

    @property
    def begins(self):
        """Whether it is a bar at 0: so it looks when it is made, also where work goes on."""
        return self.bar is not None and self.numbers[self.words.index("")] == 0

    @property
    def text(self):
        """The mark as it is shown: "epoch 3 step 20"."""
        pairs = zip(self.words, self.numbers, strict=True)
        return " ".join(f"{word} {number}".strip() for word, number in pairs)


class PrintedMark(NamedTuple):
    line: int  # the number of the line
    mark: Mark


class PrintedLine(NamedTuple):
    line: int  # its number
    text: str


class Result(NamedTuple):
    """A line with a result, which --line has found."""

    line: int  # its number
    words: str  # what else it says, without numbers: it tells one kind of result from another
    texts: list[str]  # all that matches --line


# ---- What is killed ----


@dataclass
class PlannedKill:
    """A kill as it was drawn."""

    marks: int  # it comes after so many different marks
    seconds: float  # and so many seconds after the last of these
    kind: str  # of KINDS
    which: float  # from 0 to 1: which one of that kind, in the order of their starts
    soon: float = 0.0  # or, if not 0, it comes so many seconds after the kill before


@dataclass
class Heir:
    """A process that a victim had started, and what it has written since."""

    times: int  # how often it was seen to have written more, errors apart
    size: int  # bytes that it had written at the last look, errors included
    most: int  # bytes that it had written without errors, the most of all looks


@dataclass
class Kill:
    """A kill that has hit, and what was seen of it afterwards."""

    kind: str  # of KINDS
    name: str  # of the victim: "worker of rank 1"
    pid: int  # its process id
    seconds: float  # the moment
    lines: int  # how many lines the run had printed
    last_line: str  # the last that was printed since the ranks had started; "" if there was none
    heirs: dict[int, Heir | None]  # by process id; None before the first look
    others: set[int]  # process ids of the other ranks (of the other workers, where there is none)
    before_a_save: bool  # nothing had been saved from which the script could go on
    others_until: float = 0.0  # the last moment at which one of these was seen
    restarted: bool = False  # whether ranks, or the command, have been started since
    lines_at_restart: int = 0  # how many lines the run had printed when that was first seen
    # What the judge finds:
    place: float | None = None  # the step of the undisturbed run to which it had come; None: none
    resumed: str = ""  # the line with which the script went on; "" if there was none
    went_on: bool = False  # whether the script was seen to go on after this kill
    again: float = 0  # how many steps were done again

    def note_restart(self, lines):
        """Note that ranks, or the command, were started again; lines: so many were printed."""
        if not self.restarted:
            self.restarted, self.lines_at_restart = True, lines


# ---- What is played ----


@dataclass
class Life:
    """A process, as long as it had one role."""

    kind: str  # of KINDS
    first: float  # the moments at which it was first and last seen
    last: float


@dataclass
class Run:
    """The command, run in a folder until it ended well, or failed."""

    folder: str
    kills: list[Kill] = field(default_factory=list)  # those that hit
    starts: int = 0  # of the command
    seconds: float = 0.0  # since its start; at last, how long it took
    failure: str = ""  # why it did not end well; "" if it did
    error: str = ""  # the script's own, at the last start
    # Its processes:
    lives: dict[tuple, Life] = field(default_factory=dict)  # by (kind, process id)
    ranks: set[int] = field(default_factory=set)  # process ids of all ranks that there were
    shells: dict[str, str] = field(default_factory=dict)  # {where a shell stands: its name}
    saved: float = 0.0  # the moment at which there was something to go on from; 0: not yet
    shares_store: bool = False  # the newest ranks use torchrun's store, one for all attempts
    stale: str = ""  # that ranks read the addresses of the dead, and the cure; "" if not seen
    keeps_lines: bool = False  # a kill may have cost lines that a process had not yet written
    # What it has printed:
    lines: int = 0  # how many
    last_line: str = ""
    last_of_start: str = ""  # the last line since the ranks were started; "" if there is none yet
    last_printed: float = 0.0  # the moment of the last line
    silence_told: bool = False  # whether it was said that nothing comes
    marks: dict[Mark, float] = field(default_factory=dict)  # the moment when each came first
    printed: list[PrintedMark] = field(default_factory=list)  # all of them, also those again
    results: list[Result] = field(default_factory=list)
    bars: set[Bar] = field(default_factory=set)  # all that were drawn
    resumed: list[PrintedLine] = field(default_factory=list)  # the lines that match --resumed
    # Who prints a traceback now, "[rank1]: "; "": no name.
    tracebacks: set[str] = field(default_factory=set)


@dataclass
class Span:
    first: float  # moments
    last: float


@dataclass
class Reference:
    """What the undisturbed run has shown, and to which each round is held."""

    run: Run
    result: str  # what all rounds must end with, in words
    seen: dict[str, Span]  # when there were processes of each kind
    # Its steps are the marks of the commonest kind.
    kind: tuple  # of these marks; () if there is none
    marks: list[Mark]  # each once, in the order in which they came first; none, or two and more
    times: list[float]  # the moments at which they came first
    beginning: int  # a step up to this place, from 0, is one with which work begins from the start
    cyclic: bool  # whether they come again and again, as "step 1" of each epoch does
    finals: dict[str, list]  # {words of a Result: [its texts, ...]} at the end
    patience: float  # seconds for all to end after the launcher
    round_limit: float  # seconds for a round
    place: dict[Mark, int] = field(init=False)  # which step it is, from 0

    def __post_init__(self):
        self.place = {mark: place for place, mark in enumerate(self.marks)}

    @property
    def bar(self):
        """The Bar that shows the steps, or None: lines do."""
        return self.marks[0].bar if self.marks else None


@dataclass
class Verdict:
    """What a round has shown."""

    failure: str = ""  # why it has failed; "" if it has not
    unequal: bool = False  # whether it has failed because it ended with another result
    how: str = ""  # what became of a round that has not failed
    went_on: bool = False  # whether the script was seen to go on after a kill
    proves: bool = False  # whether the round says something about a kill
    note: str = ""  # what else the reader should know


@dataclass
class Round:
    number: int  # from 1
    run: Run  # of its last draw
    verdict: Verdict


@dataclass
class KillTest:
    """What all runs of a test share."""

    options: Options
    folders: list[str] = field(default_factory=list)  # temporary ones, which are removed at the end
    copies: list[str] = field(default_factory=list)  # files that are copied into each run's folder
    totals: dict[str, int] = field(default_factory=dict)  # {word: 40}, if it first counted 1/40
    reference: Reference | None = None  # None until the undisturbed run has ended
    base: str = ""  # the folder for all runs
    lab: Any = None  # the Lab, while there is one
    fewest: int = 1  # on so many machines the command trains, too (--nnodes=1:2)
    fewer: Any = None  # the Distance of a run on so many, once it was measured

    def new_folder(self, prefix, place=None):
        """Make a temporary folder, which is removed at the end; return its path."""
        with foreign_command.later():  # noted before a signal can end this
            self.folders.append(tempfile.mkdtemp(prefix=prefix, dir=place))
        return self.folders[-1]

    def keep_or_remove(self, played):
        """Remove the folder of a Round, unless it has failed, or all are kept."""
        if not (played.verdict.failure or self.options.keep):
            shutil.rmtree(played.run.folder)
        elif self.base in self.folders:
            self.folders.remove(self.base)  # it stays, also after Ctrl-C
