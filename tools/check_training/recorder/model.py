"""DDP objects, as they are made, and their forward passes: notes Wrapped, Forward, Buffers."""

import collections
import numbers
import sys
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from ..records.data import Mode
from ..records.model import BareCall, Buffers, Forward, Wrapped
from . import generators, gpu_times
from .counters import counters
from .fingerprints import FIRST, bits, looked_at, memory_of, random_state, readable, tensors_in
from .hooks import after, around, safely
from .notebook import count, note, now, stand
from .script_lines import where
from .state import kept
from .times import begins, ended

MARK = "check_training"  # on nodes of autograd, as long as DDP's hook hangs there, too


@dataclass(slots=True)
class KnownParameter:
    """A parameter of a DDP object."""

    reference: weakref.ref
    ddp: int  # number of the DDP object
    name: str
    averaged: bool  # it needed a gradient when DDP() was made: so DDP averages it


@dataclass(slots=True)
class KnownDDP:
    """A DDP object."""

    number: int  # of all that were made
    names: set[str]  # in its state_dict()
    # Modules in it whose mode counts: with dropout or BatchNorm.
    parts: list[weakref.ref] = field(default_factory=list)
    has_exchanged: bool = False  # a call of it had the exchange on
    left_out: bool = False  # an exchange has not used a parameter, on some rank


@dataclass
class Models:
    """The DDP objects of this process, and in which order they are called."""

    wrappers: weakref.WeakKeyDictionary = field(  # {DDP object: KnownDDP}
        default_factory=weakref.WeakKeyDictionary
    )
    parameters: dict[int, KnownParameter] = field(default_factory=dict)  # {id of each: it}
    was_training: dict[int, bool] = field(default_factory=dict)  # {DDP's number: at its last call}
    called: set[int] = field(default_factory=set)  # numbers of DDP objects, since the last step
    exchanges: bool | None = None  # the last call was outside no_sync(); None: there was none
    # {number of a DDP object: its calls that no backward() has followed yet}
    waiting: collections.Counter = field(default_factory=collections.Counter)
    two_forwards: set[int] = field(default_factory=set)  # numbers of those with two at once
    bare_watch: object = None  # torch's handle, as long as calls of the bare model are looked for
    looked_for_bare_calls: bool = False


state = kept(Models())


def known_parameter(parameter):
    """Return the KnownParameter of a DDP object's parameter; None for any other one."""
    known = state.parameters.get(id(parameter))
    return known if known is not None and known.reference() is parameter else None


def was_added(parameter):
    """Return whether a parameter was put into the module of a DDP object after that was made."""
    if known_parameter(parameter) is not None:
        return False
    of_modules = (
        each
        for ddp in list(state.wrappers)
        for name, each in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    )
    return any(parameter is each for each in of_modules)


def is_in_parts_of(parameters):
    """Return whether a DDP object's parameters are parts of an optimizer's, and not these."""
    if any(known_parameter(each) for each in parameters):
        return False
    memory = {memory_of(each) for each in parameters} - {None}
    of_ddp = [known.reference() for known in state.parameters.values()]
    return any(memory_of(each) in memory for each in of_ddp if each is not None)


@after(DDP, "__init__", closed=True)
def made(result, args, kwargs):
    """Note a new DDP object."""
    ddp, number = args[0], count("ddp")
    named = [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    ]
    for name, parameter in named:
        averaged = parameter.requires_grad
        known = KnownParameter(weakref.ref(parameter), number, name, averaged)
        state.parameters[id(parameter)] = known
        if averaged and readable(parameter, 0):
            _node(parameter).metadata[MARK] = True
    kinds = [(type(each).__name__, getattr(each, "p", 0)) for each in ddp.module.modules()]
    parts = [weakref.ref(each) for each in ddp.module.modules() if _has_modes(each)]
    state.wrappers[ddp] = KnownDDP(number, {*ddp.state_dict()}, parts)
    note(
        Wrapped,
        ddp=number,
        line=where(),
        group=sorted(dist.get_process_group_ranks(ddp.process_group)),
        names=[name for name, _ in named],
        frozen=[name for name, parameter in named if not parameter.requires_grad],
        sends_buffers=ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()),
        has_dropout=any("Dropout" in kind and chance for kind, chance in kinds),
        has_batch_norm=any(
            type(each).__name__.startswith("BatchNorm") and each.running_mean is not None
            for each in ddp.module.modules()
        ),
    )


def _has_modes(module):
    """Return whether a module does something else in eval mode: dropout or BatchNorm."""
    kind = type(module).__name__
    return ("Dropout" in kind and getattr(module, "p", 0)) or kind.startswith("BatchNorm")


def _is_training(ddp, known):
    """Return whether a DDP object's module is in train mode, or a part of it whose mode counts."""
    if ddp.module.training or known is None:
        return ddp.module.training
    parts = (part() for part in known.parts)
    return any(part is not None and part.training for part in parts)


def _node(parameter):
    """Return the node of autograd that adds up a parameter's gradients: DDP's hook hangs there."""
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def lost_hooks(parameters):
    """Return Step.lost_hooks, for the first and the last parameter that DDP averages."""
    averaged = []
    for parameter in parameters:
        known = known_parameter(parameter)
        if known is None or not known.averaged:
            continue
        if parameter.requires_grad and readable(parameter, 0):
            averaged.append((parameter, known.name))
    ends = averaged[:1] + averaged[-1:]
    return [name for parameter, name in ends if MARK not in _node(parameter).metadata]


@around(DDP, "forward", even_if_it_fails=True)
def forward(args, kwargs):
    """Note a call of a DDP object: the first ones, ever fewer later, and each change of mode."""
    ddp, gradients, line = args[0], torch.is_grad_enabled(), where()
    known = state.wrappers.get(ddp)
    number = known.number if known is not None else 0  # a copy: it was not made by DDP()
    call, exchanges = count(("forward", number, gradients)), ddp.require_backward_grad_sync
    training = _is_training(ddp, known)  # it may have been set without the wrapper
    turned = False
    if gradients:
        turned = follow(number, training, exchanges)
    else:
        counters.no_grad_forwards += 1
    looked, seen = looked_at(call), {}
    if looked:
        seen, device = _look_into(args[1:], kwargs, ddp, call)
    all_used = None
    if gradients and known is not None and ddp.find_unused_parameters and not ddp.static_graph:
        had_left_out = known.left_out
        all_used = _all_used(ddp, known, call)
        turned = turned or known.left_out != had_left_out
    stand("forward", line)
    stretch = begins("forward", now())
    gpu_times.begins("forward")
    yield
    gpu_times.ends()
    ended(stretch, now())
    stand("")
    if not looked and not turned:
        return
    if "random_state" in seen:
        seen["drew"] = random_state(device) != seen["random_state"]
    note(
        Forward,
        ddp=number,
        number=call,
        line=line,
        gradients=gradients,
        training=training,
        exchanges=exchanges,
        is_frozen=not any(each.requires_grad for each in ddp.module.parameters()),
        all_used=all_used,
        **seen,
    )


def _all_used(ddp, known, call):
    """Return whether each exchange so far has used all parameters, on all ranks; None: not known.

    DDP sums up over the ranks which parameters were used, and keeps that until the next exchange.
    """
    has_exchanged = known.has_exchanged
    known.has_exchanged |= ddp.require_backward_grad_sync
    if not has_exchanged:  # the figures are not set yet
        return None
    used = ddp.reducer._get_local_used_map()  # for each parameter, how many ranks have used it
    if not readable(used, call):
        return None
    known.left_out |= int(used.min()) < dist.get_world_size(ddp.process_group)
    return not known.left_out


def follow(number, training, exchanges):
    """Count a call with gradients on; return whether the mode has changed since the one before."""
    counters.forwards += 1
    state.waiting[number] += 1
    if state.waiting[number] > 1:
        state.two_forwards.add(number)
    state.exchanges = exchanges
    state.called.add(number)
    turned = state.was_training.get(number, training) != training
    state.was_training[number] = training
    return turned


def backward_begins():
    """A backward() follows one call of each DDP object."""
    state.waiting -= collections.Counter([*state.waiting])


def forget_calls():
    """A step has come: what was called before it does not count for the next one."""
    state.two_forwards, state.waiting, state.called = set(), collections.Counter(), set()


def look_for_bare_calls():
    """Watch one forward pass of all modules, if none of a DDP object came before a backward().

    Called when backward() begins. Nothing is watched where something is compiled: torch.compile
    would do that again.
    """
    if state.bare_watch is not None:
        state.bare_watch.remove()
        state.bare_watch = None
    if counters.forwards or state.looked_for_bare_calls or not state.wrappers:
        return
    state.looked_for_bare_calls = True
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None or not dynamo.counters["frames"]:
        register = torch.nn.modules.module.register_module_forward_pre_hook
        state.bare_watch = register(_before_module)


def _before_module(module, inputs):
    safely(_called, module)


def _called(module):
    """Note that the module of a DDP object is called, and not that object."""
    if torch.is_grad_enabled() and any(module is ddp.module for ddp in list(state.wrappers)):
        note(BareCall, line=where())


def _look_into(inputs, options, ddp, call):
    """Return (fields of a Forward, the device of the model)."""
    found = [*tensors_in((inputs, options))]
    of_items = [] if _has_unknown((inputs, options)) else [each for each in found if each.dim()]
    seen = {
        "rows": next((len(tensor) for tensor in found if tensor.dim()), None),
        "batch": [bits(tensor) for tensor in of_items[:3] if readable(tensor, call)],
    }
    device = next((parameter.device for parameter in ddp.module.parameters()), None)
    if device is not None and (device.type == "cpu" or call < FIRST):
        seen["random_state"] = random_state(device)
        seen["drew_since_batch"] = generators.drew_since_batch(device, seen["random_state"])
    return seen, device


def _has_unknown(value):
    """Return whether something in the arguments of a call may hold tensors that are not seen."""
    if isinstance(value, dict):
        return any(map(_has_unknown, dict.values(value)))
    if isinstance(value, (list, tuple)):
        return any(map(_has_unknown, value))
    seen = isinstance(value, (str, bytes, numbers.Number, torch.dtype, torch.device))
    return value is not None and not seen and next(tensors_in(value), None) is None


def note_buffers(step):
    """Note the buffers of all DDP objects' modules."""
    for ddp, known in list(state.wrappers.items()):
        of_norms = {
            id(buffer)
            for each in ddp.module.modules()
            if hasattr(each, "num_batches_tracked")
            for buffer in each.buffers()
        }
        own = {
            name: bits(buffer)
            for name, buffer in list(ddp.module.named_buffers())[:1000]
            if id(buffer) not in of_norms and readable(buffer, step)
        }
        means = [
            bits(each.running_mean) for each in ddp.module.modules() if _is_own_norm(each, step)
        ]
        note(Buffers, ddp=known.number, bits=own, means=means)


def modes(step):
    """Return the Mode of each DDP object's module."""
    found = []
    for ddp in list(state.wrappers):
        norms = [each for each in ddp.module.modules() if _is_own_norm(each, step)]
        found.append(
            Mode(
                training=ddp.module.training,
                norms=[bits(norm.running_mean) for norm in norms[:20]],
                norm_updates=int(norms[0].num_batches_tracked) if norms else 0,
            )
        )
    return found


def _is_own_norm(module, step):
    """Return whether a module is a BatchNorm that keeps a mean of this rank's batches alone."""
    if not hasattr(module, "num_batches_tracked") or module.running_mean is None:
        return False
    return readable(module.running_mean, step) and type(module).__name__ != "SyncBatchNorm"
