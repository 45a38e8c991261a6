"""Do the ranks put together what each of them has evaluated?"""

import math

from ..findings import Question, rule
from ..records.process import Call
from ..records.times import StepTimes
from ..words import differ
from .evaluation import in_files, loaders_of_all_ranks, numbers_summed
from .pages import METRICS


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
        if all(is_over_the_whole(each) for each in firsts):
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


def is_over_the_whole(one):
    """Return whether a LoaderPass gives the whole of its set, or would if it came to its end."""
    return None not in (one.items, one.start.length) and one.items >= one.start.length


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
    """Every rank evaluates the whole set, and that takes more than 1/30 of the time.

    Looks alike, and is right: each evaluates some of the batches, and they sum the numbers of
    items.
    """
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
        if any(each.steps > 1 for passes in loader.passes.values() for each in passes):
            continue  # it is kept, and goes on in each evaluation: its time is not theirs
        mean = sum(taken) / len(loader.passes)
        drawn = [[each.progress.index_sum for each in of] for of in loader.passes.values()]
        the_same = all(bits) and not differ(bits) and not differ(drawn)
        if the_same and mean > seconds / 30 and not sum_up_to_the_set(run, loader):
            yield Question(
                f"every rank evaluates the whole set ({loader.line}): {mean / seconds:.0%} of the"
                " time",
                "a share each, and one sum over the ranks, takes a part of it, unless each rank has"
                " another model",
                METRICS,
            )


def sum_up_to_the_set(run, loader):
    """Return whether numbers that the ranks give to sums, one of each, are together the set's."""
    length = loader.firsts[0].start.length or 0
    sums = {0}
    for rank, passes in loader.passes.items():
        given = {each for each in numbers_summed(run.ranks[rank], passes[0]) if each is not None}
        parts = {int(each) for each in given if 0 < each < length and each == int(each)}
        sums = {one + part for one in sums for part in parts if one + part <= length}
    return length in sums
