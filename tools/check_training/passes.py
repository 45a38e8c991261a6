"""Passes over loaders, put together from their records."""

import collections
import itertools
from dataclasses import dataclass

from .records.data import Pass, Progress


@dataclass(slots=True)
class LoaderPass:
    """One pass over a loader, as far as it has come."""

    start: Pass
    progress: Progress  # the latest; an empty one before the first
    backwards_after: int = 0  # AfterPass.backwards; 0 if none is noted
    steps_after: int = 0  # AfterPass.steps; 0 if none is noted
    # Of its backward passes, none leads to a step, as those of other passes do.
    takes_no_step: bool = False
    # Gradients were off whenever it gave a batch, and on in other passes: its backward passes are
    # of a batch that another loader had given before.
    is_looked_at_between: bool = False
    makes_a_set: bool = False  # the process trains next on a set of what came out of it

    @property
    def trains(self):
        """Whether there was a backward pass in it, that was made for a step.

        An evaluation may take gradients for its inputs (forces, adversarial examples).
        """
        if self.takes_no_step or self.is_looked_at_between:
            return False
        return self.progress.backwards > 0

    @property
    def steps(self):
        """How many steps optimizers took on its batches, as far as that is known."""
        return max(self.progress.steps or 0, self.steps_after)

    @property
    def evaluates(self):
        """Whether it was a whole pass without a backward one, with gradients off or in eval mode.

        Gradients may be off while it takes a batch, or while DDP's forward runs. What looks alike:
        a list of its batches, from which the script trains afterwards, or a set of what came out.
        """
        progress = self.progress
        if not progress.over or not progress.batches or self.makes_a_set:
            return False
        if progress.backwards and not self.is_looked_at_between:
            return False
        if self.backwards_after > 1:
            return False
        if progress.no_grad_forwards or not progress.gradients:
            return True
        return any(not mode.training for mode in progress.modes_after)

    def overlaps(self, other):
        """Whether each of the two passes gave a batch while the other one was under way."""
        ends = [one.progress.last_batch for one in (self, other)]
        if None in ends:
            return False
        return self.start.time < ends[1] and other.start.time < ends[0]

    @property
    def is_endless(self):
        """Whether it has given more batches than its loader promises: one pass for all epochs."""
        return bool(self.start.batches) and self.progress.batches > self.start.batches

    @property
    def took_one_batch(self):
        """Whether it was left after one batch of several."""
        progress = self.progress
        return progress.batches == 1 and not progress.exhausted and self.start.batches != 1

    @property
    def items(self):
        """How many items this rank gets in a whole pass. If it was not whole: about so many.

        None: no indices were drawn.
        """
        start, progress = self.start, self.progress
        if progress.exhausted or not start.batches:
            return progress.items or None
        return progress.first_items * start.batches or None

    @property
    def takes_a_part(self):
        """Whether it gives a part of the set alone. What drop_last leaves out is less than a batch.

        False if that is not known.
        """
        items, length = self.items, self.start.length
        if items is None or length is None or items >= length:
            return False
        left_out = self.progress.first_items - 1 if self.start.drop_last else 0
        return items + left_out < length or items <= length / 2

    def takes_a_share_of(self, ranks):
        """Whether it gives 1 of so many ranks' share of the set, without a DistributedSampler.

        In at least four batches: it may be off by one.
        """
        batch = self.progress.first_items
        if self.start.replicas is not None or not self.takes_a_part or self.items < 4 * batch:
            return False
        return abs(self.items * ranks - self.start.length) <= ranks * batch


def just_begun(start):
    """Return the LoaderPass of a Pass of which no progress is noted yet."""
    names = [
        "batches",
        "rows",
        "items",
        "first_items",
        "order",
        "index_sum",
        "backwards",
        "no_grad_forwards",
    ]
    counts = dict.fromkeys(names, 0)
    progress = Progress(
        start.time,
        start.number,
        **counts,
        last_batch=None,
        first_orders=[],
        sketch=[],
        rising=True,
        batch_bits=[],
        content=0.0,
        drawn=[],
        gradients=False,
    )
    return LoaderPass(start, progress)


def look_for_steps(passes):
    """Set takes_no_step and is_looked_at_between of a process's LoaderPass objects.

    A step may come more rarely than a pass, or be none of torch's: so all passes over a loader
    count together, and nothing is known where no pass has a step.
    """
    others_train = any(each.progress.backwards and each.progress.gradients for each in passes)
    for each in passes:
        each.is_looked_at_between = others_train and not each.progress.gradients
    with_steps = {each.start.loader for each in passes if each.steps}
    for each in passes:
        each.takes_no_step = bool(with_steps) and each.start.loader not in with_steps


def look_for_sets_that_are_made(passes, world_size):
    """Set makes_a_set of a process's LoaderPass objects, in their order.

    The next pass trains on a new set, as each pass of its loader does, with the same number of
    items, or with that of all ranks.
    """
    seen, sets = set(), collections.defaultdict(set)
    for each in passes:
        sets[each.start.loader].add(each.start.dataset_object)
    for one, following in itertools.pairwise(passes):
        seen.add(one.start.dataset_object)
        start, rows = following.start, one.progress.rows
        is_new = start.dataset_object not in seen and len(sets[start.loader]) > 1
        made, end = start.dataset_seen, one.progress.last_batch
        if made is not None and end is not None and made < end:
            continue
        if is_new and following.trains and rows and start.length in (rows, rows * world_size):
            one.makes_a_set = True


def by_loader(passes):
    """Return {key of a loader: its LoaderPass objects}."""
    found = collections.defaultdict(list)
    for each in passes:
        found[each.start.loader].append(each)
    return found


@dataclass(slots=True)
class Loader:
    """A loader that the script makes at one place, and the passes of one kind over it."""

    line: str  # that begins these passes
    passes: dict[int, list[LoaderPass]]  # {rank: its passes}, of the ranks that have made one

    @property
    def key(self):
        """Pass.loader of its passes."""
        return self.firsts[0].start.loader

    @property
    def firsts(self):
        """The first pass of each rank."""
        return [passes[0] for passes in self.passes.values()]

    def batch_bits(self):
        """Return the bits of all batches of each rank, a list for a rank."""
        return [
            [bits for each in passes for bits in each.progress.batch_bits]
            for passes in self.passes.values()
        ]
