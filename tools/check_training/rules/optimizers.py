"""Schedules of the learning rate, averages of the weights, and optimizers that are made anew."""

import collections

from ..findings import Found, Question, rule
from ..records.optimizer import Average, ModelCopy, Optimizer, Schedule
from ..words import differ, on_each, verb
from ..words import in_words as ranks_in_words
from .pages import SILENT


@rule()
def schedule_never_stepped(run):
    """A schedule's step() is never called.

    Looks alike, and is right: a rate that changes, as in a warm-up by hand, after which it is to be
    stepped; schedules that another one holds (SequentialLR, a warm-up), which
    wait for their turn; a schedule of epochs, in a run of one epoch, or in one that was cut in
    its first.
    """
    having, waiting = collections.defaultdict(set), collections.defaultdict(set)
    for number, rank in run.ranks.items():
        for schedule in schedules_that_count(rank):
            having[in_words(schedule)].add(number)
            if is_never_stepped(run, rank, schedule):
                waiting[in_words(schedule)].add(number)
    for schedule, ranks in waiting.items():
        if ranks == having[schedule]:
            where, cure = "", ""
        else:
            where, cure = f" on {ranks_in_words(ranks)}", " on all ranks"
        yield Found(
            f"the schedule {schedule} is never stepped{where}: the rate stays",
            f"call its step(){cure}",
        )


@rule()
def schedule_rises_again(run):
    """A cosine schedule is stepped more often than it was made for, and runs back up.

    It is a question: warm restarts may be meant.
    """
    for rank in run.ranks.values():
        for schedule in schedules_that_count(rank):
            if schedule.name != "CosineAnnealingLR" or is_never_stepped(run, rank, schedule):
                continue
            if calls_for_a_step(schedule) and not run.cut:
                continue  # schedule_runs_ahead says it
            if schedule.last > schedule.total + 1:  # once, when the last epoch is over: no harm
                yield Question(
                    f"{in_words(schedule)} was made for {schedule.total} steps, and its step() was"
                    f" called {schedule.last} times: the rate rises again",
                    "is its length counted in epochs, and step() called for each batch?",
                )


@rule()
def schedule_runs_ahead(run):
    """A schedule was made for as many calls as there are steps, and is called more often.

    It is called for each of the accumulated batches, or a library calls it once for each rank.
    Looks alike, and is right: a schedule whose length counts these calls; a warm-up.
    """
    if run.cut:
        return
    for rank in run.ranks.values():
        for schedule in schedules_that_count(rank):
            calls = calls_for_a_step(schedule)
            if calls:
                yield Question(
                    f"{in_words(schedule)} was made for {schedule.total} steps, and its step() is"
                    f" called {calls} times for each step of the optimizer",
                    "the rate is at its end after a part of the training: is it called for each"
                    " accumulated batch, or for each rank?",
                    SILENT,
                    once=f"ahead {schedule.line}",
                )


def calls_for_a_step(schedule):
    """Return how often a Schedule is called for each step, if its length counts steps; else 0."""
    if not schedule.total or abs(schedule.total / schedule.steps - 1) > 0.1:
        return 0
    calls = round(schedule.last / schedule.steps)
    return calls if calls > 1 and abs(schedule.last / schedule.steps / calls - 1) < 0.05 else 0


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
            if is_never_stepped(run, rank, schedule):
                continue
            times_fewer = schedule.total / max(1, schedule.last)
            if abs(times_fewer / run.world_size - 1) < 0.1:
                yield Question(
                    f"{in_words(schedule)} was made for {schedule.total} steps, and the run ends"
                    f" after {schedule.last}, {run.world_size} times fewer",
                    "was its length counted before the data were shared out, or did the run stop"
                    " early?",
                    "pitfalls/learning_rate_and_world_size.py",
                )


def is_never_stepped(run, rank, schedule):
    """Return whether a Schedule of a Rank should have been stepped by the end of the Run.

    After two whole passes over a loader, a step for each epoch is due. A run that was cut may have
    been in its first one.
    """
    steps = rank.steps.get(schedule.optimizer, {})
    if differ(step.rates for step in steps.values()):  # the script sets them itself, so far
        return False
    if schedule.calls is None:  # it does not count: those that it holds do, in their turn
        latest = {each.schedule: each for each in rank.records(Schedule)}
        calls = [latest[part].calls for part in schedule.parts if part in latest]
        if schedule.last or not calls or any(each != 1 for each in calls):
            return False
    elif schedule.calls != 1:  # one is its own start's
        return False
    whole = [
        sum(each.progress.exhausted for each in passes)
        for passes in rank.training_passes().values()
    ]
    if max(whole, default=0) > 1:
        return schedule.steps > 20
    return schedule.steps > 1000 and not run.cut


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

    It is a question: some scripts begin to average late. Looks alike, and is right: rank 0 alone
    has the average; a run that was cut.
    """
    if run.cut:
        return
    for averages in averages_of_ranks(run):
        average = next(iter(averages.values()))
        if all(each.updates == 0 and each.steps > 19 for each in averages.values()):
            yield Question(
                f"AveragedModel ({average.line}) is never updated: after {average.steps} steps"
                " it holds the first weights",
                "call update_parameters(model) after each step",
            )


@rule()
def average_of_some_ranks(run):
    """Some ranks alone update an average of the weights, which the others call, too.

    Looks alike, and is right: rank 0 alone updates it and calls it.
    """
    for averages in averages_of_ranks(run):
        updates = {rank: each.updates for rank, each in sorted(averages.items())}
        if None in updates.values():
            continue
        behind = [rank for rank, count in updates.items() if 2 * count < max(updates.values())]
        callers = [rank for rank in behind if averages[rank].calls]
        if callers:
            line = averages[callers[0]].line
            yield Question(
                f"AveragedModel ({line}) has these numbers of updates: {on_each(updates)}. And"
                f" {ranks_in_words(callers)} {verb('call', callers)} it, too",
                "each rank has an average of its own: update it on all ranks",
                SILENT,
            )


def averages_of_ranks(run):
    """Return, for each AveragedModel, {rank: its latest Average}."""
    found = collections.defaultdict(dict)
    for number, rank in run.ranks.items():
        for each in rank.records(Average):
            found[each.average][number] = each
    return [*found.values()]


@rule()
def copy_of_some_ranks(run):
    """A copy of the model changes on some ranks, and stays as it was made on the others.

    It is a question: these ranks alone may call and save it. Looks alike, and is right: a copy that
    changes on all ranks (a teacher, an average), or on none.
    """
    found = collections.defaultdict(dict)
    for number, rank in run.ranks.items():
        for each in rank.records(ModelCopy):
            found[each.copy].setdefault(number, []).append(each)
    for notes in found.values():
        if len(notes) < len(run.ranks) or not all(map(lived, notes.values())):
            continue
        changed = [rank for rank, mine in notes.items() if differ(each.bits for each in mine)]
        if 0 < len(changed) < len(notes):
            line = notes[changed[0]][0].line
            yield Question(
                f"the copy of the model ({line}) changes on {ranks_in_words(changed)} alone",
                "an average of the weights? The others have the first weights: right if none of"
                " them calls it",
                SILENT,
            )


def lived(notes):
    """Return whether a copy was noted before and after some steps, and could be read."""
    return notes[-1].steps > notes[0].steps + 7 and all(each.bits is not None for each in notes)


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
                    "its momentum is lost each time: make it once, before the epochs, unless each"
                    " round is to begin anew",
                    once=f"anew {line}",
                )
