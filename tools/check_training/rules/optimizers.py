"""Schedules of the learning rate, averages of the weights, and optimizers that are made anew."""

import collections

from ..findings import Found, Question, rule
from ..records.optimizer import Average, Optimizer, Schedule


@rule()
def schedule_never_stepped(run):
    """A schedule's step() is never called.

    Looks alike, and is right: parts of a SequentialLR, which wait for their turn; a schedule that
    is stepped after each epoch, in a run of one epoch.
    """
    for rank in run.ranks.values():
        for schedule in schedules_that_count(rank):
            if is_never_stepped(rank, schedule):
                yield Found(
                    f"the schedule {in_words(schedule)} is never stepped: the rate stays",
                    "call its step()",
                )


@rule()
def schedule_rises_again(run):
    """A cosine schedule is stepped more often than it was made for, and runs back up.

    It is a question: warm restarts may be meant.
    """
    for rank in run.ranks.values():
        for schedule in schedules_that_count(rank):
            if schedule.name != "CosineAnnealingLR" or is_never_stepped(rank, schedule):
                continue
            if schedule.last > schedule.total:
                yield Question(
                    f"{in_words(schedule)} was made for {schedule.total} steps, and its step() was"
                    f" called {schedule.last} times: the rate rises again",
                    "is its length counted in epochs, and step() called for each batch?",
                )


@rule()
def schedule_of_one_process(run):
    """A schedule was made for as many steps as one process alone would take.

    Looks alike, and is right: a run that was cut, a schedule in another unit than steps.
    """
    if run.cut or run.world_size == 1:
        return
    for rank in run.ranks.values():
        for schedule in schedules_that_count(rank):
            if not schedule.total or schedule.steps != schedule.last:
                continue
            if is_never_stepped(rank, schedule):
                continue
            times_fewer = schedule.total / max(1, schedule.last)
            if abs(times_fewer / run.world_size - 1) < 0.1:
                yield Question(
                    f"{in_words(schedule)} was made for {schedule.total} steps, and the run ends"
                    f" after {schedule.last}, {run.world_size} times fewer",
                    "was its length counted before the data were shared out?",
                    "pitfalls/learning_rate_and_world_size.py",
                )


def is_never_stepped(rank, schedule):
    """Return whether a Schedule of a rank should have been stepped by the end of the run."""
    if schedule.calls != 1:  # one is its own start's
        return False
    passes = sum(map(len, rank.training_passes().values()))
    return schedule.steps > 1000 or (schedule.steps > 20 and passes > 1)


def schedules_that_count(rank):
    """Return a rank's schedules as they stand at last, without those that another is made of.

    Those of a run without a step are left out, too.
    """
    latest = {each.schedule: each for each in rank.records(Schedule)}
    parts = {part for each in latest.values() for part in each.parts}
    return [each for each in latest.values() if each.schedule not in parts and each.steps]


def in_words(schedule):
    """Return "StepLR (train.py:42)"."""
    return f"{schedule.name} ({schedule.line})"


@rule()
def average_never_updated(run):
    """An AveragedModel is never updated: it holds the first weights.

    It is a question: some scripts begin to average late.
    """
    for rank in run.ranks.values():
        latest = {each.average: each for each in rank.records(Average)}
        for average in latest.values():
            if average.updates == 0 and average.steps > 19:
                yield Question(
                    f"AveragedModel ({average.line}) is never updated: after {average.steps} steps"
                    " it holds the first weights",
                    "call update_parameters(model) after each step",
                )


@rule()
def optimizer_made_anew(run):
    """An optimizer is made again over the same parameters: its momentum begins at 0.

    Looks alike, and is right: one second optimizer, for fine-tuning; optimizers without momentum.
    """
    for rank in run.ranks.values():
        made = collections.defaultdict(set)
        for each in rank.records(Optimizer):
            if each.has_momentum:
                made[each.line, each.same_parameters].add(each.optimizer)
        for (line, _), keys in made.items():
            if len(keys) > 2:
                yield Question(
                    f"the optimizer is made anew {len(keys)} times, over the same parameters"
                    f" ({line})",
                    "its momentum is lost each time: make it once, before the epochs",
                    once=f"anew {line}",
                )
