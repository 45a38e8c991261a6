"""Do the weights of ranks that should hold one model come apart, and why?"""

import collections
import math

from ..findings import Found, Question, rule
from ..records.model import Forward, LoadedIntoModel
from ..records.optimizer import WeightsAtEnd
from ..records.process import Call
from ..words import differ, in_words, verb
from .apart import Apart, places_that_differ, steps_of_each_model, wrapper_of
from .reasons import (
    begin_apart,
    begin_with_other_weights,
    last_forward_in_no_sync,
    not_all_by_hand,
    not_of_ddp,
    nothing_is_averaged,
    nothing_is_averaged_in_steps,
    reason_for,
    steps_differ,
)


@rule("weights")
def never_steps(run):
    """A rank calls the DDP object, and never takes a step with its optimizer, as others do.

    Looks alike, and is right: it has come to the same line by another way, as rank 0 within a
    progress bar, so that its optimizer has another key.
    """
    for steps in run.optimizers():
        first = min(steps.of)
        note = run.ranks[first].optimizers[steps.optimizer]
        wrapped = wrapper_of(run.ranks[first], note)
        if wrapped is None or len(steps.of[first]) < 8:
            continue
        absent = [
            rank
            for rank in run.members(wrapped)
            if rank not in steps.of and run.ranks[rank].records(Forward)
            if not has_another_for_them(run.ranks[rank], note)
        ]
        if absent:
            yield Found(
                f"{in_words(absent)} never {verb('take', absent)} a step with the optimizer of"
                f" {note.line}",
                "the weights come apart",
            )


def has_another_for_them(rank, note):
    """Return whether a Rank takes steps with parameters of an Optimizer's names and shapes.

    Or with another optimizer that the same line has made: each may have an owner, which sends what
    it has changed.
    """
    others = [rank.optimizers[key] for key in rank.steps]
    return any(
        other.line == note.line or (other.names == note.names and other.shapes == note.shapes)
        for other in others
    )


@rule("weights")
def weights_come_apart(run):
    """The weights of ranks that should hold one model differ.

    Looks alike, and is right: local SGD (they are equal again from time to time), averaging by hand
    (they stay equal), sharded or split models (other groups, DTensors: not compared), experts of
    each rank, sums in another order (the last bits only).
    """
    if "join" in run.features:
        return
    for steps in steps_of_each_model(run):
        apart = how_far_apart(run, steps)
        if apart is None:
            continue
        if meet_again(apart) or are_experts(apart):
            continue
        reason = reason_for(apart)
        if reason is None:
            continue
        sure = is_sure(apart, reason)
        kind = Found if sure else Question
        doubt, meaning = "", "each rank trains a model of its own"
        if not sure:
            doubt = "unless that is meant so, "
            meaning = "are they averaged later, split over the ranks, or of another model on each?"
        yield kind(
            f"the weights of {in_words(apart.ranks, run)} come apart {apart.when}"
            f" ({apart.step.line}): {doubt}{reason.why}",
            f"{parameters_in_words(apart)}; {meaning}",
            reason.read,
        )


def how_far_apart(run, steps):
    """Return an Apart if weights differ that should be equal, by more than rounding; else None."""
    first = run.ranks[min(steps.of)]
    note = first.optimizers[steps.optimizer]
    wrapped = wrapper_of(first, note)
    if wrapped is None and run.may_split_the_model:
        return None
    members = run.members(wrapped) if wrapped else sorted(run.ranks)
    alike = [rank for rank in members if rank in steps.of and has_the_same(run, rank, steps, note)]
    if len(alike) < 2:
        return None
    steps = steps.only(alike)
    common = steps.common
    rows = {number: [*steps.at(number).values()] for number in common}
    bad = [number for number in common if places_that_differ(rows[number], "weights")]
    if not bad or not any(more_than_rounding(row) for row in rows.values()):
        return None
    since = max([number for number in common if number < bad[0]], default=bad[0])
    return Apart(run, steps, note, wrapped, common, bad, since)


def has_the_same(run, rank, steps, note):
    """Return whether a rank's optimizer has the parameters of an Optimizer, by shape and name."""
    mine = run.ranks[rank].optimizers[steps.optimizer]
    return not differ((each.shapes, each.names) for each in (note, mine))


def more_than_rounding(row):
    """Return whether weights or gradients differ by more than sums in another order would."""
    return largest_gap(row, "weights") > 1e-5 or largest_gap(row, "gradients") > 1e-3


def largest_gap(row, what):
    """Return the largest relative difference of a norm from the first rank's.

    row: a Step of each rank. what: "weights" or "gradients".
    """
    gaps = []
    for prints in zip(*(getattr(step, what) for step in row), strict=False):
        for mine in prints:
            first = prints[0]
            both_known = mine is not None and first is not None
            if both_known and mine != first:
                difference = abs(mine.norm - first.norm)
                gaps.append(difference / (abs(mine.norm) + abs(first.norm) + 1e-30))
    return max(gaps, default=0)


def meet_again(apart):
    """Return whether the weights are equal once more after they have come apart: local SGD."""
    for number in apart.common:
        if number > apart.bad[0] and number not in apart.bad:
            weights = apart.steps.of[apart.ranks[0]][number].weights
            if all(each is not None and math.isfinite(each.norm) for each in weights):
                return True
    return False


def some_meet_again(apart):
    """Return whether a parameter is equal again twice: it is averaged, and others are not.

    Once may be rounding, of weights that grow without end.
    """
    apart_before, times = set(), collections.Counter()
    for number in apart.common:
        row = [*apart.steps.at(number).values()]
        odd = set(places_that_differ(row, "weights"))
        for place in apart_before - odd:
            weights = row[0].weights[place]
            times[place] += weights is not None and math.isfinite(weights.norm)
        apart_before |= odd
    return max(times.values(), default=0) > 1


def are_experts(apart):
    """Return whether each rank has experts of its own, and rows travel to them."""
    calls = apart.run.records(Call)
    return apart.from_the_first and any("all_to_all" in call.name for call in calls)


def is_sure(apart, reason):
    """Return whether the records prove that it is a mistake; else the owner must know."""
    run, steps = apart.run, apart.steps.of[apart.ranks[0]]
    begin, end = steps[apart.common[0]].time, steps[apart.common[-1]].time
    meanwhile = [call for call in run.records(Call) if begin < call.time < end]
    if len(apart.bad) < 3 or some_meet_again(apart):
        return False
    # Local SGD averages after many steps: this run may have ended before.
    if may_average_later(apart) and not averages_in_each_step(apart, meanwhile, reason):
        return False
    # Without DDP and without a call, nothing shows that the ranks should hold one model: a sweep?
    if not run.wrapped and not meanwhile:
        return False
    # Nor do calls for figures alone: folds of a cross-validation? Shares of one set show it.
    if reason.given_by is nothing_is_averaged and not shares_out_one_set(run):
        return False
    # A shard of the classes, or a head for the rank's own task, is in no DDP object's module.
    if reason.given_by in (not_of_ddp, begin_apart) and are_outside_ddp(apart):
        return False
    if reason.given_by is nothing_is_averaged_in_steps and apart.from_the_first:  # an ensemble?
        return False
    if reason.given_by is not_all_by_hand and not run.wrapped:
        if apart.from_the_first or not has_the_size_of_gradients(apart, meanwhile):
            return False
        return len(meanwhile) > max(steps) / 2
    # Each rank may perturb the weights by its batch, and take that back after the step.
    if reason.given_by is steps_differ and are_equal_at_the_end(apart):
        return False
    # A long accumulation, of which a run that was cut shows the first part alone, looks alike.
    if reason.given_by is last_forward_in_no_sync and run.cut:
        return len(apart.common) > 40
    return True


def are_outside_ddp(apart):
    """Return whether a DDP object was made, and none has the parameters that come apart."""
    places = {
        place
        for number in apart.bad[:3]
        for place in places_that_differ([*apart.steps.at(number).values()], "weights")
    }
    if any(apart.name_of(place) for place in places) or not apart.run.wrapped:
        return False
    return not places & set(apart.optimizer.added)


def are_equal_at_the_end(apart):
    """Return whether the ranks' weights were read as the run ended, and are equal."""
    lasts = {
        rank: each.weights
        for rank in apart.ranks
        for each in apart.run.ranks[rank].records(WeightsAtEnd)
        if each.optimizer == apart.steps.optimizer
    }
    known = len(lasts) == len(apart.ranks) and all(map(any, lasts.values()))
    return known and not differ(lasts.values())


def shares_out_one_set(run):
    """Return whether a sampler shares out a set that is trained on to all ranks."""
    for loader in run.training_loaders():
        shares = [
            each.start.replicas == run.world_size or each.takes_a_share_of(run.world_size)
            for each in loader.firsts
        ]
        if len(shares) > 1 and all(shares):
            return True
    return False


def may_average_later(apart):
    """Return whether a collective call is large enough for the largest parameter.

    An evaluation gathers its outputs by calls that may be as large: those that gather count only
    if they have the sizes of all parameters, or of all together.
    """
    sizes = {math.prod(shape) for shape in apart.optimizer.shapes}
    whole = sum(math.prod(shape) for shape in apart.optimizer.shapes)
    gathered = set()
    loads_states = any(load.steps for load in apart.run.records(LoadedIntoModel))
    for call in apart.run.records(Call):
        elements = call.elements or 0
        if loads_states and "object" in call.name:  # states may be among them
            return True
        if "gather" in call.name:
            gathered.add(elements)
        elif elements >= max(sizes, default=0):
            return True
    return whole in gathered or sizes <= gathered


def has_the_size_of_gradients(apart, calls):
    """Return whether some calls sum as many numbers as the largest parameter has, or all have.

    Else they sum something else: activations, or some entries that are drawn in each step.
    """
    sizes = [math.prod(shape) for shape in apart.optimizer.shapes]
    whole = max(sizes), sum(sizes)
    return any("reduce" in call.name and call.elements in whole for call in calls)


def averages_in_each_step(apart, meanwhile, reason):
    """Return whether the script averages by hand, without DDP, in each step.

    meanwhile: the calls between the first and the last step.
    """
    if apart.wrapped or len(apart.common) < 10:
        return False
    if apart.from_the_first and reason.given_by is not begin_with_other_weights:
        return False
    return len(meanwhile) >= max(apart.steps.of[apart.ranks[0]])


def parameters_in_words(apart):
    """Return "3 of 8 parameters (0.weight, 0.bias, 1.weight)": those that differ at first."""
    first = places_that_differ([*apart.steps.at(apart.bad[0]).values()], "weights")
    names = [apart.name_of(place) or f"number {place + 1}" for place in first]
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += ", ..."
    return f"{len(names)} of {len(apart.optimizer.shapes)} parameters ({shown})"
