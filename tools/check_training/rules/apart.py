"""What is known of weights that have come apart, for the rule and for the reasons."""

import collections
from dataclasses import dataclass

from ..records.model import Wrapped
from ..records.optimizer import Optimizer
from ..runs import Run, Steps


@dataclass(slots=True)
class Apart:
    """The weights of one optimizer have come apart."""

    run: Run
    steps: Steps  # of the ranks that should hold the same
    optimizer: Optimizer
    wrapped: Wrapped | None  # the DDP object of its parameters; None: they are in none
    common: list[int]  # numbers of the steps that all ranks have noted
    bad: list[int]  # of these, those before which the weights differ
    since: int  # the last one before the first of these: this step took the weights apart

    @property
    def ranks(self):
        """The ranks that should hold the same."""
        return [*self.steps.of]

    @property
    def from_the_first(self):
        """Whether the weights differ before any step."""
        return self.bad[0] == 0

    @property
    def when(self):
        """When they came apart, in words. Later, not every step is looked at."""
        first, last = self.since + 1, max(self.bad[0], self.since + 1)
        return f"at step {first}" if first == last else f"between step {first} and step {last}"

    @property
    def row(self):
        """The step that took them apart, a Step of each rank."""
        return [*self.steps.at(self.since).values()]

    @property
    def step(self):
        """The step that took them apart, on the first of the ranks."""
        return self.row[0]

    @property
    def gradients(self):
        """The places of the parameters whose gradients differ in that step."""
        return places_that_differ(self.row, "gradients")

    def name_of(self, place):
        """Return DDP's name of a parameter, or None if it is not DDP's."""
        name = self.optimizer.names[place]
        return name and name.name


def wrapper_of(rank, note):
    """Return the Wrapped of a Rank whose parameters an Optimizer has; None if there is none."""
    names = [name for name in note.names if name is not None]
    return rank.wrapped.get(names[0].ddp) if names else None


def steps_of_each_model(run):
    """Return the Steps of each optimizer; where DDP's groups differ, of each group for itself.

    Such groups train a model each.
    """
    found = []
    for steps in run.optimizers():
        groups = collections.defaultdict(list)
        for number in steps.of:
            rank = run.ranks[number]
            wrapped = wrapper_of(rank, rank.optimizers[steps.optimizer])
            groups[tuple(wrapped.group) if wrapped else ()].append(number)
        found += [steps.only(ranks) for ranks in groups.values()]
    return found


def places_that_differ(row, what):
    """Return the places of the parameters whose weights or gradients differ between ranks.

    row: a Step of each rank. what: "weights" or "gradients". Weights that a rank has not read are
    not compared; a gradient that it does not have is another one.
    """
    places = []
    for place, prints in enumerate(zip(*(getattr(step, what) for step in row), strict=False)):
        bits = {each and each.bits for each in prints}
        if len(bits) > 1 and (what == "gradients" or None not in prints):
            places.append(place)
    return places


def is_another_stage(rank, time):
    """Return whether other optimizers take steps after a time than before it, in seconds."""
    before = {key for key, of in rank.steps.items() if of[min(of)].time < time}
    after = {key for key, of in rank.steps.items() if of[max(of)].time > time}
    return not before & after
