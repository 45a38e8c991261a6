"""Does each rank get its share of one set?"""

import collections
import math
import statistics

from ..findings import Found, Question, rule
from ..records.process import Call
from ..words import differ, in_words, most
from .pages import RANDOMNESS, SHARE

ALL_NOTED = 30  # calls of a DDP object, the first ones


@rule("data")
def sampler_told_wrong(run):
    """A DistributedSampler was told another number of ranks than there are, or one rank twice.

    Looks alike, and is right: tensor parallel beside data parallel. So it is compared with the
    groups of DDP, and not at all where the model may be split. So are sets that differ: each
    machine, or each rank, may have its own. It is asked where that is not known.
    """
    if run.may_split_the_model:
        return
    sizes = {len(wrapped.group) for wrapped in run.wrapped.values()} or {run.world_size}
    for loader in run.training_loaders():
        samplers = {rank: passes[0].start for rank, passes in loader.passes.items()}
        if any(sampler.replicas is None for sampler in samplers.values()):
            continue
        if not look_like_one_set(loader.firsts):
            continue
        replicas = {each.start.replica for of in loader.passes.values() for each in of}
        if len(replicas) > len(samplers):  # each pass is over another part of the set
            continue
        wrong = {sampler.replicas for sampler in samplers.values()} - sizes
        shares = {(sampler.replicas, sampler.replica) for sampler in samplers.values()}
        on_all_ranks = len(samplers) == len(run.ranks) and sizes == {run.world_size}
        twice = on_all_ranks and len(shares) < len(samplers)
        if wrong or twice:
            what = "number of ranks" if wrong else "rank"
            told = [
                f"rank {rank} is {sampler.replica} of {sampler.replicas}"
                for rank, sampler in [*samplers.items()][:4]
            ]
            kind, doubt = Found, ""
            if not are_one_set(loader.firsts):
                kind, doubt = Question, ", unless their sets differ"
            elif not run.wrapped:
                kind, doubt = Question, ", unless the ranks split the model"
            yield kind(
                f"the sampler of {loader.line} was told a wrong {what}: {'; '.join(told)}",
                f"there are {run.world_size} ranks: some take the same items{doubt}",
                SHARE,
            )


@rule("data", unless={"data"})
def same_batches(run):
    """All ranks of a DDP object train on the same batches.

    Looks alike, and is right: ranks that split the model (compared is what goes into one DDP
    object), one constant batch, and an evaluation of all items with gradients on (forces). It is a
    question where ranks send something to single ones, or where their losses differ and nothing is
    drawn: each may take its part of the sequences.
    """
    for forwards in run.forwards():
        numbers = those_of_training(run, forwards)
        rows = [[each.batch for each in forwards.at(n).values()] for n in numbers]
        same = how_many_are_the_same([row for row in rows if all(row)])
        if same and not loaders_give_others(run):
            line = next(each.line for of in forwards.of.values() for each in of.values())
            why, page = "a DistributedSampler (or your own split by rank) is missing", SHARE
            if any(draws_what_it_gives(loader) for loader in run.training_loaders()):
                why, page = "they draw the same random items: seed by rank", RANDOMNESS
            kind, doubt = Found, ""
            if "to_one" in run.features or have_other_losses(run, forwards):
                kind, doubt = Question, ", unless each takes its part of them"
            yield kind(
                f"{in_words(forwards.of, run)} train on the same batches: {same} ({line})",
                f"the others add nothing: {why}{doubt}",
                page,
            )
            return


def loaders_give_others(run):
    """Return whether most batches that the loaders give in their first passes differ by rank."""
    rows = [
        row
        for loader in run.training_loaders()
        if len(loader.passes) == len(run.ranks)
        for row in zip(*(each.progress.batch_bits for each in loader.firsts), strict=False)
    ]
    return most(sum(map(differ, rows)), len(rows))


def have_other_losses(run, forwards):
    """Return whether the losses differ between ranks in most steps, and not by random numbers.

    forwards: the Forwards of a DDP object.
    """
    calls = [call for of in forwards.of.values() for call in of.values()]
    if forwards.wrapped.has_dropout or any(call.drew or call.drew_since_batch for call in calls):
        return False
    rows = [
        [step.loss for step in steps.only([*forwards.of]).at(number).values()]
        for steps in run.optimizers()
        if {*forwards.of} <= {*steps.of}
        for number in steps.common
    ]
    rows = [row for row in rows if None not in row]
    return most(sum(map(differ, rows)), len(rows))


def draws_what_it_gives(loader):
    """Return whether a Loader's items must be random: no share of a set is the same as another.

    Its dataset never reads the index that it is asked for, or its sampler gives each rank another
    share.
    """
    starts = [each.start for each in loader.firsts]
    replicas = {each.replica for each in starts if each.replicas is not None}
    return all(each.draws_its_items for each in starts) or len(replicas) == len(starts) > 1


def those_of_training(run, forwards):
    """Return the numbers of the Forwards' calls from which a step was taken.

    All calls are noted among the first ALL_NOTED: if a step was taken from each of these, or none
    was noted, all numbers are returned.
    """
    rank = min(forwards.of)
    early = [each for each in forwards.of[rank].values() if each.number < ALL_NOTED]
    if not early:
        return forwards.common
    trained = set()
    for steps in run.ranks[rank].steps.values():
        for number, step in steps.items():
            begin = steps[number - 1].time if number - 1 in steps else -math.inf
            between = [each.number for each in early if begin < each.time <= step.time]
            # With more calls than backward passes, others than the last may be an evaluation's.
            trained |= {*(between if step.forwards <= step.backwards else between[-1:])}
    if run.ranks[rank].steps and (len(trained) < len(early) or are_more_later(run, forwards)):
        return [number for number in forwards.common if number in trained]
    return forwards.common


def are_more_later(run, forwards):
    """Return whether there are more calls for a step later than among the first ALL_NOTED."""
    rank = min(forwards.of)
    calls = [*forwards.of[rank].values()]
    steps = max(run.ranks[rank].steps.values(), key=max)
    end = max(call.time for call in calls if call.number < ALL_NOTED)
    first = next((number for number, step in steps.items() if step.time >= end), None)
    if first is None:
        return False
    expected = ALL_NOTED / (first + 1) * (max(steps) + 1)
    return calls[-1].number > 1.1 * expected + 10


@rule("data")
def same_batches_without_ddp(run):
    """All ranks draw the same batches from their loaders, and there is no DDP.

    It is a question: it is right where the ranks split the model. So it is where each takes its
    part of a batch: then their gradients differ before they are summed.
    """
    if run.wrapped or sum_other_gradients(run):
        return
    for loader in run.training_loaders():
        if not len(loader.passes) == len(run.ranks) > 1:
            continue
        same = how_many_are_the_same([*zip(*loader.batch_bits(), strict=False)])
        if same:
            yield Question(
                f"all ranks draw the same batches ({loader.line}): {same}",
                "right where the ranks split the model; else the others add nothing",
                SHARE,
            )


def sum_other_gradients(run):
    """Return whether most tensors that an all_reduce takes from the ranks differ in their norms."""
    found = collections.defaultdict(list)
    for call in run.records(Call):
        if call.norm_given is not None:
            found[call.group, call.number].append(call.norm_given)
    rows = [norms for norms in found.values() if len(norms) == len(run.ranks)]
    return most(sum(map(differ, rows)), len(rows))


def how_many_are_the_same(rows):
    """Return "30 of 32 that were compared" if most rows are the same on all ranks; else "".

    rows: a list for each batch, of its bits on each rank. One or two batches that come again and
    again are no sign.
    """
    kinds = {str(bits) for row in rows for bits in row}
    same = sum(not differ(row) for row in rows)
    if len(kinds) > 2 and most(same, len(rows)):
        return f"{same} of {len(rows)} that were compared"
    return ""


@rule(unless={"data", "split"})
def whole_set_on_each_rank(run):
    """Each rank goes through the whole set in an order of its own: an epoch is so many epochs.

    Looks alike, and is right: a set that was split before (its contents differ, or the indices of
    its Subset), draws with replacement, batches of one sampler that are dealt out to the ranks, and
    the same batches on all ranks, of which each takes its part, or some of them. Where the contents
    are not known, it is asked. So it is where another loader gives batches for the same steps: this
    one's may be noises; and where the training goes by steps, and not by epochs.
    """
    for loader in run.training_loaders():
        firsts = loader.firsts
        one = firsts[0]
        if len(firsts) < len(run.ranks) or not goes_through_the_whole(firsts):
            continue
        if takes_its_part(run, firsts):
            continue
        was_read = run.wrapped and one.progress.batches < 300
        are_the_same = are_one_set(firsts) and draw_all_items(firsts)
        kind = Found if was_read and are_the_same else Question
        doubt = "" if kind is Found else ", unless each rank has a set of its own"
        if goes_by_steps(run, loader):
            kind, doubt = Question, ", unless it is trained by steps, each rank on its own draws"
        if not run.is_trained_on(loader):
            kind, doubt = Question, ", unless they are added to another loader's, as noises are"
        yield kind(
            f"each rank goes through all {one.start.length} items ({loader.line},"
            f" {one.start.sampler})",
            f"an epoch is {run.world_size} epochs{doubt}",
            SHARE,
        )


def goes_by_steps(run, loader):
    """Return whether a run that came to its end left a rank's last pass before it was over.

    Then it counts steps, not epochs.
    """
    lasts = [passes[-1].progress for passes in loader.passes.values()]
    return not run.cut and any(not last.exhausted for last in lasts)


def goes_through_the_whole(firsts):
    """Return whether all samplers give the whole of sets that look the same.

    firsts: the first LoaderPass of each rank.
    """
    start = firsts[0].start
    if start.replicas or start.is_stream:
        return False
    if not start.length:
        return False
    if not look_like_one_set(firsts):
        return False
    if any(each.takes_a_part for each in firsts):
        return False
    are_over = all(each.progress.exhausted for each in firsts)
    if are_over and differ(each.progress.index_sum for each in firsts):  # with replacement
        return False
    return all(each.start.share == each.start.length and each.start.batches for each in firsts)


def look_like_one_set(firsts):
    """Return whether the ranks' sets are the same, as far as they were read.

    firsts: the first LoaderPass of each rank.
    """
    starts = [each.start for each in firsts]
    sets = [(start.length, start.contents, start.listed, start.chosen) for start in starts]
    return not differ(sets)


def takes_its_part(run, firsts):
    """Return whether all ranks load the same batches, and each trains on a part of each batch.

    Or on some of the batches. firsts: the first LoaderPass of each rank.
    """
    progress = firsts[0].progress
    if not progress.batch_bits or differ(each.progress.batch_bits for each in firsts):
        return False
    if not run.wrapped and sum_other_gradients(run):
        return True
    if all(each.progress.backwards <= 0.75 * each.progress.batches for each in firsts):
        return True
    rows = [
        call.rows
        for forwards in run.forwards()
        for calls in forwards.of.values()
        for call in calls.values()
        if call.rows is not None
    ]
    return bool(rows) and statistics.median(rows) < progress.rows / progress.batches


def are_one_set(firsts):
    """Return whether the ranks' sets are known to be one: what is in them was read.

    firsts: LoaderPass objects whose contents are the same, as far as they were read.
    """
    one = firsts[0]
    if one.start.contents or one.start.listed:
        return True
    content = one.progress.content
    return bool(content) and all(
        each.progress.exhausted and abs(each.progress.content - content) <= 1e-6 * abs(content)
        for each in firsts
    )


def draw_all_items(firsts):
    """Return whether each rank has drawn as many items as there are, and the same ones."""
    index_sum = firsts[0].progress.index_sum
    return all(
        each.progress.exhausted
        and each.progress.items == each.start.length
        and each.progress.index_sum == index_sum
        for each in firsts
    )
