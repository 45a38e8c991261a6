"""Optimizers and their steps: notes Optimizer, Step, LoadedIntoOptimizer.

The steps of a run are those of its main optimizer: the first that takes steps, unless another one
takes twenty in a row.
"""

import functools
import os
import weakref
import zlib
from dataclasses import dataclass, field

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..records.optimizer import LoadedIntoOptimizer, Optimizer, ParameterName, Step
from . import gpu_times, graphs, links, model, shards, unowned
from . import parameters as model_parameters
from .counters import counters
from .fingerprints import FIRST, bits, looked_at, prints, readable
from .hooks import after, around, at_start, before, safely
from .notebook import count, note, now, open_files, site, uses
from .script_lines import innermost_files, where
from .state import kept
from .times import begin_anew, span, step_ended

SECOND_LOOK = 8  # in this step, parameters are listed again, and buffers are compared
OPTIMIZERS_OF_RANKS = f"distributed{os.sep}optim"  # torch's ZeroRedundancyOptimizer, for one


@dataclass(slots=True)
class KnownOptimizer:
    """An optimizer of the script."""

    key: str
    line: str  # that made it
    gathered: list[str] = field(default_factory=list)  # as in Optimizer
    step: int = 0  # number of its next step
    closures: int = 0  # calls of the closure that its last step was given, if that was looked at
    closures_before: int = 0  # the same of the step before that, while a step runs
    begun: float | None = None  # seconds, when the step that runs began
    listed: int | None = None  # so many parameters were in its record
    # Of its last step: what the counters said.
    forwards: int = 0
    backwards: int = 0
    small_sums: int = 0
    # Are the gradients of the step before cleared? Its smallest gradient shows that.
    stale: bool = False  # they may be there still
    smallest: weakref.ref | None = None  # the parameter with the smallest gradient
    smallest_bits: int = 0  # of this gradient; 0: it is gone, or zero
    added: bool = False  # a backward pass has added to this gradient since
    uncleared: int = 0  # backward passes since its last step, or since zero_grad()
    others: int = 0  # steps of other optimizers since its last one
    mixed: bool = False  # as in Step
    cleared_after: int = 0  # as uncleared, when zero_grad() threw them away

    def smallest_gradient(self):
        """Return the bits of the smallest gradient; 0: there is none, or it is 0."""
        parameter = self.smallest()
        gradient = None if parameter is None else parameter.grad
        if gradient is None or not readable(gradient, self.step) or not bool(gradient.any()):
            return 0
        return bits(gradient)

    def has_lost_the_smallest(self):
        """Return whether the parameter with the smallest gradient has none any more."""
        parameter = None if self.smallest is None else self.smallest()
        return parameter is not None and parameter.grad is None


@dataclass
class Optimizers:
    """The optimizers of this process."""

    known: weakref.WeakKeyDictionary = field(  # {optimizer: KnownOptimizer}
        default_factory=weakref.WeakKeyDictionary
    )
    scalers: weakref.WeakKeyDictionary = field(  # {GradScaler: it was on when it scaled a loss}
        default_factory=weakref.WeakKeyDictionary
    )
    # Optimizers that a GradScaler has unscaled, or taken a step with.
    scaled: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    numbers: WeakIdKeyDictionary = field(  # {parameter: as _number_of() gives it}
        default_factory=WeakIdKeyDictionary
    )
    main: str | None = None  # key of the main optimizer
    others: int = 0  # steps of other optimizers since its last one


state = kept(Optimizers())


def steps():
    """Return how many steps of an optimizer the process has taken."""
    return counters.steps


def steps_of_those_alive():
    """Return how many steps the optimizers have taken that are still there, at most."""
    return max((known.step for known in state.known.values()), default=0)


def parameters_of(optimizer):
    """Return the parameters of all groups of an optimizer, but for those that are no tensors.

    A library that hides values from each rank has other ones.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [each for each in parameters if isinstance(each, torch.Tensor)]


def rates_of(optimizer):
    """Return the learning rate of each group of an optimizer's parameters."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [
        float(rate)
        for rate in rates
        if rate is not None and (not torch.is_tensor(rate) or readable(rate))
    ]


@after(torch_optimizer.Optimizer, "__init__")
def made(result, args, kwargs):
    """Remember a new optimizer, but for the inner one of a ZeroRedundancyOptimizer.

    That has a part of the parameters.
    """
    optimizer = args[0]
    inner = any(OPTIMIZERS_OF_RANKS in file for file in innermost_files(4))
    if not inner or ".distributed.optim" in type(optimizer).__module__:
        lines, number = site("o")
        copies = shards.gathered(parameters_of(optimizer))
        state.known[optimizer] = KnownOptimizer(f"{lines} {number}", where(), copies)


@around(torch_optimizer.Optimizer, "load_state_dict")
def loaded(args, kwargs):
    """Note that an optimizer has loaded a state."""
    optimizer = args[0]
    known = state.known.get(optimizer)
    if known is None:
        yield
        return
    rates_before = rates_of(optimizer)
    yield
    rates = rates_of(optimizer)
    note(
        LoadedIntoOptimizer,
        optimizer=known.key,
        line=where(),
        next_step=known.step,
        rates=rates,
        changes=bool(optimizer.state) or rates != rates_before,
    )


@after(torch.amp.GradScaler, "scale")
def scaled(result, args, kwargs):
    """Remember a GradScaler."""
    state.scalers[args[0]] = args[0].is_enabled()


@before(torch.amp.GradScaler, "unscale_")
@before(torch.amp.GradScaler, "step")
def used_by_a_scaler(args, kwargs):
    """Remember whose gradients a GradScaler multiplies."""
    state.scaled.add(args[1] if len(args) > 1 else kwargs["optimizer"])


@at_start
def follow_steps():
    """Follow the steps of all optimizers, also of classes of the script."""
    torch_optimizer.register_optimizer_step_pre_hook(_before_step)
    torch_optimizer.register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer, args, kwargs):
    return safely(begin_step, optimizer, args, kwargs)


def _after_step(optimizer, args, kwargs):
    safely(end_step, optimizer)


def begin_step(optimizer, args, kwargs):
    """Note a step before it is taken: the first ones, and ever fewer later.

    A closure makes the gradients within step(): they are looked at when it has first ended. Return
    (args, kwargs) for step() then, else None: they stay.
    """
    open_files()
    known = state.known.get(optimizer)
    if known is None:
        return None
    _choose_main(known)
    batches = counters.feeding.taken_for_a_step() if counters.feeding is not None else 0
    instead = None
    known.closures_before, known.closures = known.closures, 0
    if looked_at(known.step):
        look = functools.partial(look_at_step, optimizer, known, batches)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            look()
        elif len(args) > 1:
            instead = (args[0], looking_after(closure, look, known), *args[2:]), kwargs
        else:
            instead = args, {**kwargs, "closure": looking_after(closure, look, known)}
    known.begun = now()
    gpu_times.begins("optimizer")
    return instead


def looking_after(closure, look, known):
    """Return a closure that does the same, and calls look() when it has first ended.

    known: the KnownOptimizer, which counts the calls.
    """
    looks = [look]

    @functools.wraps(closure)
    def call(*args, **kwargs):
        result = closure(*args, **kwargs)
        known.closures += 1
        if looks:
            safely(looks.pop())
        return result

    return call


def look_at_step(optimizer, known, batches):
    """Note a step that is about to be taken, and what is looked at beside it."""
    parameters = parameters_of(optimizer)
    if not parameters:
        return
    if known.listed != len(parameters) or known.step == SECOND_LOOK:
        describe(optimizer, known, parameters)
    if known.step == SECOND_LOOK - 1 and count("strays") == 0:
        owned = [parameters_of(each) for each in list(state.known)]
        model_parameters.look_for_strays(owned, known.step)
    if known.step == SECOND_LOOK and count("buffers") == 0:
        model.note_buffers(known.step)
        model_parameters.note_strays(known.step)
    if not known.added:
        known.stale = False  # gradients by hand
    note_step(optimizer, known, parameters, batches)


def _choose_main(known):
    """Choose the main optimizer anew, if this step shows that the first was that of a warm-up."""
    state.others = 0 if known.key == state.main else state.others + 1
    if state.main is None or state.others > 20:
        if state.main is not None:
            begin_anew()
        state.main = known.key


def describe(optimizer, known, parameters):
    """Note the parameters of an optimizer, by DDP's names where they are DDP's."""
    known.listed = len(parameters)
    if known.key == state.main:
        gpu_times.state.device = gpu_times.device_of(parameters)
    if {type(each) for each in parameters} - {torch.nn.Parameter, torch.Tensor}:
        uses("shards")
    float64 = any(each.dtype == torch.float64 for each in parameters)
    note(
        Optimizer,
        optimizer=known.key,
        line=known.line,
        names=[_name_of(each) for each in parameters],
        shapes=[list(each.shape) for each in parameters],
        same_parameters=zlib.crc32(str([*map(_number_of, parameters)]).encode()),
        device=parameters[0].device.type,
        has_momentum=any(
            bool(group.get("momentum")) or "betas" in group for group in optimizer.param_groups
        ),
        threads=torch.get_num_threads(),
        unasked_float64=float64 and torch.get_default_dtype() != torch.float64,
        sizes=[len(group["params"]) for group in optimizer.param_groups],
        of_modules=not model_parameters.are_copies([parameters]),
        gathered=known.gathered,
        added=[place for place, each in enumerate(parameters) if model.was_added(each)],
        is_flat=model.is_in_parts_of(parameters),
    )


def _number_of(parameter):
    """Return the number of a parameter, in the order in which optimizers had them at first."""
    if parameter not in state.numbers:
        state.numbers[parameter] = count("parameter")
    return state.numbers[parameter]


def _name_of(parameter):
    """Return the ParameterName of a DDP object's parameter; None for any other one."""
    known = model.known_parameter(parameter)
    return None if known is None else ParameterName(known.ddp, known.name)


def note_step(optimizer, known, parameters, batches):
    """Note a step that is about to be taken."""
    scalers = list(state.scalers) if known.step < FIRST else []
    gradients = prints([each.grad for each in parameters], known.step)
    graphs_held, graphs_since_start = graphs.held()
    owned = [each for optimizer in list(state.known) for each in parameters_of(optimizer)]
    outside, outside_moved = unowned.names(owned, known.step)
    note(
        Step,
        optimizer=known.key,
        number=known.step,
        line=where(),
        weights=prints(parameters, known.step),
        gradients=gradients,
        without_gradient=sum(each.grad is None for each in parameters),
        outside=outside,
        outside_moved=outside_moved,
        rates=rates_of(optimizer),
        scales=[scaler.get_scale() for scaler in scalers if scaler.is_enabled()],
        stale=known.stale,
        mixed=known.mixed and counters.backwards - known.backwards == 2 and known.others == 1,
        cleared_after=known.cleared_after,
        forwards=counters.forwards - known.forwards,
        backwards=counters.backwards - known.backwards,
        two_forwards=sorted(model.state.two_forwards),
        exchanged=model.state.exchanges,
        backward_line=counters.backward_line,
        batches=batches,
        small_sums=counters.small_sums - known.small_sums,
        lost_hooks=model.lost_hooks(parameters),
        bare=_bare(parameters, gradients),
        loss=counters.loss,
        detects_anomalies=torch.is_anomaly_enabled(),
        closures=known.closures_before,
        graphs_held=graphs_held,
        graphs_since_start=graphs_since_start,
    )


def _bare(parameters, gradients):
    """Return Step.bare. gradients: the Print of each, or None."""
    places = []
    for place, (parameter, seen) in enumerate(zip(parameters, gradients, strict=True)):
        if not parameter.requires_grad or not parameter.numel():
            continue
        gradient = parameter.grad
        is_zero = seen is not None and seen.norm == 0 and not bool(gradient.any())
        if gradient is None or is_zero:
            places.append(place)
    return places


def end_step(optimizer):
    """Count a step that was taken, and watch whether its gradients are cleared."""
    known, end = state.known.get(optimizer), now()
    if known is None or known.begun is None:
        return
    span("optimizer", known.begun, end)
    gpu_times.ends()
    known.begun = None
    if looked_at(known.step + 1):
        _watch_gradients(optimizer, known)
    number, known.step = known.step, known.step + 1
    counters.steps = max(counters.steps, known.step)
    known.forwards, known.backwards = counters.forwards, counters.backwards
    known.small_sums = counters.small_sums
    known.uncleared = known.cleared_after = known.others = 0
    known.mixed = False
    for other in state.known.values():
        other.others += other is not known
    model.forget_calls()
    if known.key == state.main:
        gpu_times.step_ended(number)
        links.step_ended(number)
        step_ended(number, end)


def _watch_gradients(optimizer, known):
    """Choose the smallest gradient of a step: the next one finds it if nobody clears it."""
    filled = [
        each
        for each in parameters_of(optimizer)
        if each.grad is not None and readable(each.grad, known.step)
    ]
    if filled:
        smallest = min(filled, key=lambda each: each.grad.numel())
        known.smallest = weakref.ref(smallest)
        known.smallest_bits = known.smallest_gradient()
    known.stale, known.added = bool(filled and known.smallest_bits), False
