"""Why weights come apart. A reason counts only where its own record is there.

Each function here takes an Apart, and returns its reason in words, or "" if it is not the one. The
first that knows something is said; the lists at the end have their order.
"""

from dataclasses import dataclass

from ..records.model import BareCall, Forward, LoadedIntoModel
from ..records.optimizer import Clip, LoadedIntoOptimizer
from ..records.process import Call
from ..words import differ, in_words, of_some_alone, verb
from .apart import places_that_differ
from .pages import CLIP, ELASTIC, SILENT


@dataclass(slots=True)
class Reason:
    """Why weights have come apart."""

    why: str
    read: str  # the page, or ""
    given_by: object  # the function of this file


# ---- No model is wrapped in DDP() ----


def nothing_is_averaged(apart):
    """There is no DDP, and no collective call that could average a parameter."""
    if not any((call.elements or 0) > 16 for call in apart.run.records(Call)):
        return "no model is wrapped in DDP()"
    return ""


def nothing_is_averaged_in_steps(apart):
    """There is no DDP, and such calls come between the epochs alone: of an ensemble's answers?"""
    if exchanges_in_steps(apart):
        return ""
    return "no model is wrapped in DDP(), and nothing is averaged in the steps"


def exchanges_in_steps(apart):
    """Return whether calls with more than 16 numbers come between steps of an epoch.

    Also if fewer than eight such pairs of steps were noted: then it is not known.
    """
    rank, steps = apart.run.ranks[apart.ranks[0]], apart.steps.of[apart.ranks[0]]
    calls = [call.time for call in rank.records(Call) if (call.elements or 0) > 16]
    pairs = [(steps[number - 1], step) for number, step in steps.items() if number - 1 in steps]
    spans = [(before.time, step.time) for before, step in pairs]
    spans = [span for span in spans if not any_between(rank.begins_of_epochs(), *span)]
    return len(spans) < 8 or any(any_between(calls, *span) for span in spans)


def any_between(times, begin, end):
    """Return whether one of some times is after begin, and not after end."""
    return any(begin < time <= end for time in times)


def begin_with_other_weights(apart):
    """They average by hand, all gradients are equal, and the weights differed before."""
    rows = [[*apart.steps.at(number).values()] for number in apart.common]
    if apart.from_the_first and not any(places_that_differ(row, "gradients") for row in rows):
        return "they begin with other weights: broadcast rank 0's before"
    return ""


def not_all_by_hand(apart):
    """They average by hand, and the gradients differ nevertheless."""
    return "not all is averaged by hand, or at the wrong moment"


# ---- The weights differ before the first step ----


def loads_after_ddp(apart):
    """DDP() makes the weights equal; some ranks load others afterwards."""
    loads = {
        rank: [
            load.line
            for load in apart.run.ranks[rank].records(LoadedIntoModel)
            if load.is_ddp and load.steps == 0
        ]
        for rank in apart.ranks
    }
    some = of_some_alone(loads)
    if some:
        line = loads[some[0]][0]
        return f"{in_words(some)} alone {verb('load', some)} weights after DDP(), at {line}"
    return ""


def begin_apart(apart):
    """They differ, and no reason was seen."""
    return "they begin with other weights"


# ---- The gradients differ in the step that takes the weights apart ----


def bare_model_is_called(apart):
    """A DDP object was made, and never called; others may be."""
    wrapped = apart.wrapped
    if not wrapped or any(call.ddp == wrapped.ddp for call in apart.run.records(Forward)):
        return ""
    calls = apart.run.records(BareCall)
    instead = f"the bare model, at {calls[0].line}" if calls else "its parameters are trained"
    return f"DDP() of {wrapped.line} is never called, but {instead}"


def not_of_ddp(apart):
    """None of the parameters that differ is in a DDP object."""
    if names_that_differ(apart) == {None}:
        return "these parameters are not DDP's: added or exchanged after it, or outside"
    return ""


def lost_by_ddp(apart):
    """The hooks by which DDP hears of gradients are not on the parameters any more."""
    if apart.step.lost_hooks:
        return "its parameters were cast, moved or exchanged after DDP(), which has lost them"
    return ""


def frozen_at_first(apart):
    """DDP skips parameters that need no gradient when it is made, for ever."""
    wrapped = apart.wrapped
    if wrapped and names_that_differ(apart) - {None} <= set(wrapped.frozen):
        return f"frozen when DDP() was made ({wrapped.line}), trained later: wrap again"
    return ""


def not_from_backward(apart):
    """There are gradients, and no backward() came before the step."""
    if not apart.step.backwards:
        return "the gradients do not come from backward(), which DDP follows"
    return ""


def bare_model_is_trained(apart):
    """There was a backward(), and no forward of a DDP object.

    Before step 0, one may have settled the order in which DDP adds: then step 1 shows it.
    """
    steps = [step for rank in apart.ranks for step in apart.steps.of[rank].values()]
    later = [step for step in steps if step.number == 1]
    settled = apart.since == 0 and later and not any(step.forwards for step in later)
    if settled or not apart.step.forwards:
        return f"the bare model is trained ({apart.step.backward_line}), not the DDP object"
    return ""


def last_forward_in_no_sync(apart):
    """DDP averages in a backward() whose forward had the exchange on.

    no_sync() switches it off, and a script may set require_backward_grad_sync itself.
    """
    if apart.step.exchanged is not False:
        return ""
    before = [
        each
        for each in apart.run.ranks[apart.ranks[0]].records(Forward)
        if each.gradients and each.time < apart.step.time
    ]
    where = f" ({before[-1].line})" if before and not before[-1].exchanges else ""
    return (
        f"the last forward before the step{where} had the exchange switched off (no_sync(), or"
        " require_backward_grad_sync = False)"
    )


def two_forwards_first(apart):
    """DDP prepares for one backward() after each forward."""
    if apart.wrapped and apart.wrapped.ddp in apart.step.two_forwards:
        return "two forwards of the DDP object, then two backwards: one is not averaged"
    return ""


def smaller_group(apart):
    """DDP averages in a part of the ranks."""
    if apart.wrapped and len(apart.wrapped.group) < apart.run.world_size:
        return f"DDP averages in the group {apart.wrapped.group} alone"
    return ""


def names_that_differ(apart):
    """Return DDP's names of the parameters whose gradients differ; None for one that is not its."""
    return {apart.name_of(place) for place in apart.gradients}


# ---- The step itself differs ----


def loads_weights_alone(apart):
    """Some ranks load weights between two steps, and others do not."""
    begin, end = (row[0].time for row in rows_around(apart))
    loads = {
        rank: [
            load.line
            for load in apart.run.ranks[rank].records(LoadedIntoModel)
            if begin <= load.time <= end
        ]
        for rank in apart.ranks
    }
    some = of_some_alone(loads)
    if some:
        return f"{in_words(some)} alone {verb('load', some)} weights, at {loads[some[0]][0]}"
    return ""


def loads_optimizer_alone(apart):
    """Some ranks load the state of the optimizer, and others do not."""
    loads = {
        rank: [
            load.line
            for load in apart.run.ranks[rank].records(LoadedIntoOptimizer)
            if load.optimizer == apart.steps.optimizer
        ]
        for rank in apart.ranks
    }
    some = of_some_alone(loads)
    if some:
        line = loads[some[0]][0]
        return f"{in_words(some)} alone {verb('load', some)} the optimizer's state, at {line}"
    return ""


def clips_alone(apart):
    """Some ranks clip the gradients, and others do not."""
    some = of_some_alone(clips_of(apart))
    return f"{in_words(some)} alone {verb('clip', some)} the gradients" if some else ""


def clips_by_own_norm(apart):
    """All clip, and the norms by which they clip in this step differ."""
    clips = clips_of(apart)
    norms = [norms_by_number.get(apart.since) for norms_by_number in clips.values()]
    if all(clips.values()) and differ(norms):
        return "each rank clips by a norm of its own"
    return ""


def clips_of(apart):
    """Return {rank: {number of the call: the norm that it returned}}."""
    return {
        rank: {clip.number: clip.norm for clip in apart.run.ranks[rank].records(Clip)}
        for rank in apart.ranks
    }


def batch_left_out(apart):
    """A rank has taken another number of batches before the step."""
    if any(differ(step.batches for step in row) for row in rows_around(apart)):
        return "a rank has left out a batch alone, and is a step ahead of the others"
    return ""


def gradients_differ(apart):
    """The gradients differ, and none of the reasons above holds."""
    return "their gradients differ, and no reason was seen" if apart.gradients else ""


def steps_differ(apart):
    """The weights differ after a step that began with equal weights and gradients."""
    return "from equal gradients: their optimizers differ, or the weights are changed elsewhere"


def rows_around(apart):
    """Return the step that took the weights apart and the next that was noted, of each rank."""
    numbers = apart.since, apart.bad[0]
    return [[*apart.steps.at(number).values()] for number in numbers]


# ---- The order in which they are asked: [(the function, the page to read)] ----

WITHOUT_DDP = [
    (nothing_is_averaged, "README.md#from-one-process-to-many"),
    (nothing_is_averaged_in_steps, "README.md#from-one-process-to-many"),
    (begin_with_other_weights, ""),
    (not_all_by_hand, "04_collectives.py"),
]
BEFORE_THE_FIRST_STEP = [
    (loads_after_ddp, "recipes/README.md"),
    (begin_apart, ""),
]
OF_GRADIENTS = [
    (bare_model_is_called, "pitfalls/wrapper_not_kept.py"),
    (not_of_ddp, ""),
    (lost_by_ddp, SILENT),
    (frozen_at_first, SILENT),
    (not_from_backward, ""),
    (bare_model_is_trained, "pitfalls/method_of_the_model.py"),
    (last_forward_in_no_sync, "recipes/accumulate.py"),
    (two_forwards_first, ""),
    (smaller_group, ""),
]
OF_THE_STEP = [
    (loads_weights_alone, ""),
    (loads_optimizer_alone, ELASTIC),
    (clips_alone, CLIP),
    (clips_by_own_norm, CLIP),
    (batch_left_out, CLIP),
    (gradients_differ, ""),
    (steps_differ, ""),
]


def reason_for(apart):
    """Return the Reason why the weights of an Apart differ; None if another rule says it."""
    if not apart.run.wrapped:
        return first_that_holds(WITHOUT_DDP, apart)
    if apart.from_the_first:
        return first_that_holds(BEFORE_THE_FIRST_STEP, apart)
    reason = first_that_holds(OF_GRADIENTS, apart) if apart.gradients else None
    if reason is None and rates_or_scales_differ(apart):
        return None
    return reason or first_that_holds(OF_THE_STEP, apart)


def first_that_holds(reasons, apart):
    """Return the Reason of the first function that knows one, or None."""
    for function, read in reasons:
        why = function(apart)
        if why:
            return Reason(why, read, function)
    return None


def rates_or_scales_differ(apart):
    """Return whether learning rates, or GradScaler's scales, differ: rules of models.py say so."""
    return any(differ((step.scales, step.rates) for step in row) for row in rows_around(apart))
