"""Draw who is killed, and when."""

import bisect

from .options import KINDS
from .records import PlannedKill

AT_THE_END = 0.2  # so many of the kills fall into the last tenth: the last steps and the last save
AFTER_A_SAVE = 0.7  # so many fall while there is something to lose
SOON = 0.3  # so many of the later ones fall while the script starts again
# In each fifth round, the kill comes after the last step: a loop that looks for its end behind the
# step takes one step too many then, at each start.
LATE_ROUND = 5
LATE_DRAWS = 3  # so often is that tried


def draw_kills(options, draws, reference, part):
    """Return a list of PlannedKill, each at a moment when the undisturbed run had such a process.

    The moment is counted from the last mark before it, "epoch 3", say: a round that has to do work
    again comes to it later. So the kills fall over the whole run.

    draws: a random.Random. part: the kills fall into this part of the run, from 0 to 1.
    """
    kinds = [kind for kind in options.victims if kind in reference.seen]
    count = draws.randint(1, options.kills)
    kills = [draw_kill(kinds, draws, reference, part) for _ in range(count)]
    kills.sort(key=lambda kill: (kill.marks, kill.seconds))
    start = reference.times[0] if reference.times else reference.run.seconds / 5
    for kill in kills[1:]:
        if draws.random() < SOON:
            kill.soon = draws.random() * start
    return kills


def draw_late_kill(options, draws, reference, part):
    """Return a list of one PlannedKill, between the last step and the end; or [] if none fits.

    A rank is killed, if the caller has not asked for others alone. The arguments are those of
    draw_kills().
    """
    kinds = [kind for kind in KINDS if kind in options.victims and kind in reference.seen]
    if not reference.marks or reference.cyclic:
        return []
    last_step, end = reference.times[-1], reference.seen[kinds[0]].last
    seconds = part * draws.random() * max(0.0, end - last_step)
    return [PlannedKill(len(reference.marks), seconds, kinds[0], draws.random())]


def draw_kill(kinds, draws, reference, part):
    """Return one PlannedKill."""
    kind, place, which = draws.choice(kinds), draws.random(), draws.random()
    if draws.random() < AT_THE_END:
        place = 0.9 + place / 10
    first, last = reference.seen[kind].first, reference.seen[kind].last
    if draws.random() < AFTER_A_SAVE:
        first = min(max(first, reference.run.saved), last)
    seconds = part * (first + place * (last - first))
    times = [0, *reference.times]
    marks = bisect.bisect(times, seconds) - 1
    return PlannedKill(marks, seconds - times[marks], kind, which)
