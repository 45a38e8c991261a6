"""Which items and batches come, and in which order?"""

import itertools

from ..findings import Found, Question, rule
from ..records.data import SetEpoch
from ..words import differ, most
from .apart import is_another_stage
from .pages import SHARE, SILENT


@rule()
def same_order_in_each_epoch(run):
    """The items come in the same order in each epoch.

    Looks alike, and is right: no shuffle (the numbers rise), one batch, a set of its own for each
    epoch, and a pass that was broken off and is done again on purpose. It is a question where
    another loader gives batches for the same steps: this one's may be noises, which may come in any
    order. So it is for a sampler of the script's own, which may mean its order.
    """
    for loader in run.training_loaders():
        for rank, passes in loader.passes.items():
            whole = [each for each in passes if is_whole(each)]
            if len(whole) < 2 or differ(each.progress.order for each in whole):
                continue
            first = whole[0]
            if first.progress.rising or first.start.shuffle is False:
                continue
            if not are_over_one_set(whole):
                continue
            if len(whole) == 2 and is_another_stage(run.ranks[rank], whole[1].start.time):
                continue
            of_others = samplers_of_others(run, rank, loader)
            calls = run.ranks[rank].records(SetEpoch)
            calls = [call for call in calls if call.sampler_object not in of_others]
            why = why_the_order_stays(passes, first, calls)
            is_sure = first.start.replicas is not None or run.is_trained_on(loader)
            doubt = ""
            if not is_known_to_shuffle(first.start):
                is_sure, doubt = False, "unless that order is meant (by length, a curriculum)"
            kind = Found if is_sure else Question
            yield kind(
                f"the items come in the same order in each epoch ({loader.line},"
                f" {len(whole)} passes): {why}",
                doubt,
                "pitfalls/no_set_epoch.py",
            )
            break


def samplers_of_others(run, rank, loader):
    """Return the numbers of the samplers with which a rank trains, but for those of a Loader."""
    return {
        each.start.sampler_object
        for other in run.training_loaders()
        for each in other.passes.get(rank, [])
        if other.key != loader.key
    }


def is_whole(one):
    """Return whether a LoaderPass has come to its end, with several batches."""
    progress = one.progress
    return progress.exhausted and progress.items > 1 and progress.batches > 1


def is_known_to_shuffle(start):
    """Return whether a sampler is one of torch's that draw at random, or says that it shuffles."""
    if start.replicas is not None or start.shuffle:
        return True
    return start.sampler in ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")


def are_over_one_set(passes):
    """Return whether a rank's LoaderPass objects are over one set, as far as that is known.

    A set may be made anew for each pass, of the same items or of others.
    """
    one, other = passes[:2]
    if one.progress.batch_bits and one.progress.batch_bits == other.progress.batch_bits:
        return True
    known = [
        (each.start.contents, each.start.listed, each.start.chosen)
        for each in passes
        if each.start.contents or each.start.listed or each.start.chosen
    ]
    if len(known) > 1:
        return not differ(known)
    return not differ(each.start.dataset_object for each in passes)


def why_the_order_stays(passes, first, calls):
    """Return in words why a rank's sampler draws the same in each pass.

    passes: the rank's LoaderPass objects over the loader. first: the first whole one. calls: its
    SetEpoch records.
    """
    samplers = {each.start.sampler_object for each in passes}
    for call in calls:
        if call.sampler_object not in samplers:
            return f"set_epoch at {call.line} is called on another sampler"
    if calls and not differ(call.epoch for call in calls):
        return f"set_epoch at {calls[0].line} always gets the same number"
    if first.start.replicas is not None:
        return "set_epoch(epoch) is not called"
    return "its sampler draws the same again"


@rule()
def batches_of_one_label(run):
    """Nothing is shuffled, and all items of most batches have one label.

    It is a question: a label is a whole number for each item, and the order may be meant. Looks
    alike, and is right: texts in their order, items sorted by length, sets that were shuffled when
    they were stored, one label in the whole set.
    """
    for loader in run.training_loaders():
        first = loader.firsts[0]
        labels = first.progress.labels
        if not is_in_order(first):
            continue
        single = [label for label in labels if label is not None]
        if first.progress.sizes_as_labels > len(single) / 2:
            continue  # they are the lengths of the items
        changes = sum(one != other for one, other in itertools.pairwise(labels))
        if first.start.is_stream and changes > len(labels) / 3:
            continue  # it draws a label, or a language, for each batch
        if most(len(single), len(labels)) and len({*single}) > 1:
            yield Question(
                f"nothing is shuffled ({loader.line}), and in {len(single)} of"
                f" {len(labels)} batches, all items have the same whole number: a label?",
                "is the set sorted by its labels? Then shuffle: DistributedSampler(dataset), and"
                " set_epoch(epoch)",
                SILENT,
            )


def is_in_order(one):
    """Return whether a LoaderPass takes its set, or a stream, as it comes, in whole batches."""
    start, progress = one.start, one.progress
    if start.is_stream:  # nobody shuffles, unless the dataset does
        return progress.rows > 3 * progress.batches
    unshuffled = start.sampler == "SequentialSampler" or start.shuffle is False
    return unshuffled and progress.rising and progress.first_items > 3


@rule(unless={"data", "split"})
def other_sets(run):
    """A sampler shares out sets that differ by rank: the rest of each is not seen in that pass.

    It is a question: each rank's set may be its own. Looks alike, and is right: the same places on
    each rank, in a share that the set has made of itself.
    """
    for loader in loaders_shared_out(run):
        firsts = loader.firsts
        if draw_the_same(firsts):
            continue
        known = {
            repr((each.start.contents, each.start.listed, each.start.chosen))
            for each in firsts
            if each.start.contents or each.start.listed or each.start.chosen
        }
        if len(known) == len(run.ranks) and not differ(each.start.length for each in firsts):
            yield Question(
                f"each rank has another dataset ({loader.line}), and {sampler_in_words(firsts[0])}"
                f" takes 1 of {run.world_size} items of it",
                "is it made of random numbers without a seed, or shared out twice? The rest is"
                " not seen in that pass",
                "pitfalls/unseeded_dataset.py",
                once="other sets",
            )


@rule(unless={"data", "split"})
def shares_overlap(run):
    """The shares of one set overlap: the ranks' samplers shuffle by other seeds.

    Looks alike, and is right: the few items by which a sampler pads, draws with replacement, and a
    sampler that gives each item several times, to be augmented. It is a question for any other
    sampler than a DistributedSampler: each rank may draw by itself.
    """
    for loader in loaders_shared_out(run):
        firsts = loader.firsts
        if not all(each.progress.exhausted for each in firsts):
            continue
        if differ((each.start.contents, each.start.listed, each.start.epoch) for each in firsts):
            continue
        if differ(each.start.chosen for each in firsts):
            continue
        sketches = [set(each.progress.sketch) for each in firsts]
        common, own = len(set.intersection(*sketches)), len(sketches[0])
        kind, padding = Found, run.world_size
        if repeats_items(firsts[0].start):
            continue
        if firsts[0].start.replicas is None:
            kind, padding = Question, run.world_size * firsts[0].progress.first_items
            if any(draws_again(each) for each in firsts):
                continue
        if common > max(padding, 0.02 * own):
            yield kind(
                f"the ranks' shares overlap ({loader.line}): {common / own:.0%} of one rank's items"
                " are also another's",
                "the samplers shuffle by other seeds, or sets in another order: some items are"
                " never seen",
                SHARE,
            )


def draw_the_same(firsts):
    """Return whether all ranks draw the same indices, but for those by which a sampler pads.

    firsts: the first LoaderPass of each.
    """
    drawn = [{*each.progress.sketch} for each in firsts]
    common, least = len(set.intersection(*drawn)), min(map(len, drawn))
    return least > 1 and common > 0.9 * least


def draws_again(one):
    """Return whether a LoaderPass has drawn an item twice: it draws with replacement."""
    return len(set(one.progress.sketch)) < len(one.progress.sketch)


def repeats_items(start):
    """Return whether a sampler has more items for all ranks than the set, and than it pads."""
    if start.total_size is None or start.length is None:
        return False
    return start.total_size >= start.length + (start.replicas or 1)


def sampler_in_words(one):
    """Return who shares out the set of a LoaderPass."""
    return "a DistributedSampler" if one.start.replicas is not None else "its sampler"


def loaders_shared_out(run):
    """Return the Loaders whose samplers share out a set to all ranks, on several of them."""
    found = []
    for loader in run.training_loaders():
        firsts = loader.firsts
        if len(firsts) < 2:
            continue
        by_sampler = all(each.start.replicas == run.world_size for each in firsts)
        if by_sampler or all(each.takes_a_share_of(run.world_size) for each in firsts):
            found.append(loader)
    return found


@rule()
def stream_from_each_worker(run):
    """Each batch comes several times: every worker of a loader reads the whole stream.

    Looks alike, and is right: one constant batch.
    """
    for loader in run.training_loaders():
        first = loader.firsts[0]
        workers, bits = first.start.workers, first.progress.batch_bits
        if not first.start.is_stream or workers < 2:
            continue
        again = sum(one == other for one, other in itertools.pairwise(bits))
        expected = len(bits) * (1 - 1 / workers)
        if len(set(bits)) > 1 and again >= 0.8 * expected > 2:
            yield Found(
                f"each batch of the stream comes {workers} times ({loader.line}): once from each"
                " worker",
                "share it out by torch.utils.data.get_worker_info(), too",
                "recipes/stream.py",
            )


@rule()
def first_batch_again(run):
    """A new iterator is made for each batch, so each step takes the first one.

    It is a question where the batches differ: the sampler may shuffle each time. Looks alike, and
    is right: a set of its own for each step, of which one batch is taken; a batch that is shown
    to the model between the steps.
    """
    for loader in run.training_loaders():
        passes = next(iter(loader.passes.values()))
        single = [each for each in passes if each.took_one_batch]
        if len(single) < 8 or len(single) < len(passes):
            continue
        bits = [each.progress.batch_bits[0] for each in single if each.progress.batch_bits]
        kind = Found if bits and len(set(bits)) < len(bits) / 2 else Question
        if kind is Question and differ(each.start.dataset_object for each in single):
            continue
        if not run.is_trained_on(loader):
            continue
        yield kind(
            f"each step begins a new pass over the loader ({loader.line}), and takes its first"
            " batch",
            f"{len(bits)} such batches, {len(set(bits))} different ones: make the iterator once,"
            " before the steps",
        )
