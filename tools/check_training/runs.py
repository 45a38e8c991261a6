"""The runs of a command: which ranks trained together, and what each of them noted."""

import bisect
import collections
import math
from dataclasses import dataclass

from . import lines, machines
from .passes import (  # noqa: F401
    Loader,
    LoaderPass,
    by_loader,
    just_begun,
    look_for_sets_that_are_made,
    look_for_steps,
)
from .records.data import AfterPass, Pass, Progress
from .records.model import Forward, Wrapped
from .records.optimizer import Optimizer, Step
from .records.process import Full, Joined, Left, Machine, Uses
from .records.times import StepTimes


def as_a_stranger(time):
    """Return what stands for the Joined of a process that has joined no group."""
    return Joined(
        time,
        rank=None,
        world_size=1,
        local_world_size=1,
        host="",
        attempt=0,
        cores=1,
        debugging=[],
    )


class Rank:
    """What one process noted between joining a group and leaving it.

    number            of the rank in its group; None: it has joined none
    world_size, local_world_size, host, attempt, cores, debugging, calendar, script, sources
                      as in records.process.Joined
    bound_to          as in records.process.Joined
    machine           the Machine on which it runs
    standing          what it was in at last, a Standing
    left              its records of leaving: [] if it was ended before
    full              its file had no more room at some time
    steps             {key of an optimizer: {number: Step}}
    optimizers        {key of an optimizer: its latest Optimizer}
    wrapped           {number of a DDP object: its Wrapped}
    passes            its LoaderPass objects, in their order
    features          what it uses of records.process.FEATURES
    steps_taken       by its optimizer, noted or not
    """

    def __init__(self, records, standing=None):
        """Take a process's records from one Joined to the next. standing: None if it is unknown."""
        self._in_order = records
        self._records = collections.defaultdict(list)
        for record in records:
            self._records[type(record)].append(record)
        joined = next(iter(self.records(Joined)), None) or as_a_stranger(records[0].time)
        self._joined, self.number = joined, joined.rank
        self.world_size = joined.world_size
        self.local_world_size = joined.local_world_size or joined.world_size
        self.host, self.attempt, self.cores = joined.host, joined.attempt, joined.cores
        self.debugging, self.bound_to = joined.debugging, joined.bound_to
        self.calendar, self.script, self.sources = joined.calendar, joined.script, joined.sources
        self.machine = joined.machine or Machine(key=joined.host, clock="", node=None, address="")
        self.standing = standing or lines.Standing("")
        self.left, self.full = self.records(Left), bool(self.records(Full))
        self.steps = {}
        for step in self.records(Step):
            self.steps.setdefault(step.optimizer, {})[step.number] = step
        self.optimizers = {each.optimizer: each for each in self.records(Optimizer)}
        self.wrapped = {each.ddp: each for each in self.records(Wrapped)}
        self.passes = self._passes()
        self.features = {each.what for each in self.records(Uses)}
        counts = [each.number + 1 for each in self.records(StepTimes)]
        self.steps_taken = max(counts + [each.steps for each in self.left], default=0)

    def _passes(self):
        passes = {start.number: just_begun(start) for start in self.records(Pass)}
        for progress in self.records(Progress):
            if progress.pass_number in passes:  # else it was begun in another group
                passes[progress.pass_number].progress = progress
        for after in self.records(AfterPass):
            if after.pass_number in passes:
                passes[after.pass_number].backwards_after = after.backwards
                passes[after.pass_number].steps_after = after.steps
        look_for_steps(passes.values())
        look_for_sets_that_are_made([*passes.values()], self.world_size)
        return [*passes.values()]

    @property
    def first_step(self):
        """When it took its first step, in seconds, as time; infinity if it took none."""
        return min((of[0].time for of in self.steps.values() if 0 in of), default=math.inf)

    @property
    def begin(self):
        """When it joined, or wrote its first record: seconds, as time."""
        return self._joined.time

    @property
    def last(self):
        """The time of its last record, in seconds."""
        return self._in_order[-1].time

    def all_records(self):
        """Return its records of all classes, in their order."""
        return self._in_order

    def until(self, time=math.inf):
        """Return a Rank of its records up to a time, in seconds, as they are now.

        Its end stays known, also if it came later.
        """
        records = [each for each in self._in_order if each.time <= time or isinstance(each, Left)]
        return Rank(records or self._in_order[:1], self.standing)

    def records(self, kind):
        """Return its records of a class, in their order."""
        return self._records.get(kind, [])

    def training_passes(self):
        """Return {key of a loader: the LoaderPass objects in which it trained}."""
        return by_loader(each for each in self.passes if each.trains)

    def begins_of_epochs(self):
        """Return when each pass began in which, or after which, it trained: in seconds, sorted."""
        return [each.start.time for each in self.passes if each.trains or each.backwards_after > 1]

    def evaluations(self):
        """Return {key of a loader: the LoaderPass objects in which it evaluated}."""
        return by_loader(each for each in self.passes if each.evaluates)

    @property
    def where(self):
        """What it was in at last, in words: "in all_reduce at train.py:42"; "": in its own code."""
        if not self.standing.what or self.standing.failed:
            return ""
        return f"in {self.standing.what} at {self.standing.line}"


@dataclass(slots=True)
class Steps:
    """The steps of one optimizer on several ranks."""

    optimizer: str  # its key
    of: dict[int, dict[int, Step]]  # {rank: {number: Step}}, of the ranks that have taken one

    @property
    def common(self):
        """The numbers of the steps that all of these ranks have noted, sorted."""
        return sorted(set.intersection(*(set(steps) for steps in self.of.values())))

    def at(self, number):
        """Return {rank: Step} for the number of a step that all have noted."""
        return {rank: steps[number] for rank, steps in self.of.items()}

    def only(self, ranks):
        """Return the steps of these ranks alone."""
        return Steps(self.optimizer, {rank: self.of[rank] for rank in ranks})


@dataclass(slots=True)
class Forwards:
    """The forward passes of one DDP object, with gradients on."""

    wrapped: Wrapped
    of: dict[int, dict[int, Forward]]  # {rank: {number: Forward}}, of the ranks in its group

    @property
    def common(self):
        """The numbers of those that all of its ranks have noted, sorted; [] if it has one rank."""
        if len(self.of) < 2:
            return []
        return sorted(set.intersection(*(set(forwards) for forwards in self.of.values())))

    def at(self, number):
        """Return {rank: Forward} for a number that all have noted."""
        return {rank: forwards[number] for rank, forwards in self.of.items()}


class Run:
    """The ranks of one group, from its start to its end.

    ranks             {number: Rank}, in the order in which they joined
    world_size        ranks of the group; some may have noted nothing
    first             the Rank that joined first
    before            the Run before, of the same command; None: it is the first
    cut               it was ended before its own end, or failed
    stalled           it stands still
    features          what a rank uses of records.process.FEATURES
    wrapped           {number of a DDP object: a Wrapped of it}
    machines          {key of a machine: its name}
    """

    def __init__(self, ranks, before=None, cut=False, stalled=False):
        """Take a list of Rank."""
        self.ranks = {rank.number: rank for rank in ranks}
        self.first, self.world_size = ranks[0], ranks[0].world_size
        self.before, self.cut, self.stalled = before, cut, stalled
        self.features = set().union(*(rank.features for rank in ranks))
        self.wrapped = {each.ddp: each for each in self.records(Wrapped)}
        self.machines = machines.names_of(ranks)

    @property
    def may_split_the_model(self):
        """Whether a rank may hold a part of the model: shards, a pipeline, groups of its own."""
        return bool(self.features & {"shards", "to_one", "groups"})

    def records(self, kind):
        """Return all ranks' records of a class, rank by rank."""
        return [each for rank in self.ranks.values() for each in rank.records(kind)]

    def records_by_rank(self, kind):
        """Return {rank: its records of a class}."""
        return {number: rank.records(kind) for number, rank in self.ranks.items()}

    def cores_of(self, rank):
        """Return how many cores the ranks on a Rank's machine may use together."""
        there = [each for each in self.ranks.values() if each.machine.key == rank.machine.key]
        return len(set().union(*(each.bound_to for each in there))) or rank.cores

    def machine_of(self, number):
        """Return the name of the machine on which a rank runs."""
        return self.machines[self.ranks[number].machine.key]

    def members(self, wrapped):
        """Return the ranks in the group of a DDP object, as far as they have noted something."""
        return [rank for rank in wrapped.group if rank in self.ranks]

    def training_loaders(self):
        """Return a Loader for each place where ranks train on what a loader gives them."""
        return self._loaders(Rank.training_passes)

    def evaluation_loaders(self):
        """Return a Loader for each place where ranks evaluate."""
        return self._loaders(Rank.evaluations)

    def is_trained_on(self, loader):
        """Return whether the model trains on the batches of a Loader.

        It does if no other loader gives batches for the same steps, or if they go into a DDP object
        as they are. Else they may be noises, which are added to the other loader's batches.
        """
        others = [each for each in self.training_loaders() if each.key != loader.key]
        if not any(
            one.overlaps(other) for one in loader.firsts for each in others for other in each.firsts
        ):
            return True
        calls = (call for call in self.records(Forward) if call.gradients and call.batch)
        fed = {bits for call in calls for bits in call.batch}
        given = {bits for of_rank in loader.batch_bits() for bits in of_rank}
        for passes in loader.passes.values():
            given.update(bits for each in passes for bits in each.progress.tensor_bits or ())
        return not fed.isdisjoint(given)

    def _loaders(self, passes_of):
        found = collections.defaultdict(dict)
        for number, rank in self.ranks.items():
            for key, passes in passes_of(rank).items():
                found[key][number] = passes
        loaders = []
        for passes in found.values():
            first = next(iter(passes.values()))[0]
            loaders.append(Loader(first.start.line, passes))
        return loaders

    def optimizers(self):
        """Return the Steps of each optimizer."""
        found = collections.defaultdict(dict)
        for number, rank in self.ranks.items():
            for key, steps in rank.steps.items():
                found[key][number] = steps
        return [Steps(key, of) for key, of in found.items()]

    def same_steps(self, steps):
        """Return the numbers of the steps that all have noted, without those of different epochs.

        Where ranks have other numbers of batches, as with Join, the n-th step of one may be in an
        epoch that another has ended. Without Join, steps whose gradients DDP exchanges are the
        same ones, in whatever epoch each rank is by then. steps: a Steps.
        """
        if "join" not in self.features and all(
            step.exchanged for of in steps.of.values() for step in of.values()
        ):
            return steps.common
        begins = {rank: self.ranks[rank].begins_of_epochs() for rank in steps.of}
        if not all(begins.values()):
            return steps.common
        same = []
        for number in steps.common:
            epochs = [
                bisect.bisect(begins[rank], step.time) for rank, step in steps.at(number).items()
            ]
            if len({*epochs}) == 1:
                same.append(number)
        return same

    def forwards(self):
        """Return the Forwards of each DDP object."""
        return [
            Forwards(
                wrapped, {rank: self._forwards(rank, number) for rank in self.members(wrapped)}
            )
            for number, wrapped in self.wrapped.items()
        ]

    def _forwards(self, rank, ddp):
        return {
            each.number: each
            for each in self.ranks[rank].records(Forward)
            if each.ddp == ddp and each.gradients
        }

    def seconds_of_training(self):
        """Return the seconds from the first to the last step."""
        found = [times for times in self.records_by_rank(StepTimes).values() if times]
        return max((times[-1].time - times[0].time for times in found), default=0)
