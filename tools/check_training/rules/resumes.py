"""What a run forgets that goes on from a file."""

import collections
import math
import os
from dataclasses import dataclass

from ..findings import Found, Question, rule
from ..passes import LoaderPass
from ..records.files import Load, Move, Save
from ..records.optimizer import LoadedIntoOptimizer, Schedule
from ..words import differ
from .pages import ELASTIC, SHARE

NO_STATE = "pitfalls/optimizer_not_saved.py"


def loads_at_first(run):
    """Return the loads of files before the first step."""
    return [load for load in run.records(Load) if load.path and not load.steps]


def saved_before(run):
    """Return the paths of all files that the start before has saved, or moved to a place."""
    if run.before is None:
        return set()
    kept = run.before.records(Save) + run.before.records(Move)
    return {each.path for each in kept}


def names_before(run, path):
    """Return the paths that a file had in the start before: it, or its folder, was moved."""
    names = {path}
    for move in run.before.records(Move) if run.before else ():
        if move.source and move.path and is_in(path, move.path):
            names.add(move.source + path.removeprefix(move.path))
    return names


def is_in(path, folder):
    """Return whether a file is in a folder, or is it."""
    return path == folder or path.startswith(folder + os.sep)


def loads_from_before(run):
    """Return the loads before the first step of what the start before has saved."""
    paths = saved_before(run)
    return [load for load in loads_at_first(run) if names_before(run, load.path) & paths]


def trains(run):
    """Return whether a rank of the run takes a step."""
    return any(rank.steps_taken for rank in run.ranks.values())


@rule()
def begins_anew(run):
    """A restart loads no file that the attempt before has saved: all is trained again.

    Looks alike, and is right: a file that was copied, and what torch.distributed.checkpoint saves.
    """
    restarts = run.before is not None and run.first.attempt > 0
    if not restarts or not trains(run) or "sharded saves" in run.before.features:
        return
    if any(load.has_optimizer for load in loads_at_first(run)):
        return
    if run.before.records(Save) and not loads_from_before(run):
        yield Question(
            f"attempt {run.first.attempt} begins anew: it loads no file that the attempt before has"
            " saved",
            "all is trained again",
            ELASTIC,
        )


@rule()
def optimizer_not_loaded(run):
    """Training goes on without the state of an optimizer that has momentum.

    Looks alike, and is right: fine-tuning. So it is asked, but where the start before has saved the
    file. A file without a model is not looked at: it may have data.
    """
    notes = [note for rank in run.ranks.values() for note in rank.optimizers.values()]
    has_momentum = any(note.has_momentum for note in notes)
    if not trains(run) or not has_momentum:
        return
    if goes_on_with_a_state(run):
        return
    ours = [load for load in loads_from_before(run) if may_have_a_model(run, load)]
    for load in loads_at_first(run):
        if load not in ours and not load.has_optimizer:
            continue
        what = (
            f"{load.line} loads {os.path.basename(load.path)}, and training goes on without the"
            " optimizer's state"
        )
        if load in ours:
            yield Found(what, "its momentum begins at 0 after each resume", NO_STATE)
        else:
            why = "right for fine-tuning, or for a teacher; after a crash the momentum is lost"
            yield Question(what, why, NO_STATE)
        return


def may_have_a_model(run, load):
    """Return whether the start before may have saved a model in the file of a Load."""
    names = names_before(run, load.path)
    saves = [save for save in run.before.records(Save) if save.path in names]
    return not saves or any(save.has_model is not False for save in saves)


def goes_on_with_a_state(run):
    """Return whether a rank loads the state of an optimizer.

    A wrapper may load what its optimizer has already, when it is made: that is none, unless it
    comes after the load of a file with a state.
    """
    files = [load.time for load in run.records(Load) if load.has_optimizer]
    first_file = min(files, default=math.inf)
    loads = run.records(LoadedIntoOptimizer)
    return any(load.changes or load.time > first_file for load in loads)


@rule()
def folder_in_place(run):
    """The files from which the job goes on are written one by one into their folder.

    It is a question: the start may pass over a folder that is not complete. Looks alike, and is
    right: a folder, or a last file, that gets its name when all is written; whole files in one
    folder, such as the last and the best state.
    """
    if not trains(run):
        return
    for folder, loads in loads_of_folders(run).items():
        names = ", ".join(os.path.basename(path) for path in sorted(loads)[:3])
        yield Question(
            f"the files from which the job goes on ({names}; {next(iter(loads.values())).line}) are"
            f" written one by one into {os.path.basename(folder)}",
            "a kill meanwhile leaves a part of them: write them into a folder beside it and rename"
            " that, unless the start passes over what is not complete",
            "pitfalls/snapshot_in_place.py",
            once="folder in place",
        )


def loads_of_folders(run):
    """Return {folder: {path: its Load}} of the states in several files that were not moved.

    One of the files holds an optimizer's state alone: so it takes them all to go on.
    """
    found = collections.defaultdict(dict)
    for load in loads_from_before(run):
        found[os.path.dirname(load.path)][load.path] = load
    moves = [move.path for move in run.before.records(Move) if move.path] if run.before else []
    alone = {save.path for save in run.before.records(Save) if save.only_optimizer} if found else ()
    return {
        folder: loads
        for folder, loads in found.items()
        if len(loads) > 1
        and any(path in alone for path in loads)
        and not any(is_in(folder, moved) or is_in(moved, folder) for moved in moves)
    }


@rule()
def rate_is_set_back(run):
    """The first step after a load takes another rate than the one that was loaded.

    Of several loads before a step, the last counts. Looks alike, and is right: a schedule that was
    stepped in between, so it is asked; a wrapper that loads what its optimizer has already; rates
    that the script computes for each step, without a schedule.
    """
    if not run.first.records(Schedule):
        return
    loads = [load for load in run.first.records(LoadedIntoOptimizer) if load.changes]
    lasts = {(load.optimizer, load.next_step): load for load in loads}
    for load in lasts.values():
        step = run.first.steps.get(load.optimizer, {}).get(load.next_step)
        if step is None or step.rates == load.rates:
            continue
        if schedule_was_stepped(run, load, step):
            continue
        yield Question(
            f"the optimizer's state ({load.line}) was loaded with rate {load.rates[0]:.3g}, and the"
            f" next step takes {step.rates[0]:.3g}",
            "a schedule made after the load sets it back: load it last",
            once="rate",
        )


def schedule_was_stepped(run, load, step):
    """Return whether a schedule was called more often before the step than there were steps."""
    return any(
        (schedule.calls or 0) > 1 + load.next_step and schedule.time < step.time
        for schedule in run.first.records(Schedule)
    )


@rule()
def loads_into_another_optimizer(run):
    """Before the first step, the state is loaded into an optimizer that never takes one.

    Looks alike, and is right: a model and its optimizer that are loaded later, to be evaluated; and
    one whose turn was before, or comes later, where all that take steps have loaded a state, too.
    """
    first = run.first
    loaded = {load.optimizer for load in first.records(LoadedIntoOptimizer) if load.changes}
    if loaded.issuperset(first.steps):
        return
    begin = min((step.time for of in first.steps.values() for step in of.values()), default=0)
    for load in first.records(LoadedIntoOptimizer):
        if load.time < begin and load.optimizer not in first.steps:
            yield Found(
                f"{load.line} loads the state of an optimizer that never takes a step",
                "another optimizer trains, without that state",
                NO_STATE,
            )


@rule()
def ranks_begin_in_other_epochs(run):
    """The ranks begin in different epochs: some go on from a file that others do not have.

    If none has loaded a file, they give set_epoch() other numbers: then the shares overlap.
    """
    passes = [trained_by_share(rank) for rank in run.ranks.values()]
    epochs = [mine[0].start.epoch for mine in passes if mine]
    all_known = len(epochs) == len(run.ranks) and None not in epochs
    if any(mine[0].start.shuffle is False for mine in passes if mine):
        return  # then the epoch changes nothing
    if all_known and differ(epochs):
        why, page = "set_epoch is given another number on each rank: the shares overlap", SHARE
        if run.records(Load) or run.records(LoadedIntoOptimizer):
            page = ELASTIC
            why = (
                "do some go on from a file that others do not have? Else give set_epoch one number"
            )
        yield Found(
            f"the ranks begin in different epochs: {', '.join(map(str, epochs))}", why, page
        )


def trained_by_share(rank):
    """Return a rank's passes of several batches in which it trained on a DistributedSampler's."""
    return [
        each
        for each in rank.passes
        if each.trains
        and each.progress.batches > 1
        and each.progress.backwards > 1
        and each.start.replicas is not None
    ]


def finished_before(run):
    """Return {rank: the passes that it had ended when the file was saved from which it goes on}.

    Empty if the run goes on from no file of the start before.
    """
    loaded = {load.path for load in loads_from_before(run)}
    if not loaded:
        return {}
    before = run.before
    loaded = set().union(*(names_before(run, path) for path in loaded))
    saves = [save.time for save in before.records(Save) if save.path in loaded]
    until = max(saves, default=0)
    return {
        number: [
            each
            for each in trained_by_share(rank)
            if each.progress.exhausted and each.progress.time < until
        ]
        for number, rank in before.ranks.items()
    }


def goes_on(run):
    """Return a Resumed of each rank that had ended passes before, and trains again."""
    finished, found = finished_before(run), []
    for number, rank in run.ranks.items():
        before, after = finished.get(number), trained_by_share(rank)
        if before and after:
            found.append(Resumed(before, after[0]))
    return found


@dataclass(slots=True)
class Resumed:
    """One rank before and after it goes on."""

    before: list[LoaderPass]  # that had ended when the file was saved; at least one
    after: LoaderPass  # the first in which it trains again

    @property
    def begins_as_the_first(self):
        """Whether it begins with the batches of the first pass, which are not the second's."""
        if len(self.before) < 2:
            return False
        passes = self.after, self.before[0], self.before[1]
        now, first, second = [each.progress.batch_bits[:2] for each in passes]
        return len(now) > 1 and now == first != second


@rule(unless={"models", "weights"})
def data_begin_anew(run):
    """After a resume, the data come in the order of the first epoch again."""
    for rank in goes_on(run):
        if rank.begins_as_the_first:
            yield Found(
                f"after the resume the data begin anew ({rank.after.start.line}): the first batches"
                " are those of the first epoch",
                "set_epoch by the number of the epoch over all attempts",
                "recipes/resume_mid_epoch.py",
            )


def are_numbered_one_by_one(epochs, begins):
    """Return whether finished epochs have numbers in a row.

    Of one, nothing is known but by begins, the first after the resume: it is near.
    """
    if len(epochs) == 1:
        return begins is None or abs(begins - max(epochs)) <= 2
    return max(epochs) - min(epochs) == len(epochs) - 1


@rule(unless={"models", "weights"})
def epoch_is_off(run):
    """An epoch was finished and saved, and the resumed run begins with another than the next.

    Looks alike, and is right: a rank that ends its epoch after another has saved; no shuffle;
    samplers that are given other numbers than 0, 1, 2, ...; another set, with epochs of its own.
    """
    finished = [
        each.start
        for passes in finished_before(run).values()
        for each in passes
        if each.start.epoch is not None
    ]
    for rank in goes_on(run):
        begins = rank.after.start.epoch
        # Of all ranks: one may end its pass only after another has saved.
        epochs = {each.epoch for each in finished if each.length == rank.after.start.length}
        if not epochs or not are_numbered_one_by_one(epochs, begins):
            continue
        last = max(epochs)
        if begins in (last + 1, None) or rank.begins_as_the_first:
            continue
        if not rank.before[-1].start.shuffle:
            continue
        yield Found(
            f"epoch {last} was finished and saved, and the resumed run begins with epoch {begins}",
            "one is trained twice, or left out",
            "pitfalls/off_by_one_epoch.py",
        )
