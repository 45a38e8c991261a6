"""Reads folders of records, of one machine or of several, also while they are being written."""

import math
import pathlib
import re
from dataclasses import dataclass, field

from . import lines
from .clocks import Clocks
from .recording import SITE
from .records.process import Joined
from .runs import Rank, Run

# An error that could not be written either.
NO_ROOM = "nothing can be written to {folder}: is the disk full? TMPDIR=FOLDER names another one"
NAME = re.compile(r".+-\d+(-\d+\.jsonl|\.failed)")  # "node1-7-123.jsonl": host, process, time
TOGETHER = 60  # seconds within which the ranks of one group join it


@dataclass(slots=True)
class Records:
    """All that folders of records tell."""

    runs: list[Run] = field(default_factory=list)  # the oldest first
    strangers: list[Rank] = field(default_factory=list)  # processes that have joined no group
    failures: list[str] = field(default_factory=list)  # of the recorder: last lines of tracebacks


def read(*folders, cut=False, stalled=False):
    """Return the Records of some folders, with all that is in them.

    cut, stalled: whether the command was ended before its own end, and whether it stands still.
    cut is None if that is not known: then a run was cut whose ranks have not all left.
    ValueError: another version of this tool has written them.
    """
    records, pieces = Records(), []
    for path in files_in(folders):
        if path.suffix == ".failed":
            said = path.read_text().strip().splitlines()
            records.failures.append(said[-1] if said else NO_ROOM.format(folder=path.parent))
        if path.suffix == ".jsonl":
            pieces += pieces_of(path)
    records.strangers = [each for each in pieces if each.number is None]
    groups = groups_of([each for each in pieces if each.number is not None])
    clocks = Clocks()
    have_one_clock = len({rank.machine.clock for ranks in groups for rank in ranks}) == 1
    for ranks in groups:
        is_last = ranks is groups[-1]
        if not have_one_clock:
            clocks.align(ranks)
            ranks = [rank.until() for rank in ranks]
        is_cut = cut if is_last and cut is not None else was_cut(ranks, cut)
        if any(rank.full for rank in ranks) or (is_cut and cut is None):
            ranks, is_cut = up_to_one_time(ranks), True
        before = records.runs[-1] if records.runs else None
        records.runs.append(Run(ranks, before, is_cut, stalled and is_last))
    return records


def was_cut(ranks, cut):
    """Return whether a group was ended before its own end. cut: as of read()."""
    if not all(rank.left for rank in ranks):
        return True
    return cut is None and any(rank.left[-1].error for rank in ranks)


def files_in(folders):
    """Return the paths of all files of records, sorted.

    A file that is in several folders, as copies are, counts where it is longest.
    """
    longest = {}
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*-*.*")):
            if SITE in path.parts or not NAME.fullmatch(path.name):
                continue
            known = longest.get(path.name)
            if known is None or known.stat().st_size < path.stat().st_size:
                longest[path.name] = path
    return sorted(longest.values())


def pieces_of(path):
    """Return a Rank for each time that a process has joined a group; at least one, if it wrote."""
    pieces, records, joined = [], [], False
    for line in path.read_text(errors="replace").splitlines(True):
        if not line.endswith("}\n"):  # it was killed meanwhile, or is writing it
            continue
        try:
            record = lines.read(line)
        except lines.NotWhole:  # it was copied meanwhile
            continue
        if isinstance(record, Joined):
            if joined:
                pieces.append(Rank(records))
                records = []
            joined = True
        records.append(record)
    if records:
        pieces.append(Rank(records, standing_of(path)))
    return pieces


def standing_of(path):
    """Return the Standing of a process, by the path of its records; None if it was not copied."""
    try:
        return lines.Standing.read(path.with_suffix(".now").read_bytes())
    except OSError:
        return None


def up_to_one_time(ranks):
    """Return the ranks of a group as far as all are known: the others went on meanwhile."""
    known = [rank.last for rank in ranks if rank.full or not rank.left]
    end = min(known, default=math.inf)
    return [rank.until(end) for rank in ranks]


def groups_of(ranks):
    """Return lists of the ranks that have joined one group, the oldest first."""
    by_clock = {}
    for rank in sorted(ranks, key=lambda rank: rank.begin):
        groups = by_clock.setdefault(rank.machine.clock, [])
        for group in groups:
            if belongs(rank, group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    if len(by_clock) < 2:
        return next(iter(by_clock.values()), [])
    return joined_over_clocks([part for groups in by_clock.values() for part in groups])


def belongs(rank, group):
    """Return whether a rank has joined a group in which others are already."""
    first = group[0]
    if (rank.world_size, rank.attempt) != (first.world_size, first.attempt):
        return False
    if rank.number in {each.number for each in group} or len(group) >= first.world_size:
        return False
    return rank.begin - first.begin < TOGETHER


def joined_over_clocks(parts):
    """Return the groups that parts make, each of ranks with one clock, the oldest first.

    Several groups may fit a part. It belongs to one that began at the same time by the calendar; if
    there is none, to the oldest: machines may have a wrong time, but all starts in one order.
    """
    groups = []
    for part in sorted(parts, key=lambda part: part[0].calendar):
        fitting = [group for group in groups if fits(part, group)]
        at_once = [
            group for group in fitting if abs(group[0].calendar - part[0].calendar) < TOGETHER
        ]
        if fitting:
            (at_once or fitting)[0].extend(part)
        else:
            groups.append([*part])
    return groups


def fits(part, group):
    """Return whether ranks with one clock may be the missing ones of a group."""
    one, first = part[0], group[0]
    if (one.world_size, one.attempt) != (first.world_size, first.attempt):
        return False
    if one.machine.clock in {rank.machine.clock for rank in group}:
        return False
    numbers = {rank.number for rank in group}
    return not numbers & {rank.number for rank in part}
