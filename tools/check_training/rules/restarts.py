"""After a restart: does the order of the items go on, or does it begin anew?

What is said here holds for any sampler. That of a DistributedSampler is in resumes.py.
"""

import math
import os

from ..findings import Question, rule
from ..records.files import Load, Move, Save


@rule(unless={"models", "weights"})
def order_begins_anew(run):
    """A run goes on after an epoch, and its first pass has the order of the first epoch again.

    Looks alike, and is right: no shuffle, the same order in each epoch, a file that was saved in
    the first epoch. It is a question: the script may mean to begin its data anew.
    """
    saved = time_of_the_state(run)
    if saved is None:
        return
    for number, rank in run.ranks.items():
        before = run.before.ranks.get(number)
        after = [each for each in trained_by_indices(rank) if each.start.replicas is None]
        if before is None or not after:
            continue
        old = [each for each in trained_by_indices(before) if has_the_length_of(each, after[0])]
        finished = [each for each in old if is_finished(each, saved)]
        if not finished or len(old) < 2:
            continue
        now, first, second = (beginning(each) for each in (after[0], old[0], old[1]))
        if now == first != second:
            yield Question(
                f"after the resume, the items come in the order of the first epoch again"
                f" ({after[0].start.line}), though {len(finished)} were finished and saved",
                "is the sampler's generator, or its epoch, in what is saved?",
                "recipes/resume_mid_epoch.py",
                once="order after the resume",
            )


def time_of_the_state(run):
    """Return when the file was saved from which a run goes on; None: it goes on from none."""
    if run.before is None:
        return None
    saves, moves = run.before.records(Save), run.before.records(Move)
    loaded = {load.path for load in run.records(Load) if load.path and not load.steps}
    times = [
        save.time
        for path in loaded
        for name, until in earlier_names(path, moves)
        for save in saves
        if save.path == name and save.time <= until
    ]
    return max(times, default=None)


def earlier_names(path, moves):
    """Yield (name that a file had, until when): its own, and what it or its folder was called."""
    yield path, math.inf
    for move in moves:
        if move.source is None or move.path is None:
            continue
        if path == move.path or path.startswith(move.path + os.sep):
            yield move.source + path[len(move.path) :], move.time


def trained_by_indices(rank):
    """Return a rank's passes in which it trained on several batches that a sampler has drawn."""
    return [each for each in rank.passes if each.trains and len(each.progress.first_orders) > 1]


def has_the_length_of(one, other):
    """Return whether two passes are over sets of the same length."""
    return one.start.length == other.start.length


def is_finished(one, time):
    """Return whether a pass has ended, and its last batch was taken before a time, in seconds."""
    return one.progress.exhausted and (one.progress.last_batch or 0) < time


def beginning(one):
    """Return the order of the first items of a pass: of so many batches as each has at least."""
    return one.progress.first_orders[:2]
