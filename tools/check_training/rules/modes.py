"""Train mode or eval mode, and random numbers."""

import collections

from ..findings import Found, Question, rule
from ..runs import Forwards
from ..words import in_words, most
from .apart import is_another_stage


@rule()
def goes_on_in_eval_mode(run):
    """Training goes on in eval mode after an evaluation: no dropout, and BatchNorm stands still.

    Looks alike, and is right: fine-tuning in eval mode from the first step, frozen BatchNorm (the
    whole model is still in train mode), models without dropout and BatchNorm, an evaluation with
    gradients on when the training is over, a frozen part of a larger model, another stage of the
    training with an optimizer of its own.
    """
    for forwards in forwards_that_depend_on_the_mode(run):
        first_off = {rank: first_in_eval_mode(of) for rank, of in forwards.of.items()}
        for rank, of in forwards.of.items():
            first = first_off[rank]
            if first is None or first.time < run.ranks[rank].first_step:
                continue
            end = time_of_the_last_step(run.ranks[rank], forwards.wrapped)
            later = [each for each in of.values() if each.number >= first.number]
            later = [each for each in later if each.time < end]
            if not later or any(each.training for each in later):
                continue
            if later[-1].number - first.number < 8:
                continue
            if is_another_stage(run.ranks[rank], first.time):
                continue
            others = [other for other, its_first in first_off.items() if its_first]
            yield Found(
                f"from forward {first.number + 1} on, training goes on in eval mode"
                f" ({first.line}, {in_words(others, run)}): no dropout, and BatchNorm stands still",
                "call model.train() after each evaluation",
                "01_single_node_multi_gpu.py",
            )
            break


@rule()
def other_mode_on_a_rank(run):
    """A rank trains in eval mode, and others in train mode.

    Looks alike, and is right: as for the rule before.
    """
    for forwards in forwards_that_depend_on_the_mode(run):
        trains = [rank for rank, of in forwards.of.items() if of and first_in_eval_mode(of) is None]
        for rank, of in forwards.of.items():
            row = [*of.values()]
            never_trains = len(row) > 7 and not any(each.training for each in row)
            if never_trains and trains:
                yield Found(
                    f"rank {rank} trains in eval mode, {in_words(trains)} in train mode",
                    row[0].line,
                )


def forwards_that_depend_on_the_mode(run):
    """Return the Forwards of DDP objects with dropout or BatchNorm that are not frozen."""
    return [
        Forwards(each.wrapped, {rank: of_training(calls) for rank, calls in each.of.items()})
        for each in run.forwards()
        if each.wrapped.has_dropout or each.wrapped.has_batch_norm
    ]


def of_training(forwards):
    """Return those of a rank's {number: Forward} in which some parameter needs a gradient."""
    return {number: each for number, each in forwards.items() if not each.is_frozen}


def time_of_the_last_step(rank, wrapped):
    """Return when a Rank took the last step that is noted, in seconds; 0 if there is none.

    The optimizers count that have parameters of the DDP object; if none is known to, all do.
    """
    its_own = [
        of
        for key, of in rank.steps.items()
        if any(name and name.ddp == wrapped.ddp for name in rank.optimizers[key].names)
    ]
    return max(
        (step.time for of in its_own or rank.steps.values() for step in of.values()), default=0
    )


def first_in_eval_mode(forwards):
    """Return a rank's first Forward in eval mode, or None. forwards: {number: Forward}."""
    return next((each for each in forwards.values() if not each.training), None)


@rule("random")
def same_numbers_in_each_step(run):
    """A rank draws the same random numbers in each step: the seed is set again in the loop.

    Looks alike, and is right: nothing is drawn (the generator's state does not move).
    """
    for forwards in run.forwards():
        for rank, of in forwards.of.items():
            states = states_before_draws(of)
            if not states:
                continue
            [(_, count)] = collections.Counter(states.values()).most_common(1)
            if most(count, len(states)):
                yield Found(
                    f"rank {rank} draws the same random numbers in {count} of {len(states)} steps:"
                    " the seed is set again in the loop",
                    "dropout drops the same places",
                    "recipes/randomness.py",
                )


@rule("random", unless={"random"})
def same_numbers_on_ranks(run):
    """Ranks draw the same dropout masks, or the same noise for their batches.

    It is a question: one seed on all ranks weakens dropout, and is no error.

    Looks alike, and is right: nothing is drawn.
    """
    for forwards in run.forwards():
        inside = {rank: states_before_draws(of) for rank, of in forwards.of.items()}
        before = {rank: states_after_draws(of) for rank, of in forwards.of.items()}
        for states, place in (
            (inside, "in their forward passes"),
            (before, "between a batch and its forward pass"),
        ):
            twins = ranks_that_draw_alike(states)
            if twins:
                line = [*forwards.of[twins[0]].values()][-1].line
                yield Question(
                    f"{in_words(twins, run)} draw the same random numbers (dropout, noise) {place}"
                    f" ({line})",
                    "seed by rank after the model is built, unless they must draw alike",
                    "recipes/randomness.py",
                    once="draw alike",
                )


def ranks_that_draw_alike(states):
    """Return the first ranks whose states are alike, at least two, or []. states: {rank: ...}."""
    for rank, mine in states.items():
        twins = [
            other for other, others in states.items() if other >= rank and draw_alike(mine, others)
        ]
        if len(twins) > 1:
            return twins
    return []


def states_before_draws(forwards):
    """Return {number: Forward.random_state} of those in train mode that have drawn numbers."""
    return {
        number: each.random_state
        for number, each in forwards.items()
        if each.drew and each.training
    }


def states_after_draws(forwards):
    """Return {number: Forward.random_state} of those before which the script has drawn numbers."""
    return {
        number: each.random_state
        for number, each in forwards.items()
        if each.drew_since_batch and each.training
    }


def draw_alike(mine, others):
    """Return whether most of one rank's states are those of another in the same forward."""
    same = sum(others.get(number) == state for number, state in mine.items())
    return most(same, len(mine))
