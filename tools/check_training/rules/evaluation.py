"""What goes wrong between two trainings."""

import math

from ..findings import Found, Question, rule
from ..records.files import Load, Move, OtherFile, Save
from ..records.model import Forward
from ..records.process import Call
from ..records.times import StepTimes
from ..words import differ, in_words
from .pages import METRICS


@rule()
def items_counted_twice(run):
    """A DistributedSampler pads the shares in an evaluation, and the padding is counted.

    Looks alike, and is right: the script drops the padding, before its sums (a rank's number of
    items is smaller then) or after a gather; a tensor with a place for each item; and another pass
    over the training's loader, unless a sum has its number of items. Of a gather no record shows
    that the padding is dropped, so then it is asked; also if no sum has that number: the script may
    drop the padding, and divide by the length of the set, or put the figures together in files.
    Before the first step, it may measure the data.
    """
    for loader in run.evaluation_loaders():
        if ranks_without(run, loader):
            continue
        if any(counts_fewer(run.ranks[rank], of[0]) for rank, of in loader.passes.items()):
            continue
        if any(sums_at_places(run.ranks[rank], of[0]) for rank, of in loader.passes.items()):
            continue
        for rank, passes in loader.passes.items():
            whole = [each for each in passes if each.progress.exhausted]
            if not whole or whole[0].start.drop_last:
                continue
            first, start = whole[0], whole[0].start
            padding = (start.total_size or 0) - (start.length or 0)
            if not start.length or padding <= 0:
                continue
            is_counted = first.progress.items in numbers_summed(run.ranks[rank], first)
            is_of_training = start.loader_object in trained_with(run.ranks[rank])
            if is_of_training and not is_counted:
                continue
            begins_before = whole[-1].start.time < run.ranks[rank].first_step
            sure = is_counted and is_summed_up(run.ranks[rank], first) and not begins_before
            kind = Found if sure else Question
            yield kind(
                f"the evaluation ({loader.line}) counts {padding} of {start.length} items twice:"
                f" {start.sampler} pads the shares",
                "" if sure else "unless you drop them before you count",
                "pitfalls/padded_evaluation.py",
            )


@rule()
def share_is_evaluated_alone(run):
    """Some ranks go over their shares of a set to evaluate it, and the others never do.

    It is a question: a look at a part of the set may be meant.
    """
    for loader in run.evaluation_loaders():
        ranks, [first, *_] = sorted(loader.passes), loader.firsts
        start = first.start
        left_out = start.replicas == run.world_size > len(ranks) and ranks_without(run, loader)
        if left_out and first.progress.exhausted and start.length:
            yield Question(
                f"the evaluation ({loader.line}) runs on {in_words(ranks)} alone, over a share:"
                f" {first.progress.items} of {start.length} items",
                "the others' shares are never evaluated: leave the sampler out, or let all ranks"
                " evaluate",
                METRICS,
            )


def ranks_without(run, loader):
    """Return the ranks that never begin a pass over an evaluation's Loader, and go on after it."""
    end = max(each.start.time for passes in loader.passes.values() for each in passes)
    return [
        number
        for number, rank in run.ranks.items()
        if rank.last > end and loader.key not in {each.start.loader for each in rank.passes}
    ]


@rule()
def shares_are_filled_up(run):
    """Another sampler fills up the shares in an evaluation, and sums over the ranks count that.

    It is a question: the script may leave it out of its sums. Looks alike, and is right: a gather
    after which the padding is dropped. No record shows that, so nothing is said of a gather, or of
    figures in files.
    """
    for loader in loaders_of_all_ranks(run):
        firsts = loader.firsts
        start, most_padding = firsts[0].start, len(firsts) * firsts[0].progress.first_items
        if start.replicas is not None or start.total_size is not None or start.drop_last:
            continue
        if in_files(run, loader):
            continue
        if not all(each.progress.exhausted and each.takes_a_part for each in firsts):
            continue
        padding = sum(each.items for each in firsts) - start.length
        if any(gathers_around(run.ranks[rank], of[0]) for rank, of in loader.passes.items()):
            continue
        if 0 < padding <= most_padding:
            yield Question(
                f"the evaluation ({loader.line}) counts {padding} of {start.length} items twice:"
                " its sampler fills up the shares",
                "unless your sums leave them out",
                "pitfalls/padded_evaluation.py",
            )


def counts_fewer(rank, one):
    """Return whether a rank sums a number of items that is its share without the padding."""
    start, items = one.start, one.progress.items
    padding = (start.total_size or 0) - (start.length or 0)
    given = numbers_summed(rank, one)
    return items not in given and not given.isdisjoint(range(items - padding, items))


def numbers_summed(rank, one):
    """Return the numbers that a rank gives to sums in a LoaderPass, or soon after it."""
    return {
        number
        for call in calls_around(rank, one)
        for number in (call.number_given, *(call.numbers_given or ()))
    }


def trained_with(rank):
    """Return the numbers of the DataLoader objects with which a rank trains."""
    return {each.start.loader_object for each in rank.passes if each.trains}


def sums_at_places(rank, one):
    """Return whether a rank sums a tensor that has a place for each item of a LoaderPass's set."""
    return any(
        call.elements and call.elements % one.start.length == 0
        for call in rank.records(Call)
        if "reduce" in call.name and call.pass_number == one.start.number and one.start.length
    )


def is_summed_up(rank, one):
    """Return whether a rank sums something in a LoaderPass, or soon after it, and gathers nothing.

    Soon: before it trains on.
    """
    steps = [times.time for times in rank.records(StepTimes) if times.time > one.progress.time]
    return not gathers_around(rank, one) and any(
        "reduce" in call.name and call.time < min(steps, default=math.inf)
        for call in calls_around(rank, one)
    )


def gathers_around(rank, one):
    """Return whether a rank gathers something in a LoaderPass, or soon after it."""
    return any("gather" in call.name for call in calls_around(rank, one))


def calls_around(rank, one):
    """Return a rank's Call records during a LoaderPass, and in the five seconds after it."""
    begin, end = one.start.time, one.progress.time + 5
    return [call for call in rank.records(Call) if begin < call.time < end]


@rule()
def items_left_out(run):
    """drop_last leaves out items in an evaluation.

    Looks alike, and is right: an evaluation with the loader of the training, and passes that leave
    out other items each time, as their order differs: of one pass in a drawn order it is asked.
    Where a sampler deals out one set, what another rank gets is not left out.
    """
    for loader in run.evaluation_loaders():
        dealt_out = loader.firsts[0].start.replicas is None and all(
            each.takes_a_part for each in loader.firsts
        )
        rows_of_all = sum(each.progress.rows for each in loader.firsts)
        for rank, passes in loader.passes.items():
            first = passes[0]
            start, rows = first.start, first.progress.rows
            if start.loader_object in trained_with(run.ranks[rank]) or not rows:
                continue
            if differ(each.progress.order for each in passes if each.progress.exhausted):
                continue
            if any(map(norms_have_moved, passes)):  # it measures them anew
                continue
            rest = (start.share or 0) - (rows_of_all if dealt_out else rows)
            drops = first.progress.exhausted and start.drop_last
            if drops and rest > 0:
                kind, doubt = Found, ""
                if start.shuffle or start.sampler == "RandomSampler":
                    kind, doubt = Question, "others each time?"
                yield kind(
                    f"the evaluation ({loader.line}) leaves out {rest} of {start.share} items:"
                    " drop_last",
                    doubt,
                    METRICS,
                )


@rule()
def learns_from_the_evaluation(run):
    """BatchNorm's running values move in an evaluation: the model is in train mode.

    Looks alike, and is right: values that are measured anew on purpose. So it is asked, but for a
    pass over the training's loader. A process that only evaluates is not looked at.
    """
    for loader in run.evaluation_loaders():
        for rank, passes in loader.passes.items():
            if passes[0].start.loader_object in trained_with(run.ranks[rank]):
                continue  # it measures the values anew
            if run.ranks[rank].training_passes() and any(map(norms_have_moved, passes)):
                yield Question(
                    f"a pass without gradients ({loader.line}) runs in train mode: BatchNorm learns"
                    " from it",
                    "model.eval(), if it is an evaluation",
                )


def norms_have_moved(one):
    """Return whether a BatchNorm has updated its values in a LoaderPass."""
    modes = zip(one.progress.modes_before, one.progress.modes_after, strict=False)
    return any(before.norm_updates < after.norm_updates for before, after in modes)


@rule()
def dropout_in_the_evaluation(run):
    """DDP's forward draws random numbers in an evaluation, in train mode: dropout is on.

    Looks alike, and is right: uncertainty that is measured by dropout. So it is asked. Where
    BatchNorm learns from the evaluation, another rule says that it runs in train mode.
    """
    for loader in run.evaluation_loaders():
        for rank, passes in loader.passes.items():
            if not run.ranks[rank].training_passes() or any(map(norms_have_moved, passes)):
                continue
            forwards = [
                forward for each in passes for forward in forwards_in(run.ranks[rank], each)
            ]
            if forwards and all(each.training and each.drew for each in forwards):
                yield Question(
                    f"the evaluation ({loader.line}) runs in train mode: dropout is on",
                    "model.eval(), unless that is meant so",
                )


def forwards_in(rank, one):
    """Return a rank's Forward records without gradients in a LoaderPass, as far as looked into."""
    return [
        forward
        for forward in rank.records(Forward)
        if one.start.time < forward.time < (one.progress.left or one.progress.time)
        and not forward.gradients
        and forward.drew is not None
    ]


@rule(unless={"models", "weights"})
def other_norms_on_ranks(run):
    """BatchNorm's running values differ between the ranks in an evaluation in eval mode.

    It is a question: an average of the model may be evaluated instead, and each rank may have a
    domain of its own, with its own values.
    """
    for loader in loaders_of_all_ranks(run):
        lasts = [passes[-1].progress.modes_after for passes in loader.passes.values()]
        firsts = [modes[0] for modes in lasts if modes]  # of the first DDP object
        norms = [mode.norms for mode in firsts if mode.norms and not mode.training]
        if differ(norms):
            yield Question(
                "BatchNorm's running values differ between the ranks in the evaluation"
                f" ({loader.line})",
                "each rank evaluates a model of its own: broadcast rank 0's buffers before, unless"
                " an average of it is evaluated",
                "01_single_node_multi_gpu.py",
            )


def in_files(run, loader):
    """Return whether the first rank reads what each other one has written, since they evaluate."""
    reader, *writers = sorted(loader.passes)
    since = min(passes[0].start.time for passes in loader.passes.values())
    others = [each for each in run.ranks[reader].records(OtherFile) if each.is_read]
    loads = [*run.ranks[reader].records(Load), *others]
    read = {each.path for each in loads if each.path is not None and each.time > since}
    return all(read & written_by(run.ranks[writer], since) for writer in writers)


def written_by(rank, since):
    """Return the paths of the files that a rank has written since a time, under their last names.

    since: as Record.time. A file that was moved has both names.
    """
    others = [each for each in rank.records(OtherFile) if not each.is_read]
    saves = [each for each in rank.records(Save) if each.path is not None]
    paths = {each.path for each in [*saves, *others] if each.time > since}
    return paths | {move.path for move in rank.records(Move) if move.source in paths}


def loaders_of_all_ranks(run):
    """Return the Loaders over which all ranks, at least two, evaluate."""
    return [
        loader
        for loader in run.evaluation_loaders()
        if len(loader.passes) == len(run.ranks) and len(loader.passes) > 1
    ]
