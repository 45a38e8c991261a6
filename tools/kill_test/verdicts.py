"""What a round on several machines proves, or why it has failed."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .disks import about_disks, disks_differ
from .equality import compare_results
from .judging import began_anew, note_cost, printed_steps, undone, went_on
from .records import Verdict

LIVED_ON = 3  # seconds: no rank works on for longer, once another one is missing
TURNS = 4  # so often by turns do two machines print only if both train


@dataclass
class MachinesVerdict(Verdict):
    """What a round on several machines has shown."""

    equality: str = ""  # what was compared, and how far off it is
    notes: list[str] = field(default_factory=list)  # what else the reader should know


class Halves(NamedTuple):
    """Two machines that trained at the same time, and did not know of each other."""

    machines: tuple[str, str]
    steps: tuple[str, str]  # the last step of each
    since: float  # moments
    until: float


def judge_machines(test, run, measure):
    """Return the MachinesVerdict about a round; note in its events what they cost.

    test: the KillTest. run: the MachinesRun. measure: a function that returns the Distance of an
    undisturbed run on as few machines as may be, or None; it takes as long as that run.
    """
    reference, verdict = test.reference, MachinesVerdict(notes=[*run.notes])
    steps = printed_steps(reference, run)
    anew = note_events(reference, run, steps, verdict)
    verdict.notes += [*about_disks(run), *about_late_starts(reference, run)]
    if run.failure:
        verdict.failure = run.failure
        return verdict
    equality = compare_results(test, run, measure)
    verdict.equality = equality.text
    verdict.notes += filter(None, [equality.note, disks_differ(reference, run)])
    failures = [
        split_brain(reference, run),
        equality.fault,
        nobody_did(reference, run, steps),
        avoidable_end(run),
        began_too_late(reference, run, steps),
    ]
    verdict.failure = next(filter(None, failures), "")
    verdict.unequal = bool(equality.fault) and verdict.failure == equality.fault
    conclude(reference, run, anew, verdict)
    return verdict


def note_events(reference, run, steps, verdict):
    """Note what each event has cost. Return after which step the work was begun anew, or None."""
    anew = None
    for number, event in enumerate(run.kills):
        before = [step.place for step in steps if step.line <= event.lines]
        event.place = max(before, default=None)
        event.others_until = min(event.others_until, event.seconds + LIVED_ON)
        if not event.restarted:  # nobody noticed
            continue
        next_event = next((other for other in run.kills[number + 1 :] if other.restarted), None)
        after = note_cost(reference, run, event, next_event, steps)
        note_steps_until_a_restart(run, event, next_event, steps)
        note_next_step(run, event, next_event)
        if text := about_an_old_snapshot(reference, run, event, steps, after):
            verdict.notes.append(text)
        if began_anew(reference, event, after):
            anew = max(event.place, anew or 0)
        elif went_on(reference, event, after, next_event):
            verdict.went_on = event.went_on = True
    return anew


def note_steps_until_a_restart(run, event, next_event, steps):
    """Count in an Event the steps, too, that came before it disturbed the others, and again later.

    A machine that joins is met some steps later, for one.
    """
    end_line, end = (next_event.lines, next_event.seconds) if next_event else (math.inf, math.inf)
    for world in run.worlds:
        if not event.seconds < world.seconds <= end:
            continue
        printed = [each.line for each in run.printed_by if each.seconds <= world.seconds]
        line = max(printed, default=0)
        before = [step.place for step in steps if step.line <= line]
        after = [step.place for step in steps if line < step.line <= end_line]
        if before and after:
            event.again = max(event.again, min(max(before), max(after)) - min(after) + 1)


def about_an_old_snapshot(reference, run, event, steps, after):
    """Return in words that all was done again that the others had done without a machine, or "".

    event: with which a machine came back. after: the places of the steps that were printed then.
    """
    earlier = [other for other in run.kills if other.restarted and other.lines < event.lines]
    if event.kind not in ("back", "join") or not earlier or not after:
        return ""
    away = [other.lines for other in earlier if other.machine == event.machine]
    since = away[-1] if away else 0
    meanwhile = [step.place for step in steps if since < step.line <= event.lines]
    if not meanwhile or min(after) > min(meanwhile):
        return ""
    again = max(meanwhile) - min(after) + 1
    if again <= max(2, len(reference.marks) / 20):
        return ""
    return (
        f"when {event.name}, all was done again that the others had done without it"
        f" ({again:.0f} printed steps): is the newest snapshot of all machines taken?"
    )


def note_next_step(run, event, next_event):
    """Note in an Event when the next step was done after it, and by how many ranks."""
    worlds = [world for world in run.worlds if world.seconds > event.seconds]
    end = next_event.seconds if next_event else math.inf
    if not worlds:
        return
    for each in run.printed_by:
        if worlds[0].seconds < each.seconds <= end and each.line > event.lines:
            event.next_step = each.seconds
            known = [world for world in worlds if world.seconds < each.seconds]
            event.next_ranks = known[-1].size
            return


# ---- What else may have gone wrong ----


def split_brain(reference, run):
    """Return in words that two machines trained at the same time, each for itself, or ""."""
    halves = find_halves(run)
    if not halves and not print_by_turns(reference.run):  # else each rank prints its steps
        halves = print_by_turns(run)
    if not halves:
        return ""
    one, other = halves.machines
    return (
        f"split brain: from {halves.since:.1f} to {halves.until:.1f} s, {one} and {other} both"
        f" trained, each for itself: up to {halves.steps[0]} and {halves.steps[1]}"
    )


def print_by_turns(run):
    """Return the Halves if two machines print steps by turns, and no ranks start meanwhile.

    Where one machine takes over from another, new ranks start between their steps.
    """
    turns = []  # the last PrintedBy of each turn, since ranks were last started
    starts = sorted(world.seconds for world in run.worlds)
    for each in run.printed_by:
        if starts and starts[0] < each.seconds:
            if len(turns) >= TURNS:
                break
            turns = []
            starts = [start for start in starts if start >= each.seconds]
        if turns and turns[-1].machine == each.machine:
            turns[-1] = each
        else:
            turns.append(each)
    if len(turns) < TURNS:
        return None
    one, other = turns[-2:]
    steps = one.mark.text, other.mark.text
    return Halves((one.machine, other.machine), steps, turns[0].seconds, other.seconds)


def find_halves(run):
    """Return the Halves if two machines both had a rank 0 at a time, and both trained; or None."""
    leaders = sorted(run.leaders.values(), key=lambda leader: leader.first)
    for number, one in enumerate(leaders):
        for other in leaders[number + 1 :]:
            if one.machine == other.machine:
                continue
            since, until = max(one.first, other.first), min(one.last, other.last)
            steps = [
                [
                    each
                    for each in run.printed_by
                    if each.machine == leader.machine and since < each.seconds < until
                ]
                for leader in (one, other)
            ]
            if min(map(len, steps)) >= 2:  # one may be a last line that came late
                last = steps[0][-1].mark.text, steps[1][-1].mark.text
                return Halves((one.machine, other.machine), last, since, until)
    return None


def nobody_did(reference, run, steps):
    """Return in words which steps nobody was seen to do, or ""."""
    if reference.bar:
        return ""
    gap = undone(reference, run, {step.place for step in steps})
    if not gap:
        return ""
    first, last = reference.marks[gap.first].text, reference.marks[gap.last].text
    return f"nobody was seen to do {first}" + (f" to {last}" if first != last else "")


def avoidable_end(run):
    """Return in words that the command ended where torchrun should have gone on, or ""."""
    for end in run.ends:
        if end.expected:
            continue
        after = f" after {end.after}" if end.after else ""
        error = f": {end.error}" if end.error else ""
        return f"the command on {end.machine} ended (status {end.status}){after}{error}"
    return ""


def began_too_late(reference, run, steps):
    """Return in words that the work was begun anew though half of it was done, or "".

    steps: all that were printed, a list of PrintedStep.
    """
    machines = {each.line: each.machine for each in run.printed_by}
    done = -1.0  # the furthest step so far
    for step in [] if reference.cyclic else steps:
        half_is_done = done + 1 >= max(2, len(reference.marks) / 2)
        if half_is_done and step.place <= reference.beginning:
            return (
                f"it began anew on {machines[step.line]}, though {reference.marks[int(done)].text}"
                " had been done"
            )
        done = max(done, step.place)
    return ""


def about_late_starts(reference, run):
    """Yield which machine was started when too little was left to do for it to take part."""
    if any(end.used_up for end in run.ends):  # it fails at each start
        return
    for event in run.kills:
        if event.kind in ("back", "join") and came_too_late(reference, run, event):
            yield (
                f"{event.name}, but the last step was done"
                f" {max(0, seconds_left(run, event)):.0f} s later, and a start takes"
                f" {reference.times[0]:.0f} s: let the run last longer, so that it takes part"
            )


def came_too_late(reference, run, event):
    """Return whether nobody had to notice an Event, as the work was done, or nearly done."""
    if event.restarted or not reference.times:
        return False
    starts = event.kind in ("back", "join")
    needed = reference.times[0] if starts else 0
    return seconds_left(run, event) <= needed


def seconds_left(run, event):
    """Return how long after an Event the last step was printed, in seconds."""
    return max((each.seconds for each in run.printed_by), default=0.0) - event.seconds


def conclude(reference, run, anew, verdict):
    """Note in the MachinesVerdict what became of the script, and whether that proves something."""
    missed = [event for event in run.kills if event.restarted]
    too_late = all(came_too_late(reference, run, event) for event in run.kills)
    verdict.proves = verdict.went_on or not (missed or too_late)
    if verdict.went_on:
        verdict.how = "went on"
    elif anew is not None:
        verdict.how = "began anew"
    elif not missed and too_late:
        verdict.how = "but proves nothing: the work was done, or nearly done"
    elif not missed:
        verdict.how = "nobody noticed"
    elif all(event.place is None for event in missed):
        verdict.how = "but proves nothing: it came before a step was printed"
    else:
        verdict.how = "not seen to go on"
