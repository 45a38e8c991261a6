"""By which norm are the gradients clipped?"""

import itertools
import math
from dataclasses import dataclass

from ..findings import Question, rule
from ..records.optimizer import Clip
from ..records.process import Call
from ..words import differ, most, on_each
from .apart import places_that_differ, steps_of_each_model, wrapper_of
from .pages import CLIP

LEAST = 4  # steps in which a rank's gradients are cut
ROUNDING = 1e-3  # norms that differ less, as parts of the larger one, are equal


@dataclass(slots=True)
class ClippedApart:
    """A call of clip_grad_norm_(), for which the ranks had gradients of their own."""

    step: int  # number of the step before which it was called
    line: str
    norms: dict[int, float]  # {rank: the norm that it has found}


@rule(unless={"weights"})
def clips_before_the_exchange(run):
    """Each rank clips by a norm of its own, and the gradients are exchanged after that.

    The norms differ, and the gradients with which the step is taken are equal. Looks alike, and is
    right: a norm that is only printed (nothing is cut), parameters of each rank's own (their
    gradients stay apart), split models. It is a question: each rank's part may be clipped on
    purpose.
    """
    if run.may_split_the_model or "join" in run.features:
        return
    for steps in steps_of_each_model(run):
        first = run.ranks[min(steps.of)]
        wrapped = wrapper_of(first, first.optimizers[steps.optimizer])
        members = run.members(wrapped) if wrapped else [*run.ranks]
        steps = steps.only([rank for rank in members if rank in steps.of])
        if len(steps.of) < 2:
            continue
        cut, apart = calls_before_steps(run, steps)
        if most(len(apart), cut, least=LEAST):
            first = apart[0]
            norms = {rank: f"{norm:.3g}" for rank, norm in sorted(first.norms.items())}
            yield Question(
                f"each rank clips by a norm of its own at {first.line} (before step"
                f" {first.step + 1}: {on_each(norms)}), and the gradients are exchanged after that",
                "the norm of all ranks' gradients is not clipped: call it once, right before"
                " step(), when the gradients are exchanged, unless it clips those of inner steps",
                CLIP,
                once=f"clips {first.line}",
            )


def calls_before_steps(run, steps):
    """Return (in how many steps a rank's gradients are cut, a ClippedApart of each with such).

    steps: a Steps. The calls of a step are known if the step before is noted, too, or if each step
    so far has had one call.
    """
    cut, apart = 0, []
    clips = {
        rank: [
            clip
            for clip in run.ranks[rank].records(Clip)
            if clip.optimizer == steps.optimizer and clip.norm is not None and clip.most
        ]
        for rank in steps.of
    }
    numbers = run.same_steps(steps)
    for before, number in itertools.pairwise(numbers):
        row, earlier = steps.at(number), steps.at(before)
        between = {
            rank: {
                clip.number: clip
                for clip in clips[rank]
                if earlier[rank].time < clip.time <= row[rank].time
            }
            for rank in row
        }
        called = [*between.values()]
        if not called[0] or differ(map(sorted, called)):
            continue
        if number != before + 1 and [*called[0]] != [number]:
            continue
        if not any(clip.norm > clip.most for mine in called for clip in mine.values()):
            continue
        cut += 1
        if places_that_differ([*row.values()], "gradients"):
            continue
        for place in called[0]:
            calls = {rank: mine[place] for rank, mine in between.items()}
            if is_cut_apart([*calls.values()]):
                norms = {rank: clip.norm for rank, clip in calls.items()}
                apart.append(ClippedApart(number, called[0][place].line, norms))
                break
    return cut, apart


def is_cut_apart(clips):
    """Return whether the norms differ by more than rounding, and one is above what is allowed."""
    norms = [clip.norm for clip in clips]
    differ_much = max(norms) - min(norms) > ROUNDING * max(norms)
    return differ_much and any(clip.norm > clip.most for clip in clips)


@rule(unless={"weights"})
def clips_by_hand_before_the_exchange(run):
    """What each rank gives to an exchange by hand has one norm, in most steps and on all ranks.

    Other batches have other gradients, so each rank has scaled its own. Looks alike, and is right:
    gradients as they are; signs; tensors that are no gradients (all of a step have as many numbers
    as the parameters). It is a question: ranks may scale theirs on purpose. What PyTorch's
    functions clip, clips_before_the_exchange knows.
    """
    if run.may_split_the_model or run.records(Clip):
        return
    for steps in run.optimizers():
        first = run.ranks[min(steps.of)]
        if wrapper_of(first, first.optimizers[steps.optimizer]):
            continue
        given = {rank: norms_given(run.ranks[rank], of) for rank, of in steps.of.items()}
        norms = [norm for mine in given.values() for norm in mine]
        largest = max(norms, default=0)
        cut = [norm for norm in norms if norm > (1 - ROUNDING) * largest]
        few = min(map(len, given.values())) < 8 or len(given) < 2
        if few or not most(len(cut), len(norms)):
            continue
        yield Question(
            f"before most steps, each rank gives gradients of the norm {largest:.3g} to the"
            f" exchange, whatever its batch is ({run.first.steps[steps.optimizer][0].line}): does"
            " each clip by a norm of its own?",
            "the norm of all ranks' gradients is not clipped: clip once, when the gradients are"
            " exchanged",
            CLIP,
        )


def norms_given(rank, steps):
    """Return the norm of all gradients that a rank gives to all_reduce, for each step.

    rank: a Rank. steps: {number: Step}, of an optimizer. Steps count of which the one before is
    noted, and whose calls have as many numbers as the parameters.
    """
    shapes = rank.optimizers[next(iter(steps.values())).optimizer].shapes
    calls = [call for call in rank.records(Call) if call.norm_given is not None]
    norms = []
    for number, step in steps.items():
        if number - 1 not in steps:
            continue
        numbers = sum(
            math.prod(shape)
            for shape, gradient in zip(shapes, step.gradients, strict=False)
            if gradient is not None
        )
        between = [call for call in calls if steps[number - 1].time < call.time <= step.time]
        if sum(call.elements for call in between) == numbers:
            norms.append(math.hypot(*[call.norm_given for call in between]))
    return norms
