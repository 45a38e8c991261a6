"""From backward() to a step: notes Clip and ThrownAway, and sees gradients that nobody clears."""

import collections.abc

import torch
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from ..records.optimizer import Clip, ThrownAway
from . import gpu_times, graphs, model, optimizer, parameters, times
from .counters import counters
from .fingerprints import looked_at, memory_of, readable, tensors_in
from .hooks import RAISED, after, around, safely
from .notebook import count, note, now, stand, stand_no_more
from .script_lines import where
from .times import span


@around(torch.autograd, "backward", even_if_it_fails=True)
def backward(args, kwargs):
    """Count a backward pass, and measure when this rank has all its gradients.

    What is left of backward() after that is waiting for other ranks, and the exchange.
    """
    counters.backward_line = where()
    model.look_for_bare_calls()
    for known in optimizer.state.known.values():
        if known.uncleared == known.others == 1 and looked_at(known.step):
            known.mixed = known.smallest is not None and known.smallest_gradient() != 0
        if known.uncleared and looked_at(known.step) and known.has_lost_the_smallest():
            # The script has taken the gradients away by hand.
            known.cleared_after, known.uncleared = known.uncleared, 0
        known.uncleared += 1
        if known.stale and looked_at(known.step):
            # Else the gradients were cleared by hand: p.grad = None, or another one.
            known.stale = known.smallest_gradient() == known.smallest_bits
    ready, handle = [], None
    root = next(tensors_in(args[:1] or [kwargs.get("tensors")]), None)
    graphs.mark(root)
    counters.loss = _number_in(root)
    is_measured = times.state.timed or gpu_times.state.thread is not None
    if root is not None and root.requires_grad and model.state.exchanges and is_measured:
        handle = root.register_hook(_reports_the_end(ready))
    counters.backwards += 1
    model.backward_begins()
    stand("backward", counters.backward_line)
    gpu_times.begins("backward")
    begin = now()
    result = yield
    end = now()
    gpu_times.ends()
    if handle is not None:
        handle.remove()
    if ready:
        span("backward", begin, ready[0])
        span("exchange", ready[0], end)
    else:
        span("backward", begin, end)
    counters.phase += bool(model.state.exchanges)
    stand_no_more("backward", counters.backward_line, failed=result is RAISED)
    for known in optimizer.state.known.values():
        if known.stale and looked_at(known.step):
            before, known.smallest_bits = known.smallest_bits, known.smallest_gradient()
            known.added |= known.smallest_bits != before


def _number_in(root):
    """Return the loss from which a backward pass begins, or None. root: a tensor, or None."""
    step = counters.steps
    if root is None or root.numel() != 1 or not looked_at(step) or not readable(root, step):
        return None
    return float(root.detach())


def _reports_the_end(ready):
    """Return a hook for the root of a backward pass: it puts into ready when all is computed.

    DDP waits for the exchange in a callback of its own, which comes later. Callbacks can be added
    within a backward pass alone.
    """

    def all_is_computed():
        ready.append(now())
        safely(gpu_times.goes_over_to, "exchange")

    def begins(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(all_is_computed)

    return begins


@around(torch_optimizer.Optimizer, "zero_grad")
@around(torch.nn.Module, "zero_grad")
def cleared(args, kwargs):
    """Follow zero_grad() of an optimizer, or of a module, which may be another optimizer's.

    A wrapper may pass for an optimizer, whose parameters it has.
    """
    owner = args[0]
    groups = getattr(owner, "param_groups", None)
    had_some = {each for each, known in optimizer.state.known.items() if _has_some(each, known)}
    yield
    for each, known in optimizer.state.known.items():
        is_its_own = each.param_groups is groups
        if not is_its_own and not (groups is None and _nothing_left(known)):
            continue
        if each in had_some:
            known.cleared_after = known.uncleared
            if is_its_own and count("thrown away") < 500:
                lost, at_the_end = known.uncleared, _at_the_end_of_a_pass()
                note(ThrownAway, line=where(), backwards=lost, at_the_end=at_the_end)
        known.stale, known.uncleared, known.mixed = False, 0, False


def _has_some(each, known):
    """Return whether an optimizer has gradients of backward passes since its last step."""
    its_own = optimizer.parameters_of(each) if known.uncleared else ()
    return any(parameter.grad is not None for parameter in its_own)


def _at_the_end_of_a_pass():
    """Return ThrownAway.at_the_end."""
    one = counters.feeding
    if one is None:
        return False
    return one.over or one.complete or (one.batches < 2 and one.pass_of_loader > 0)


def _has_gradients(each):
    """Return whether a parameter of an optimizer has a gradient."""
    return any(parameter.grad is not None for parameter in optimizer.parameters_of(each))


def _nothing_left(known):
    """Return whether the smallest gradient of an optimizer is gone."""
    return known.smallest is None or not known.smallest_gradient()


@after(clip_grad, "clip_grad_norm_", also=[torch.nn.utils])
@after(clip_grad, "clip_grad_value_", also=[torch.nn.utils])
def clipped(result, args, kwargs):
    """Note that gradients were clipped by the norm that the call has found."""
    given = args[0] if args else kwargs["parameters"]
    most = args[1] if len(args) > 1 else kwargs.get("max_norm")
    _note_clip(given, result, most)


@after(torch.nn.utils, "clip_grads_with_norm_")
def clipped_with_norm(result, args, kwargs):
    """Note that gradients were clipped by a norm that the script has found before."""
    names = "parameters", "max_norm", "total_norm"
    given, most, norm = [
        args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)
    ]
    _note_clip(given, norm, most)


def _note_clip(given, norm, most):
    """Note a Clip: the first times, and ever fewer later. given: parameters; norm: theirs."""
    number = count("clip")
    if not looked_at(number):
        return
    norm_is_read = torch.is_tensor(norm) and readable(norm, number)
    norm = float(norm) if norm_is_read else None
    is_read_by_now = isinstance(given, collections.abc.Iterator)  # a generator or a filter
    if is_read_by_now:
        owners = [each for each in list(optimizer.state.known) if _has_gradients(each)]
        given_here = 0 if norm == 0 else 1
    else:
        listed = given if torch.is_tensor(given) else [*given]
        tensors = [*tensors_in(listed)]
        owners = _owners_of(tensors)
        given_here = len({id(each) for each in tensors})
    note(
        Clip,
        number=number,
        line=where(),
        parameters=given_here,
        in_an_optimizer=is_read_by_now or bool(owners) or _may_be_copied(),
        scaled=_scaled(owners),
        norm=norm,
        most=most if norm is not None and isinstance(most, (int, float)) else None,
        optimizer=optimizer.state.known[owners[0]].key if len(owners) == 1 else None,
    )


def _may_be_copied():
    """Return whether gradients may be copied to an optimizer's own parameters: it has copies."""
    return parameters.are_copies([*map(optimizer.parameters_of, optimizer.state.known)])


def _owners_of(tensors):
    """Return the optimizers that have one of these tensors, or else one of which it is a part."""
    ids = {id(each) for each in tensors}
    memory = {memory_of(each) for each in tensors} - {None}
    owners, of_the_whole = [], []
    for each in list(optimizer.state.known):
        its_own = optimizer.parameters_of(each)
        if not ids.isdisjoint(map(id, its_own)):
            owners.append(each)
        elif not memory.isdisjoint(map(memory_of, its_own)):
            of_the_whole.append(each)
    return owners or of_the_whole


def _scaled(owners):
    """Return whether a GradScaler still multiplies the gradients of all of the optimizers.

    One that no GradScaler has taken a step with is trained without any.
    """
    return bool(owners) and all(map(_is_scaled, owners))


def _is_scaled(owner):
    """Return whether a GradScaler still multiplies the gradients of an optimizer."""
    if owner not in optimizer.state.scaled:
        return False
    for scaler, used in optimizer.state.scalers.items():
        if not used:  # one that is off has no states
            continue
        own = scaler._per_optimizer_states.get(id(owner))  # made by unscale_() or step()
        if own is None or "UNSCALED" not in str(own["stage"]):
            return True
    return False
