"""What goes wrong between two trainings."""

import math

from ..findings import Found, Question, rule
from ..records.process import Call
from ..records.times import StepTimes
from ..words import differ
from .pages import METRICS


@rule()
def items_counted_twice(run):
    """A DistributedSampler pads the shares in an evaluation, and the padding is counted.

    Looks alike, and is right: the script drops the padding after a gather. So then it is asked.
    """
    for loader in run.evaluation_loaders():
        for rank, passes in loader.passes.items():
            first = passes[0]
            start = first.start
            padding = (start.total_size or 0) - (start.length or 0)
            if not first.progress.exhausted or start.drop_last:
                continue
            if not start.length or padding <= 0:
                continue
            gathers = gathers_around(run.ranks[rank], first)
            kind = Question if gathers else Found
            yield kind(
                f"the evaluation ({loader.line}) counts {padding} of {start.length} items twice:"
                " DistributedSampler pads the shares",
                "unless you drop them after the gather" if gathers else "",
                "pitfalls/padded_evaluation.py",
            )


def gathers_around(rank, one):
    """Return whether a rank gathers something during a LoaderPass, or within five seconds."""
    begin, end = one.start.time, one.progress.time + 5
    return any("gather" in call.name and begin < call.time < end for call in rank.records(Call))


@rule()
def items_left_out(run):
    """drop_last leaves out items in an evaluation.

    Looks alike, and is right: an evaluation with the loader of the training.
    """
    for loader in run.evaluation_loaders():
        for rank, passes in loader.passes.items():
            first = passes[0]
            start, rows = first.start, first.progress.rows
            trains_with = {
                each.start.loader_object for each in run.ranks[rank].passes if each.trains
            }
            if start.loader_object in trains_with or not rows:
                continue
            rest = (start.share or 0) - rows
            drops = first.progress.exhausted and start.drop_last
            if drops and rest > 0:
                yield Found(
                    f"the evaluation ({loader.line}) leaves out {rest} of {start.share} items:"
                    " drop_last",
                    "",
                    METRICS,
                )


@rule()
def learns_from_the_evaluation(run):
    """BatchNorm's running values move in an evaluation: the model is in train mode.

    Looks alike, and is right: values that are measured anew on purpose. So it is asked. A process
    that only evaluates is not looked at.
    """
    for loader in run.evaluation_loaders():
        for rank, passes in loader.passes.items():
            if run.ranks[rank].training_passes() and any(map(norms_have_moved, passes)):
                yield Question(
                    f"the evaluation ({loader.line}) runs in train mode: BatchNorm learns from it",
                    "model.eval(), unless that is meant so",
                )


def norms_have_moved(one):
    """Return whether a BatchNorm has updated its values in a LoaderPass."""
    modes = zip(one.progress.modes_before, one.progress.modes_after, strict=False)
    return any(before.norm_updates < after.norm_updates for before, after in modes)


@rule(unless={"models", "weights"})
def other_norms_on_ranks(run):
    """BatchNorm's running values differ between the ranks in an evaluation in eval mode."""
    for loader in loaders_of_all_ranks(run):
        lasts = [passes[-1].progress.modes_after for passes in loader.passes.values()]
        firsts = [modes[0] for modes in lasts if modes]  # of the first DDP object
        norms = [mode.norms for mode in firsts if mode.norms and not mode.training]
        if differ(norms):
            yield Found(
                "BatchNorm's running values differ between the ranks in the evaluation"
                f" ({loader.line})",
                "each rank evaluates a model of its own: broadcast rank 0's buffers before",
                "01_single_node_multi_gpu.py",
            )


@rule()
def figures_stay_apart(run):
    """Each rank evaluates a share, and makes no collective call before it trains on.

    Looks alike, and is right: ranks that split the model, a run that was cut.
    """
    if run.may_split_the_model or run.cut:
        return
    for loader in loaders_of_all_ranks(run):
        shares = [first.progress.batch_bits for first in loader.firsts]
        if differ(shares) and not ranks_meet_after(run, loader):
            yield Question(
                f"each rank evaluates a share ({loader.line}), and nothing puts the ranks' figures"
                " together",
                "rank 0's is that of its share: all_reduce sums and counts",
                METRICS,
            )


def ranks_meet_after(run, loader):
    """Return whether a rank makes a collective call between an evaluation and its next step.

    A barrier is none.
    """
    for number, passes in loader.passes.items():
        rank = run.ranks[number]
        for each in passes:
            end = each.progress.time
            steps = [step.time for step in rank.records(StepTimes) if step.time > end]
            until = min(steps, default=math.inf)
            for call in rank.records(Call):
                if end < call.time < until and call.name != "barrier":
                    return True
    return False


@rule()
def whole_evaluation_on_each_rank(run):
    """Every rank evaluates the whole set, and that takes more than 1/30 of the time."""
    seconds = run.seconds_of_training()
    if not seconds:
        return
    for loader in loaders_of_all_ranks(run):
        bits = loader.batch_bits()
        taken = [
            each.progress.time - each.start.time
            for passes in loader.passes.values()
            for each in passes
        ]
        mean = sum(taken) / len(loader.passes)
        the_same = all(bits) and not differ(bits)
        if the_same and mean > seconds / 30:
            yield Question(
                f"every rank evaluates the whole set ({loader.line}): {mean / seconds:.0%} of the"
                " time",
                "a share each, and one sum over the ranks, takes a part of it",
                METRICS,
            )


def loaders_of_all_ranks(run):
    """Return the Loaders over which all ranks, at least two, evaluate."""
    return [
        loader
        for loader in run.evaluation_loaders()
        if len(loader.passes) == len(run.ranks) and len(loader.passes) > 1
    ]
