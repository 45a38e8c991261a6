"""Optimizers and their steps, clipping, schedules of the learning rate."""

from dataclasses import dataclass, field

from .base import Print, Record


@dataclass(slots=True)
class ParameterName:
    """A parameter of an optimizer that is a DDP object's, too."""

    ddp: int
    name: str


@dataclass(slots=True)
class Optimizer(Record):
    """An optimizer's parameters, before its first step, its ninth, and whenever they change."""

    optimizer: str  # its key
    line: str  # that made it
    names: list[ParameterName | None]  # of each parameter; None: it is in no DDP object
    shapes: list[list[int]]
    same_parameters: int  # a number for these parameters: equal if they are the same ones
    device: str  # "cpu", of the first parameter
    has_momentum: bool  # a state that a resumed run should have, too
    threads: int  # torch.get_num_threads()
    unasked_float64: bool  # a parameter is float64, and that is not the default type
    # Names of parameters that were copies when it was made: FSDP2 had gathered them.
    gathered: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # parameters in each of its groups
    of_modules: bool = True  # a module has one of them, or had
    # Places of those that were put into the module of a DDP object after DDP() was made.
    added: list[int] = field(default_factory=list)
    is_flat: bool = False  # DDP's parameters are parts of its tensors, and not these themselves


@dataclass(slots=True)
class Step(Record):
    """optimizer.step(), as it begins. The first 30 are noted, then ever fewer."""

    optimizer: str  # its key
    number: int  # of this optimizer's steps
    line: str
    weights: list[Print | None]  # of each parameter; None: it was not read
    gradients: list[Print | None]  # of each parameter; None: it has none, or was not read
    without_gradient: int  # so many parameters have none
    outside: list[str]  # names of DDP's parameters with a gradient that are in no optimizer
    outside_moved: list[str]  # names of those of them that have changed since the first step
    rates: list[float]  # learning rate of each group of parameters
    scales: list[float]  # of each GradScaler that is on
    stale: bool  # gradients of the step before were not cleared
    # Two backward passes have left these gradients, and between them another optimizer took a step.
    mixed: bool
    cleared_after: int  # backward passes before zero_grad() was called, without a step; or 0
    forwards: int  # calls of DDP objects since the step before
    backwards: int  # backward passes since the step before
    two_forwards: list[int]  # numbers of the DDP objects that were called twice before a backward()
    exchanged: bool | None  # the last forward had the exchange on; None: there was none
    backward_line: str  # of the last backward()
    batches: int  # taken from the training loader since the step before
    small_sums: int  # collective calls with at most 16 numbers, since the step before
    lost_hooks: list[str]  # names of parameters that DDP does not follow any more
    # Places of the parameters that need a gradient, and have none, or one of zeros.
    bare: list[int] = field(default_factory=list)
    # The number from which the last backward() began; None: it was none, or was not read.
    loss: float | None = None
    detects_anomalies: bool = False  # torch.autograd.set_detect_anomaly is on
    closures: int = 0  # so often the step before has called the closure that it was given
    # Of the graphs of the first backward passes, those that are still held after 100 more passes.
    graphs_held: int = 0
    # The same after 30 more passes; 0 as soon as the graph of any pass before is gone.
    graphs_since_start: int = 0


@dataclass(slots=True)
class WeightsAtEnd(Record):
    """The weights of an optimizer that is still there, as the process leaves its group or ends."""

    optimizer: str  # its key
    weights: list[Print | None]  # of each parameter; None: it was not read


@dataclass(slots=True)
class ThrownAway(Record):
    """optimizer.zero_grad() was called, and gradients of backward passes were lost."""

    line: str
    backwards: int  # passes whose gradients are lost
    # No batch of a pass over a loader was left, or the next pass had given its first one.
    at_the_end: bool


@dataclass(slots=True)
class Clip(Record):
    """clip_grad_norm_(), clip_grads_with_norm_() or clip_grad_value_(), when it has ended."""

    number: int
    line: str
    parameters: int  # so many were given; 1 or 0 for a generator: whether it gave any
    in_an_optimizer: bool  # at least one of them is
    scaled: bool  # GradScaler still multiplies these gradients
    norm: float | None  # that it has returned, or was given; None: none, or not read
    most: float | None = None  # the norm that it allows; None: as above
    optimizer: str | None = None  # key of the only one that has them; None: none, or several do


@dataclass(slots=True)
class LoadedIntoOptimizer(Record):
    """An optimizer's load_state_dict()."""

    optimizer: str  # its key
    line: str
    next_step: int  # number of the optimizer's next step
    rates: list[float]  # learning rate of each group of parameters, as loaded
    changes: bool  # it holds a state, or other rates; else the optimizer is as it was before


@dataclass(slots=True)
class Schedule(Record):
    """A schedule of the learning rate, as it stands at the end of a pass over a loader."""

    schedule: int  # a number for this object, in this process
    name: str  # of its class
    line: str  # that made it
    steps: int  # of the optimizers, by then
    calls: int | None  # of its step(), and one by its own start; None: it does not count
    last: int  # last_epoch: the place in the schedule
    total: int | None  # its length in calls; None: it has none
    parts: list[int]  # the schedules that it is made of
    optimizer: str | None = None  # key of its optimizer; None: it is not known


@dataclass(slots=True)
class Average(Record):
    """An AveragedModel, as it stands at the end of a pass over a loader."""

    average: str  # its key
    line: str  # that made it
    steps: int  # of the optimizers, by then
    calls: int  # forward passes of it
    updates: int | None  # None: not read


@dataclass(slots=True)
class ModelCopy(Record):
    """A copy of a module by copy.deepcopy(), as it is made, and at the end of a pass.

    At the end of a pass, those alone are noted that have the shapes of a DDP object's parameters.
    """

    copy: str  # its key
    line: str  # that made it
    steps: int  # of the optimizers, by then
    bits: int | None  # of its parameters; None: not read


@dataclass(slots=True)
class Plateau(Record):
    """ReduceLROnPlateau.step()."""

    line: str
    value: float  # the figure that it was given
