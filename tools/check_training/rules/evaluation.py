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
    that the padding is dropped, so then it is asked; also if no sum is seen, as the figures may
    come together in files.
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
            is_of_training = start.loader_object in trained_with(run.ranks[rank])
            if is_of_training and first.progress.items not in numbers_summed(
                run.ranks[rank], first
            ):
                continue
            sure = is_summed_up(run.ranks[rank], first)
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
    out other items each time, as their order differs. Where a sampler deals
    out one set, what another rank gets is not left out.
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
            rest = (start.share or 0) - (rows_of_all if dealt_out else rows)
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
    """Each rank evaluates a share, and no rank gets anything of the others' figures.

    Looks alike, and is right: ranks that split the model, a run that was cut, the whole set in an
    order of its own, items that the dataset draws, a look at one batch, figures that are put
    together some steps later, or in files.
    """
    if run.may_split_the_model or run.cut:
        return
    for loader in loaders_of_all_ranks(run):
        firsts = loader.firsts
        if not differ(each.progress.batch_bits for each in firsts):
            continue
        if all(each.items is not None and each.items == each.start.length for each in firsts):
            continue
        if any(each.start.draws_its_items for each in firsts):
            continue
        if all(each.took_one_batch for passes in loader.passes.values() for each in passes):
            continue  # to look at some samples
        exchanges = [Exchanges(run.ranks[rank], of) for rank, of in loader.passes.items()]
        if any(each.puts_figures_together for each in exchanges) or in_files(run, loader):
            continue
        what = "nothing puts the ranks' figures together"
        if all(len(each.counts) > 1 for each in exchanges):
            what = "the ranks sum the number of items alone"
        yield Question(
            f"each rank evaluates a share ({loader.line}), and {what}",
            "rank 0's is that of its share: all_reduce sums and counts",
            METRICS,
        )


class Exchanges:
    """The collective calls in which a rank may get something of the others' evaluations.

    counts      Call records that sum how many items or batches there were
    told        the passes that have been followed by any other call, before the next step
    at_any_time whether a line was called for the first time after the first of the passes: it may
                be meant for all of them
    """

    def __init__(self, rank, passes):
        """Take the calls that come with a Rank's passes over one loader, in their order."""
        self.passes, self.counts, self.told, self.at_any_time = passes, [], set(), False
        steps = [times.time for times in rank.records(StepTimes)]
        # {number of a pass: when the next step ended}
        self.until = {
            each.start.number: min(
                (step for step in steps if step > each.progress.time), default=math.inf
            )
            for each in passes
        }
        counts = {
            count
            for each in passes
            for count in (each.progress.rows, each.progress.items, each.progress.batches)
            if count > 1  # 1.0 is a figure, too
        }
        others = {each.start.number for each in rank.passes if each.evaluates} - set(self.until)
        begin = passes[0].start.time
        calls = [call for call in rank.records(Call) if tells_of_others(call)]
        lines_before = {call.line for call in calls if call.time < begin}
        for call in calls:
            elsewhere = call.pass_number in others  # another evaluation runs
            if call.time < begin:
                continue
            if call.number_given in counts:
                self.counts += [] if elsewhere else [call]
                continue
            self.told |= {each.start.number for each in passes if self._follows(call, each, others)}
            if call.line not in lines_before and not elsewhere:
                self.at_any_time = True

    def _follows(self, call, one, others):
        """Return whether a call comes with a pass: no other loader has given a batch since.

        Or others have, over which this rank evaluates, too, without a step in between.
        """
        if call.pass_number == one.start.number:
            return True
        return (
            call.pass_number in others
            and one.progress.time < call.time < self.until[one.start.number]
        )

    @property
    def puts_figures_together(self):
        """Whether most of the passes have told something, or there is a call for all of them."""
        return self.at_any_time or len(self.told) > len(self.passes) / 2


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


def tells_of_others(call):
    """Return whether a rank can get something of other ranks in a Call.

    In a broadcast from rank 0 it gets what rank 0 has, which is what is printed anyway.
    """
    if "barrier" in call.name or call.source == 0 or call.is_gradient:
        return False
    return not is_a_decision(call)


def is_a_decision(call):
    """Return whether a Call sums whole numbers of which this one is 0 or 1: yes or no."""
    return call.number_given in (0, 1) and "float" not in call.dtype


@rule()
def whole_evaluation_on_each_rank(run):
    """Every rank evaluates the whole set, and that takes more than 1/30 of the time."""
    seconds = run.seconds_of_training()
    if not seconds:
        return
    for loader in loaders_of_all_ranks(run):
        bits = loader.batch_bits()
        taken = [
            (each.progress.last_batch or each.start.time) - each.start.time
            for passes in loader.passes.values()
            for each in passes
        ]
        mean = sum(taken) / len(loader.passes)
        drawn = [[each.progress.index_sum for each in of] for of in loader.passes.values()]
        the_same = all(bits) and not differ(bits) and not differ(drawn)
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
