"""What happens between the steps: an evaluation, a save, and which ranks wait for which.

A pause is what the gaps of all ranks have in common: mostly it lies between two epochs.
"""

import collections
import statistics
from dataclasses import dataclass

from .findings import Found, Question
from .records.files import Save
from .records.times import Gap, StepTimes
from .words import in_words

DOES = {  # {what: in words, of one rank}
    "evaluation": "evaluates",
    "saving": "saves",
    "loading": "waits for its loader",
    "other": "is in its own code",
}
CURES = {  # {what: (the cure, the page)}, if the others wait
    "evaluation": ("share it out over the ranks, or evaluate more rarely", "recipes/metrics.py"),
    "saving": ("save more rarely", "recipes/checkpoint_any_world_size.py"),
    "loading": ("more workers, or persistent_workers=True", "benchmarks/README.md#throughput"),
    "other": ("do it on all ranks, or more rarely", "pitfalls/slow_rank.py"),
}


@dataclass(slots=True)
class Doing:
    """What a rank does in a gap, apart from waiting for others."""

    what: str  # a key of DOES: what takes most of it
    line: str  # of the script; "": not known
    busy: float  # seconds of the gap in which it does not wait
    waiting: float  # seconds in exchanges and collective calls, beyond the rank that comes last


@dataclass(slots=True)
class Pause:
    """A gap that all ranks have at the same time."""

    step: int  # before the end of this one, on the first rank
    seconds: float  # on the rank where it is longest
    of: dict[int, Doing]  # {rank: Doing}

    @property
    def last(self):
        """The rank that waits least: the others wait for it, if they wait."""
        return min(self.of, key=lambda rank: self.of[rank].waiting)

    @property
    def wait(self):
        """How long the other ranks wait, in seconds: the least of them. 0 if there are none."""
        others = [self.of[rank].waiting for rank in self.of if rank != self.last]
        return min(others, default=0.0)


def pauses_of(run):
    """Return the Pause objects of a run of several ranks, in their order."""
    gaps = {rank: noted for rank, noted in run.records_by_rank(Gap).items() if noted}
    if len(gaps) < len(run.ranks):
        return []
    found = []
    first, *others = sorted(gaps)
    for gap in gaps[first]:
        row = {first: gap}
        for rank in others:
            together = [each for each in gaps[rank] if overlap(each, gap) > 0.5 * length(gap)]
            if together:
                row[rank] = max(together, key=lambda each: overlap(each, gap))
        if len(row) == len(gaps):
            found.append(pause(run, row))
    return found


def length(gap):
    """Return the seconds of a Gap."""
    return gap.end - gap.begin


def overlap(one, other):
    """Return the seconds that two gaps, spans or the like have in common."""
    return max(0.0, min(one.end, other.end) - max(one.begin, other.begin))


def pause(run, row):
    """Return the Pause that these gaps are. row: {rank: Gap}."""
    exchanges = {
        rank: sum(
            span.end - span.begin for span in gap.spans if span.part in ("exchange", "collective")
        )
        for rank, gap in row.items()
    }
    least = min(exchanges.values())
    doing = {
        rank: what_it_does(run.ranks[rank], gap, exchanges[rank] - least)
        for rank, gap in row.items()
    }
    first = row[min(row)]
    return Pause(first.number, max(map(length, row.values())), doing)


def what_it_does(rank, gap, waiting):
    """Return a Doing. rank: a Rank. waiting: seconds for which it waits for others in the gap."""
    seconds, lines = collections.Counter(), {}
    for span in evaluations_of(rank):
        if overlap(span, gap):
            seconds["evaluation"] += overlap(span, gap)
            lines["evaluation"] = span.line
    for save in rank.records(Save):
        if gap.begin <= save.time <= gap.end:
            seconds["saving"] += save.time - save.begin
            lines["saving"] = save.line
    for span in gap.spans:
        if span.part in ("loading", "workers") and not lines.get("evaluation"):
            seconds["loading"] += span.end - span.begin
    busy = length(gap) - waiting
    seconds["other"] = busy - sum(seconds.values())
    what = max(seconds, key=seconds.get)
    return Doing(what, lines.get(what, ""), busy, waiting)


@dataclass(slots=True)
class Evaluation:
    """When a rank went through a loader without training."""

    begin: float
    end: float
    line: str


def evaluations_of(rank):
    """Return the Evaluation objects of a Rank."""
    return [
        Evaluation(each.start.time, each.progress.last_batch, each.start.line)
        for passes in rank.evaluations().values()
        for each in passes
        if each.progress.last_batch is not None
    ]


def usual_step(rank):
    """Return the median of the seconds of a Rank's steps."""
    ends = {each.number: each.end for each in rank.records(StepTimes)}
    steps = [end - ends[number - 1] for number, end in ends.items() if number - 1 in ends]
    return statistics.median(steps) if steps else 0.0


def lines_of(run, pauses):
    """Yield lines: which part of the run are steps, and what comes between them."""
    whole = run.seconds_of_training()
    usual = usual_step(run.ranks[min(run.ranks)])
    extra = collections.Counter()
    for each in pauses:
        extra[each.of[each.last].what] += max(0.0, each.seconds - usual)
    if not whole or sum(extra.values()) < 0.05 * whole:
        return
    steps = 1 - sum(extra.values()) / whole
    parts = ", ".join(f"{what} {took / whole:.0%}" for what, took in extra.most_common())
    yield f"of {whole:.1f} s from the first step to the last: steps {steps:.0%}, {parts}"
    longest = max(pauses, key=lambda each: each.seconds)
    if longest.seconds < 0.2:
        return
    doing = longest.of[longest.last]
    at = f" ({doing.line})" if doing.line else ""
    yield (
        f"the longest pause: {longest.seconds:.1f} s, before step {longest.step} ends;"
        f" rank {longest.last} {DOES[doing.what]}{at}"
    )


def findings_of(run, pauses):
    """Yield what is found of ranks that wait between the steps, while one is busy."""
    whole = run.seconds_of_training()
    groups = collections.defaultdict(list)
    for each in pauses:
        if each.wait > 0.5 * each.seconds:
            doing = each.of[each.last]
            groups[each.last, doing.what, doing.line].append(each.wait)
    for (rank, what, line), waits in groups.items():
        if too_short_to_tell(waits):
            continue
        share = sum(waits) / whole
        if share < 0.1:
            continue
        kind = Found if share > 0.3 else Question
        at = f" ({line})" if line else ""
        others = in_words(sorted(set(run.ranks) - {rank}))
        verb = "waits" if len(run.ranks) == 2 else "wait"
        yield kind(
            f"{others} {verb} while rank {rank} {DOES[what]}{at}: {statistics.median(waits):.1f} s"
            f" in each of {len(waits)} pauses between steps, {share:.0%} of the run",
            *CURES[what],
        )
    yield from loaders_that_begin_slowly(pauses, whole)


def too_short_to_tell(waits):
    """Return whether a short run, or a busy machine, may be the cause of waits, in seconds."""
    return len(waits) < 3 or statistics.median(waits) < 0.1 or sum(waits) < 0.75


def loaders_that_begin_slowly(pauses, whole):
    """Yield a question if all ranks wait for their loaders between the steps, for long.

    whole: seconds of the run. In a short run, an epoch is short, and the begin weighs much.
    """
    waits = [
        min(doing.busy for doing in each.of.values())
        for each in pauses
        if {doing.what for doing in each.of.values()} == {"loading"}
    ]
    if too_short_to_tell(waits):
        return
    share = sum(waits) / whole
    if share > 0.3:
        yield Question(
            f"all ranks wait for their loaders: {statistics.median(waits):.1f} s in each of"
            f" {len(waits)} pauses between steps, {share:.0%} of the run",
            "are workers made anew in each epoch? persistent_workers=True keeps them (in longer"
            " epochs, it weighs less)",
            "benchmarks/README.md#throughput",
        )
