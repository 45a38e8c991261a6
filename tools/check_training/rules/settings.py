"""Settings that slow a job down, and collective calls whose result is lost."""

import collections

from ..findings import Found, Question, rule
from ..records.process import Call


def optimizers_of(run):
    """Return the latest Optimizer records of all ranks."""
    return [note for rank in run.ranks.values() for note in rank.optimizers.values()]


@rule()
def debugging_is_on(run):
    """Debugging was left on, which slows each step down."""
    found = [*run.first.debugging]
    if any(note.detects_anomalies for note in optimizers_of(run)):
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
    crowded = threads > 1 and threads * one.local_world_size > 2 * one.cores
    if crowded and one.steps_taken > 7:
        yield Found(
            f"{one.local_world_size} ranks with {threads} threads each share {one.cores} cores:"
            " they wait for each other",
            f"torch.set_num_threads({max(1, one.cores // max(1, one.local_world_size))})",
            "benchmarks/README.md",
        )


@rule()
def looks_for_unused_parameters(run):
    """DDP() has find_unused_parameters=True, and each forward that was looked at used all of them.

    Looks alike, and is right: a model of which some forwards, on some ranks, leave out a part. One
    that leaves it out rarely may not have done so yet: therefore it is a question.
    """
    for forwards in run.forwards():
        sizes = [
            [each.left_out for each in of.values() if each.left_out is not None]
            for of in forwards.of.values()
        ]
        if all(len(each) > 7 and not any(each) for each in sizes):
            yield Question(
                f"DDP() of {forwards.wrapped.line} has find_unused_parameters=True, and each"
                " forward that was looked at used all parameters",
                "each step searches the graph for others; do without, if none is used rarely",
                "pitfalls/README.md#it-costs-too-much",
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
