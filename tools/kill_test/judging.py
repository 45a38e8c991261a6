"""What a round proves, or why it has failed."""

import bisect
import itertools
import math
from typing import NamedTuple

from .comparing import difference
from .reading import masked
from .records import Verdict


class PrintedStep(NamedTuple):
    """A line of a round that says how far it has come."""

    line: int  # its number
    place: float  # which step of the undisturbed run it is, from 0; 3.5: one between 3 and 4


class Gap(NamedTuple):
    """Steps of which a round shows no trace."""

    first: int  # places of the first and the last of them
    last: int


def judge(options, reference, run):
    """Return the Verdict about a round in which a kill has hit. Note in its kills what they cost.

    options, reference: of the test. run: the Run.
    """
    steps = printed_steps(reference, run)
    verdict = Verdict()
    anew = None  # the step after which it began anew, the last of these; None: it did not
    for number, kill in enumerate(run.kills):
        before = [step.place for step in steps if step.line <= kill.lines]
        kill.place = max(before, default=None)
        if not kill.restarted:  # nobody missed it: what follows is due to the kill before
            continue
        next_kill = next((other for other in run.kills[number + 1 :] if other.restarted), None)
        after = note_cost(reference, run, kill, next_kill, steps)
        if began_anew(reference, kill, after):
            anew = max(kill.place, anew or 0)
        elif went_on(reference, kill, after, next_kill):
            verdict.went_on = kill.went_on = True
    find_failure(options, reference, run, steps, anew, verdict)
    again = max((kill.again for kill in run.kills), default=0)
    asks = anew is None and not verdict.note and not reference.cyclic
    if asks and again > max(2, len(reference.marks) / 2):
        verdict.note = (
            f"one kill cost {again:.0f} of {len(reference.marks)} steps: does it go on from the"
            " newest of its snapshots?"
        )
    conclude(reference, run, anew, verdict)
    return verdict


def printed_steps(reference, run):
    """Return which steps of the undisturbed run the round has printed, a list of PrintedStep."""
    known = [each for each in run.printed if each.mark in reference.place]
    numbers = [mark.numbers for mark in reference.marks]
    sign = -1 if numbers[:1] > numbers[-1:] else 1  # it may count down
    numbers = [signed(mark, sign) for mark in reference.marks]
    if len(known) == len(run.printed) or numbers != sorted(numbers):
        return [PrintedStep(each.line, reference.place[each.mark]) for each in known]
    # A script that prints every ten steps from its start on prints others when it goes on.
    steps = []
    for each in run.printed:
        between = bisect.bisect(numbers, signed(each.mark, sign)) - 0.5
        steps.append(PrintedStep(each.line, reference.place.get(each.mark, between)))
    return steps


def signed(mark, sign):
    """Return the numbers of a mark, with the sign that lets them grow."""
    return tuple(sign * number for number in mark.numbers)


# ---- After a kill ----


def note_cost(reference, run, kill, next_kill, steps):
    """Note with which line the script went on after a kill, and how many steps it did again.

    Return the places of the steps that it printed up to next_kill (None: up to the end).
    """
    end = next_kill.lines if next_kill else math.inf
    # It is no sign that the script goes on, if the undisturbed run prints it, too.
    always = {masked(line.text) for line in reference.run.resumed}
    begin = kill.lines
    for line in run.resumed:
        if kill.lines < line.line <= end and masked(line.text) not in always:
            begin, kill.resumed = line.line, line.text
            break
    later = [step.place for step in steps if begin < step.line <= end]
    if kill.place is not None and later:
        kill.again = max(0, min(kill.place, max(later)) - min(later) + 1)
    return [step.place for step in steps if kill.lines < step.line <= end]


def began_anew(reference, kill, after):
    """Return whether the script began its work anew after a kill.

    after: the places of the steps that it printed up to the next kill.
    """
    if kill.place is None or reference.cyclic:
        return False  # that cannot be seen
    return bool(after) and min(after) <= reference.beginning


def went_on(reference, kill, after, next_kill):
    """Return whether the script went on after a kill. (If it did not begin anew.)"""
    if kill.resumed:
        return True
    if reference.cyclic:
        return False
    if kill.place is None:
        return bool(after) and min(after) > reference.beginning
    return bool(after) or next_kill is None


# ---- The verdict ----


def find_failure(options, reference, run, steps, anew, verdict):
    """Note in the Verdict why the round has failed, if it has."""
    marks = reference.marks
    if differs := difference(options, reference, run):
        verdict.unequal = differs.judged
        verdict.failure = f"not equal: {differs.text}" if differs.judged else differs.text
    elif not reference.bar and (gap := undone(reference, run, {step.place for step in steps})):
        first, last = marks[gap.first].text, marks[gap.last].text
        what = f"nobody was seen to do {first}"
        if first != last:
            what += f" to {last}"
        if run.keeps_lines:
            verdict.note = (
                f"{what}; but printed lines were lost in a buffer, as in a pipe: flush them"
            )
        else:
            verdict.failure = f"{what} (the result is equal)"
    elif anew is not None and anew + 1 >= max(2, len(marks) / 2):
        verdict.failure = f"it began anew after {marks[int(anew)].text}: its work was lost"


def conclude(reference, run, anew, verdict):
    """Note in the Verdict what became of the script, and whether that proves something."""
    # Nobody need miss a worker.
    missed = [kill for kill in run.kills if kill.restarted or kill.kind != "worker"]
    verdict.proves = verdict.went_on or not missed
    if verdict.went_on:
        verdict.how = "went on"
    elif anew is not None:
        verdict.how = "began anew"
    elif not missed:
        verdict.how = "nothing had to be started again"
    elif not missed[0].restarted:
        verdict.how = f"but proves nothing: {missed[0].name} was not seen to start again"
    elif reference.marks and all(kill.place is None for kill in run.kills):
        verdict.how = "but proves nothing: killed before it had printed a step"
    else:
        verdict.how = "not seen to go on"


# ---- Steps that nobody was seen to do ----


def undone(reference, run, places):
    """Return the first Gap in the steps of a round that no kill explains, or None.

    Unprinted may be a step that was done when the kill came, and what the other ranks did until
    they noticed. places: of all steps that the round has printed.
    """
    # All of its steps are steps of the undisturbed run, too.
    whole = all(place == int(place) for place in places)
    # Others may have lived on after the one that prints had been killed.
    lives = [kill.others_until - kill.seconds for kill in run.kills if kill.kind != "launcher"]
    life = max([0, *lives])
    for before, behind in itertools.pairwise(sorted({-1, *places, len(reference.marks)})):
        gap = Gap(math.floor(before) + 1, math.ceil(behind) - 1)
        if gap.first > gap.last:
            continue
        if takes_too_long(reference, gap, life, whole):
            return gap
        follows = gap.first > 0 and before == gap.first - 1
        if follows and whole and has_a_long_step(reference, run, gap):
            return gap
    return None


def takes_too_long(reference, gap, life, whole):
    """Return whether the steps of a gap took the undisturbed run longer than ranks lived on.

    life: seconds that others lived on after a kill.
    """
    seconds = reference.times[gap.last] - reference.times[gap.first]
    if seconds > 3 * life + 0.2:
        return True
    # A line or two may come late; where nobody lived on, no more.
    return gap.last - gap.first >= 2 and whole and not life


def has_a_long_step(reference, run, gap):
    """Return whether the kills left too little time for the steps of a gap: one that takes long."""
    marks, times = reference.marks, reference.times
    begin, end = run.marks[marks[gap.first - 1]], math.inf
    if gap.last + 1 < len(marks):
        end = run.marks[marks[gap.last + 1]]
    ends = [
        max(kill.seconds, kill.others_until) for kill in run.kills if begin <= kill.seconds < end
    ]
    need = times[gap.last] - times[gap.first - 1]
    return bool(ends) and need > 1 and need > 2 * (max(ends) - begin) + 0.5
