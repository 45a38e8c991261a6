"""Parameters that no gradient reaches, and graphs that nobody lets go."""

from ..findings import Question, rule
from ..words import differ, in_words
from .pages import SILENT

LEAST = 20  # steps that have to be looked at
COUNTED = 20  # graphs that are held long after their backward pass


@rule(unless={"unowned"})
def parameters_without_gradient(run):
    """Some of an optimizer's parameters need a gradient, and never have one that is not 0.

    On all ranks that hold them. It is a question: experts, heads or networks whose turn comes later
    look alike. Left out are frozen parameters, shards, and steps before the rate has risen from 0,
    in which a layer behind zeros (LoRA's, for one) has no gradient.
    """
    if "shards" in run.features:
        return
    for steps in run.optimizers():
        ranks = {rank: run.ranks[rank].optimizers[steps.optimizer] for rank in steps.of}
        alike = not differ((each.shapes, each.names) for each in ranks.values())
        groups = [[*ranks]] if alike else [[rank] for rank in ranks]
        for group in groups:
            looked_at, places = never_reached(steps, group)
            optimizer = ranks[group[0]]
            if looked_at < LEAST or not places:
                continue
            if len(places) < len(optimizer.shapes):  # else no_gradient_at_all says it
                yield said_of(run, optimizer, places, looked_at, ranks=group)
                break


def never_reached(steps, ranks):
    """Return (the fewest steps that were looked at on a rank, the places without a gradient)."""
    fewest, found = [], []
    for rank in ranks:
        trained = trained_steps(steps.of[rank])
        fewest.append(len(trained))
        found += [set(step.bare) for step in trained]
    return min(fewest), sorted(set.intersection(*found)) if found else []


def trained_steps(numbers):
    """Return the Step records with gradients of a backward pass, once a step had rates above 0.

    numbers: {number: Step}.
    """
    steps, rises = [], False
    for step in numbers.values():
        lost = step.cleared_after or not step.backwards
        if rises and not lost:
            steps.append(step)
        rises = rises or all(step.rates)
    return steps


def said_of(run, optimizer, places, count, ranks):
    """Return the Question for an Optimizer's parameters at some places."""
    names = [optimizer.names[place] for place in places]
    shown = [
        name.name if name else f"number {place + 1}"
        for name, place in zip(names, places, strict=True)
    ]
    text = ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")
    return Question(
        f"{len(places)} of {len(optimizer.shapes)} parameters ({text}) of the optimizer of"
        f" {optimizer.line} have no gradient, or one of zeros, in all {count} steps that were"
        f" looked at ({in_words(ranks, run)})",
        "does their turn come later? Else the loss does not reach them: a detach(), a part that"
        " forward leaves out, or a checkpoint (use_reentrant=True) whose input needs no gradient",
        SILENT,
        once=f"unreached {optimizer.line}",
    )


@rule()
def graphs_are_held(run):
    """The graphs of many backward passes are held, a hundred passes later.

    Or, in a shorter run, those of all passes. It is a question: what holds them is not seen. Looks
    alike, and is right: sums that are set back earlier, backpropagation through some steps, the
    last so many losses, caches of loaders, lists of numbers.
    """
    for rank in run.ranks.values():
        for steps in rank.steps.values():
            many = [step for step in steps.values() if step.graphs_held >= COUNTED]
            last = [*steps.values()][-3:]
            if len(many) > 2:
                step = many[-1]
                which = (
                    f"graphs of {step.graphs_held} of the backward passes that were looked at, made"
                    " more than 100 passes before"
                )
            elif all(each.graphs_since_start >= COUNTED for each in last):
                step, which = last[-1], "graph of each backward pass that was looked at"
            else:
                continue
            yield Question(
                f"before step {step.number + 1}, autograd still holds the {which}"
                f" ({step.backward_line})",
                "memory grows in each step: is a loss added up (total += loss), or an output"
                " kept in a list? Take loss.item(), or .detach()",
                "pitfalls/README.md#it-costs-too-much",
                once="graphs",
            )
