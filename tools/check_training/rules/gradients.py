"""What a step finds in .grad, and what is done to it before."""

import collections
import itertools
import json
import math
from dataclasses import dataclass

from ..findings import Found, Question, rule
from ..records.model import Forward, Stray
from ..records.optimizer import Clip, Optimizer, Step, ThrownAway
from ..records.process import Call
from ..runs import Rank
from ..words import differ, in_words, most
from .pages import CLIP, SILENT


@dataclass(slots=True)
class OwnSteps:
    """The steps that one rank takes with one optimizer."""

    rank: Rank
    optimizer: Optimizer
    steps: list[Step]
    where: str  # "(train.py:42, all ranks)": the line of the first, and who takes such steps


def steps_of_each_rank(run):
    """Return the OwnSteps of all ranks and optimizers."""
    found = []
    for rank in run.ranks.values():
        for key, numbers in rank.steps.items():
            steps = [*numbers.values()]
            ranks = [number for number, other in run.ranks.items() if key in other.steps]
            where = f"({steps[0].line}, {in_words(ranks, run)})"
            found.append(OwnSteps(rank, rank.optimizers[key], steps, where))
    return found


@rule("stale")
def never_cleared(run):
    """Gradients are never cleared: each step adds to all before it.

    Looks alike, and is right: accumulation over several backward passes; gradients that the script
    sets by hand, and overwrites.
    """
    for own in steps_of_each_rank(run):
        later = own.steps[1:]
        if most(sum(step.stale for step in later), len(later)):
            yield Found(
                f"gradients are never cleared {own.where}: each step adds to all before it",
                "call optimizer.zero_grad() once a step",
                once="stale",
            )


@rule()
def cleared_too_late(run):
    """Gradients are cleared between backward() and step(), so the step does nothing.

    Looks alike, and is right: an optimizer that takes them from elsewhere (main_grad): then the
    weights change.
    """
    for own in steps_of_each_rank(run):
        if are_cleared_too_late(own) and not weights_move(own):
            yield Found(
                f"gradients are cleared between backward() and step() {own.where}: the step does"
                " nothing",
                "call zero_grad() before backward()",
            )


@rule(unless={"stale"})
def mixed_with_another_loss(run):
    """An optimizer finds gradients of the backward pass from which another one took a step, too.

    Looks alike, and is right: GANs, which call zero_grad() before backward(), not after step(); an
    optimizer that takes a step more rarely than the other.
    """
    for own in steps_of_each_rank(run):
        if most(sum(step.mixed for step in own.steps), len(own.steps)):
            yield Question(
                f"the optimizer of {own.optimizer.line} finds gradients of two backward passes"
                f" {own.where}: with those of the first, another one took its step",
                "are both losses meant? Else call zero_grad() right before backward(), or"
                " requires_grad_(False) on the other's parameters",
                SILENT,
                once="mixed",
            )


def are_cleared_too_late(own):
    """Return whether most of the OwnSteps found nothing, as zero_grad() came after backward()."""
    late = [
        step
        for step in own.steps
        if step.cleared_after
        and step.backwards
        and not any(each and each.norm for each in step.gradients)
    ]
    return most(len(late), len(own.steps))


@rule("copies")
def made_of_copies(run):
    """The optimizer has weights that FSDP2 had gathered for a forward pass: it never changes them.

    Looks alike, and is right: an optimizer that is made anew before the first step; parameters
    that fully_shard() was told to ignore.
    """
    for own in steps_of_each_rank(run):
        copies, count = own.optimizer.gathered or [], len(own.optimizer.shapes)
        bare = [step for step in own.steps if step.without_gradient >= len(copies)]
        if copies and most(len(bare), len(own.steps)):
            yield Found(
                f"{len(copies)} of the optimizer's {count} parameters ({', '.join(copies[:3])};"
                f" {own.optimizer.line}) are copies, which FSDP2 had gathered for a forward pass:"
                " they stay as they are",
                "make the optimizer before the first forward pass, or call model.reshard() before",
                SILENT,
                once=f"copies {own.optimizer.optimizer}",
            )


@rule(unless={"copies"})
def no_gradient_at_all(run):
    """None of the optimizer's parameters ever has a gradient: it is not the model that is trained.

    Looks alike, and is right: networks that wait for their turn (a GAN's), shards. It is a question
    beside other optimizers, and in a run that was cut: the turn of a module's parameters may come.
    """
    if "shards" in run.features:
        return
    for own in steps_of_each_rank(run):
        bare = steps_without_gradients(own)
        after_backward = [step for step in own.steps if step.backwards]
        if len(bare) < max(8, len(after_backward)) or are_cleared_too_late(own):
            continue
        if weights_move(own):
            continue
        fact = (
            f"none of the optimizer's {len(own.optimizer.shapes)} parameters"
            f" ({own.optimizer.line}) ever has a gradient"
        )
        cure = "make the optimizer from the parameters of the model that you call"
        if own.optimizer.is_flat:
            yield Found(
                f"{fact}: the model's weights are parts of them, but its gradients no longer are",
                "zero_grad(set_to_none=False) keeps the gradients where they are",
            )
        elif own.optimizer.of_modules and may_wait_for_its_turn(run, own.rank):
            yield Question(f"{fact} in this run", f"unless its turn comes later, {cure}")
        else:
            yield Found(f"{fact}: it is not the model that is trained", cure)


def may_wait_for_its_turn(run, rank):
    """Return whether an optimizer of a Rank without gradients may get some later."""
    return run.cut or len(rank.steps) > 1


def weights_move(own):
    """Return whether the weights have changed between the first and the last of the OwnSteps."""
    ends = [own.steps[0].weights, own.steps[-1].weights]
    return differ([each and each.bits for each in weights] for weights in ends)


def steps_without_gradients(own):
    """Return those of the OwnSteps before which there was a backward(), and no gradient."""
    count = len(own.optimizer.shapes)
    return [step for step in own.steps if step.backwards and step.without_gradient == count]


@rule(unless={"models", "weights", "stale"})
def not_finite(run):
    """A step is taken with gradients that are nan or inf, and the weights are so after it.

    Looks alike, and is right: GradScaler leaves out such a step by itself, and so do optimizers: a
    fused one within its step(), others by a test of their own.
    """
    for own in steps_of_each_rank(run):
        for step, later in itertools.pairwise(own.steps):
            weights_are_lost = is_broken(later.weights) and not is_broken(step.weights)
            if weights_are_lost and is_broken(step.gradients):
                yield Found(
                    f"from step {step.number + 1} on, gradients are nan or inf, and the step is"
                    f" taken {own.where}",
                    "the weights are lost from there on",
                    CLIP,
                    once="nan",
                )
                break


def is_broken(prints):
    """Return whether a value of these tensors is nan or inf. prints: of each, a Print or None."""
    return any(each is not None and not math.isfinite(each.norm) for each in prints)


@rule("unowned")
def parameters_in_no_optimizer(run):
    """Parameters have gradients and are in no optimizer, so they stay as they are.

    Looks alike, and is right: the first steps, before a second optimizer is made; parameters that
    another rank's optimizer has, which sends them to all; parameters that change all the same, as
    copies of those that the optimizer has in another precision.
    """
    of_all = steps_of_each_rank(run)
    of_ranks = collections.defaultdict(set)  # {rank: names that are in no optimizer there}
    for own in of_all:
        of_ranks[own.rank.number] |= {*outside_in_most_steps(own)}
    nowhere = set.intersection(*of_ranks.values()) if of_ranks else set()
    for own in of_all:
        outside = [name for name in outside_in_most_steps(own) if name in nowhere]
        if outside and not steps_without_gradients(own):
            kind, doubt = Found, ""
            if run.cut:
                kind, doubt = Question, ", unless their turn comes later"
            yield kind(
                f"{len(outside)} trained parameters are in no optimizer, and stay as they are:"
                f" {', '.join(outside[:3])}",
                f"the optimizer was made at {own.optimizer.line}{doubt}",
            )


def outside_in_most_steps(own):
    """Return the names of the trained parameters that no optimizer of the rank has, in OwnSteps.

    Those that change, or that another optimizer gets later, are left out.
    """
    later = [step for step in own.steps if step.number > 2]
    outside = [step.outside for step in later if step.outside]
    if not most(len(outside), len(later), least=4):
        return []
    owned = {
        name.name for each in own.rank.records(Optimizer) for name in each.names if name is not None
    }
    moved = own.steps[-1].outside_moved
    return [name for name in outside[0] if name not in owned and name not in moved]


@rule("unowned")
def layers_of_no_model(run):
    """Parameters get gradients, and belong to no DDP object and no optimizer: a list of layers.

    It is a question: a part that is to stay as it is may get gradients, which nobody uses. Looks
    alike, and is right: parameters whose values change by other means (shards that are gathered).
    """
    if "shards" in run.features:
        return
    for rank in run.ranks.values():
        strays = rank.records(Stray)
        if strays:
            names = ", ".join(stray.name for stray in strays[:3])
            yield Question(
                f"{len(strays)} parameters ({names}; made at {strays[0].line}) get gradients, and"
                " are in no optimizer and no DDP object",
                "layers in a plain list are not the model's: nn.ModuleList; if they are to stay as"
                " they are, requires_grad_(False)",
                SILENT,
                once="strays",
            )


@rule()
def exchanged_several_times(run):
    """Accumulated gradients are exchanged in each backward(), and the last time would do.

    Looks alike, and is right: GANs and other models with several optimizers or DDP objects,
    no_sync(), gradients that were used and cleared before the next backward(), as by an optimizer
    of two passes.
    """
    if not run.wrapped:
        return
    for own in steps_of_each_rank(run):
        called = {each.ddp for each in own.rank.records(Forward) if each.gradients}
        if len(own.rank.steps) > 1 or len(called) > 1 or leaves_out_exchanges(own.rank):
            continue
        accumulate = [step for step in own.steps if step.backwards > 1 and not step.cleared_after]
        exchanged = [step for step in accumulate if step.exchanged]
        several = [step.backwards for step in exchanged if step.forwards == step.backwards]
        if most(len(several), len(own.steps)) and not differ(several):
            yield Question(
                f"gradients are exchanged {several[0]} times for one step {own.where}",
                "no_sync() around the forward of all but the last saves the others",
                "recipes/accumulate.py",
            )


def leaves_out_exchanges(rank):
    """Return whether a rank has called a DDP object inside no_sync()."""
    return any(each.gradients and not each.exchanges for each in rank.records(Forward))


@rule()
def rest_thrown_away(run):
    """At the end of each epoch, zero_grad() throws away a part of the accumulated gradients.

    Looks alike, and is right: what a warm-up or an outlier has left, at other places.
    """
    for rank in run.ranks.values():
        if len(rank.steps) != 1:
            continue
        [steps] = rank.steps.values()
        backwards = collections.Counter(step.backwards for step in steps.values())
        [(usual, _)] = backwards.most_common(1)
        lost = [
            each
            for each in rank.records(ThrownAway)
            if 0 < each.backwards < usual and each.at_the_end
        ]
        once_an_epoch = 0 < len(lost) <= len(rank.passes)
        if usual > 1 and once_an_epoch:
            yield Question(
                f"at {lost[0].line}, zero_grad() throws away {lost[0].backwards} of {usual}"
                " accumulated backward passes, at the end of each epoch",
                "take a last step with them, or leave these batches out knowingly",
                "recipes/accumulate.py",
            )


@rule()
def clips_scaled_gradients(run):
    """Gradients are clipped that GradScaler still multiplies."""
    for clips in clips_of_each_rank(run):
        if most(sum(clip.scaled for clip in clips), len(clips)):
            yield Found(
                f"clip_grad_norm_ at {clips[0].line} clips gradients that GradScaler still"
                " multiplies: call scaler.unscale_(optimizer) before",
                "",
                CLIP,
            )


@rule()
def clips_nothing(run):
    """Clipping gets no parameter, or none with a gradient.

    Looks alike, and is right: a line that clips several parts, of which some wait for their turn.
    """
    for rank in run.ranks.values():
        of_lines = collections.defaultdict(list)
        for clip in rank.records(Clip) if rank.steps else []:
            of_lines[clip.line].append(clip)
        for line, clips in of_lines.items():
            if len(clips) < 8 or any(clip.parameters for clip in clips):
                continue
            fact = f"clip_grad_norm_ at {line} clips nothing: no gradient is in what it is given"
            why = "another model's parameters, a generator that was read before"
            if may_wait_for_its_turn(run, rank):
                yield Question(f"{fact} in this run", f"{why}, or a part whose turn comes later?")
            else:
                yield Found(f"{fact} ({why})", "", CLIP)


@rule()
def clips_what_is_not_trained(run):
    """Clipping gets parameters that are in no optimizer.

    Looks alike, and is right: a script that takes its steps without an optimizer of torch, and one
    that clips those of an optimizer, too: it may clip the gradient of its inputs.
    """
    for clips in clips_of_each_rank(run):
        outside = sum(clip.parameters > 0 and not clip.in_an_optimizer for clip in clips)
        if len(clips) > 7 and outside == len(clips):
            yield Found(
                f"clip_grad_norm_ at {clips[0].line} clips parameters of no optimizer", "", CLIP
            )


def clips_of_each_rank(run):
    """Return the Clip records of each rank that takes steps, a list for a rank."""
    return [rank.records(Clip) for rank in run.ranks.values() if rank.steps]


@rule()
def summed_again(run):
    """all_reduce of gradients that DDP has averaged already.

    It is a question: it is harmless if they are divided again. Looks alike, and is right: DDP
    averages in a group of some ranks, and the call adds up over others.
    """
    calls = [call for call in run.records(Call) if call.is_gradient]
    ranks = ranks_of(run, calls[0]) if calls else set()
    if len(calls) > 7 and any(ranks <= set(wrapped.group) for wrapped in run.wrapped.values()):
        yield Question(
            f"all_reduce at {calls[0].line} adds up gradients that DDP has averaged",
            f"it sends all twice, and makes them {len(ranks)} times as large unless you divide",
        )


def ranks_of(run, call):
    """Return the ranks of the group in which a Call was made."""
    return set(json.loads(call.group.partition("#")[0])) if call.group else set(run.ranks)
