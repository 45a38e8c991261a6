"""Settings that slow a job down, and collective calls whose result is lost."""

import collections
import math
import statistics

from ..findings import Found, Question, rule
from ..records.model import Forward
from ..records.process import Call
from ..words import most
from .pages import COSTS

SMALL = 4096  # numbers: a call of fewer takes as long as one of a single number, nearly


def optimizers_of(run):
    """Return the latest Optimizer records of all ranks."""
    return [note for rank in run.ranks.values() for note in rank.optimizers.values()]


@rule()
def debugging_is_on(run):
    """Debugging was left on, which slows each step down."""
    found = [*run.first.debugging]
    lasts = [of[max(of)] for rank in run.ranks.values() for of in rank.steps.values()]
    if any(step.detects_anomalies for step in lasts):
        found.append("torch.autograd.set_detect_anomaly")
    if found:
        yield Found(
            f"debugging is on: {', '.join(found)}",
            "it slows each step down; switch it off for a long job",
        )


@rule()
def double_precision(run):
    """Weights are float64.

    Looks alike, and is right: float64 as the default type, which was asked for.
    """
    if any(note.unasked_float64 for note in optimizers_of(run)) and run.first.steps_taken > 7:
        yield Question(
            "the weights are in double precision (float64)",
            "twice the memory and the exchange; is it meant so?",
        )


@rule()
def too_many_threads(run):
    """Ranks on a CPU have more than twice as many threads as there are cores."""
    one = run.first
    notes = [note for note in optimizers_of(run) if note.device == "cpu"]
    threads = max((note.threads for note in notes), default=0)
    cores = run.cores_of(one)
    crowded = threads > 1 and threads * one.local_world_size > 2 * cores
    if crowded and one.steps_taken > 7:
        yield Found(
            f"{one.local_world_size} ranks with {threads} threads each share {cores} cores:"
            " they wait for each other",
            f"torch.set_num_threads({max(1, cores // max(1, one.local_world_size))})",
            "benchmarks/README.md",
        )


@rule()
def looks_for_unused_parameters(run):
    """DDP() has find_unused_parameters=True, and each forward that was looked at used all of them.

    Looks alike, and is right: a model of which some forwards, on some ranks, leave out a part. One
    that leaves it out rarely may not have done so yet: therefore it is a question.
    """
    for forwards in run.forwards():
        calls = [call for of in forwards.of.values() for call in of.values()]
        looked_at = [call for call in calls if call.all_used is not None]
        is_long = max((call.number for call in looked_at), default=0) > 8
        if is_long and all(call.all_used for call in looked_at):
            yield Question(
                f"DDP() of {forwards.wrapped.line} has find_unused_parameters=True, and each"
                " forward that was looked at used all parameters",
                "each step searches the graph for others; do without, if none is used rarely",
                COSTS,
            )


@rule()
def one_tensor_for_all(run):
    """all_gather is given one tensor under several names: all slots hold the last rank's."""
    for call in run.records(Call):
        if call.one_for_all:
            yield Found(
                f"all_gather at {call.line} is given one tensor under {run.world_size} names: all"
                " slots hold the last rank's",
                "make them by a comprehension, not by [t] * n",
            )


@rule("calls for each")
def one_call_for_each_parameter(run):
    """The script exchanges the gradients itself, by a call for each of many small parameters.

    Looks alike, and is right: few parameters, or large ones; calls that torch sends together
    (dist._coalescing_manager), or that go on beside the backward pass (async_op); an exchange after
    many steps, of the weights.
    """
    rank = run.first
    for steps in rank.steps.values():
        shapes = rank.optimizers[next(iter(steps.values())).optimizer].shapes
        pairs = [(steps[number - 1], step) for number, step in steps.items() if number - 1 in steps]
        found = [calls_for_each(rank, before, step, shapes) for before, step in pairs]
        found = [calls for calls in found if calls]
        if most(len(found), len(pairs)):
            yield Question(
                f"each step makes {len(found[0])} calls of all_reduce, one for each parameter"
                f" ({found[0][0].line}), and most of them are small",
                "all ranks wait for each of them: put the gradients into one vector, or use DDP",
                COSTS,
            )


def calls_for_each(rank, before, step, shapes):
    """Return the calls of all_reduce between two steps, if each parameter has one of its size.

    Else, or if most parameters are large, or there are fewer than 16: []. before, step: two Step
    records, one after the other. shapes: of the optimizer's parameters.
    """
    sizes = [
        math.prod(shape)
        for shape, gradient in zip(shapes, step.gradients, strict=False)
        if gradient is not None
    ]
    small = [size for size in sizes if size <= SMALL]
    if not most(len(small), len(sizes), least=16):
        return []
    calls = [
        call
        for call in rank.records(Call)
        if call.name == "all_reduce" and before.time < call.time <= step.time
        if not call.is_coalesced and not call.is_async and call.line != step.line
    ]
    missing = collections.Counter(sizes) - collections.Counter(call.elements for call in calls)
    return [] if missing else calls


@rule(unless={"calls for each"})
def many_small_calls(run):
    """Most steps make eight or more collective calls of at most 16 numbers, which could be one.

    Looks alike, and is right: a few in each step, or in each call of a step's closure (LBFGS); many
    in an evaluation; those that torch makes in a forward, a backward or a step of its own; calls
    with async_op.
    The optimizer counts that takes most steps: several may come between two of another one.
    """
    rank = run.first
    if rank.steps:
        steps = max(rank.steps.values(), key=max)
        between = small_calls(rank, steps)
        many = [
            calls
            for number, calls in between.items()
            if len(calls) > 7 * max(1, steps[number].closures or 0)
        ]
        if most(len(many), len(between)):
            [(line, _)] = collections.Counter(line for each in many for line in each).most_common(1)
            yield Question(
                f"each step makes {statistics.median_low(map(len, many))} collective calls of few"
                f" numbers, most of them at {line}",
                "all ranks wait for each of them: put the numbers into one tensor, for one call",
                COSTS,
            )


def small_calls(rank, steps):
    """Return {number of a step: the lines of the small calls between the step before and it}.

    steps: {number: Step}. Of those in it, steps count of which the one before is noted, too.
    """
    own = {each.line for each in rank.records(Forward)}
    for step in steps.values():
        own |= {step.line, step.backward_line}
    evaluations = [(each.start.time, each.progress.time) for each in rank.passes if each.evaluates]
    calls = [
        call
        for call in rank.records(Call)
        if call.elements is not None and call.elements <= 16 and call.line not in own
        if not call.is_coalesced and not call.is_async
        if not any(begin < call.time <= end for begin, end in evaluations)
    ]
    return {
        number: [call.line for call in calls if steps[number - 1].time < call.time <= step.time]
        for number, step in steps.items()
        if number - 1 in steps
    }


@rule()
def sums_are_lost(run):
    """Nothing holds the tensor that all_reduce is given, so its sums are lost.

    Looks alike, and is right: a warm-up, a barrier, a trial of the network (the same few numbers
    each time, or no step is taken).
    """
    if not optimizers_of(run):
        return
    lost = collections.defaultdict(set)
    for rank, calls in run.records_by_rank(Call).items():
        for call in calls:
            if call.unheld is not None:
                lost[call.line, rank].add(call.unheld)
    for (line, _), values in lost.items():
        if len(values) > 2:
            yield Question(
                f"nothing holds the tensor that all_reduce at {line} is given: its sums are lost",
                "they come in the tensor itself, and it returns None: give it a name",
            )
