"""How many items and batches does each rank train on?"""

import statistics

from ..findings import Found, Question, rule
from ..words import differ, most, on_each
from .pages import CLIP


@rule(unless={"calls"})
def batches_differ_in_size(run):
    """The batches of one DDP object differ in size between ranks in most steps.

    Looks alike, and is right: a loss that is weighed by hand (then a small sum over the ranks comes
    in each step), Join, and items of several rows (graphs have nodes).
    """
    if "join" in run.features or items_are_no_rows(run):
        return
    if has_a_sum_in_each_step(run):
        return
    for forwards in run.forwards():
        common = forwards.common
        rows = [
            {rank: each.rows for rank, each in forwards.at(number).items()} for number in common
        ]
        if has_more_rows_than_items(run, rows):
            continue
        uneven = [row for row in rows if differ(row.values())]
        if most(len(uneven), len(common)):
            yield Question(
                f"the ranks' batches differ in size in {len(uneven)} of {len(common)} steps: "
                + on_each(uneven[0]),
                "if its loss is a mean over these rows, weigh the loss: DDP's mean weighs ranks"
                " alike, not rows",
                "pitfalls/mean_of_unequal_shards.py",
            )


def has_a_sum_in_each_step(run):
    """Return whether ranks put few numbers together in most steps, as to weigh their losses."""
    small_sums = [
        step.small_sums
        for steps in run.optimizers()
        for of in steps.of.values()
        for step in of.values()
    ]
    return statistics.median(small_sums or [0]) >= 1


def has_more_rows_than_items(run, rows):
    """Return whether more goes into DDP than a loader's batch has: its rows are moments, say.

    rows: {rank: rows of a call}, for each call.
    """
    sizes = [
        each.progress.rows / each.progress.batches
        for loader in run.training_loaders()
        for each in loader.firsts
        if each.progress.rows and each.progress.rows == each.progress.items
    ]
    largest = [max(count or 0 for count in row.values()) for row in rows]
    return bool(sizes) and most(sum(each > max(sizes) for each in largest), len(largest))


def items_are_no_rows(run):
    """Return whether all ranks draw equally many items for a batch, and an item is not one row."""
    for loader in run.training_loaders():
        firsts = [each.progress for each in loader.firsts]
        if differ(progress.first_items for progress in firsts):
            continue
        if all(progress.items and progress.rows != progress.items for progress in firsts):
            return True
    return False


@rule(unless={"calls"}, asks_if={"models", "weights"})
def passes_differ_in_length(run):
    """The ranks train on other numbers of batches in a pass over a loader.

    Looks alike, and is right: Join, a run that was cut, a difference of one batch or of 2%, one
    endless pass for all epochs, several sets in turn whose sums are alike, and a rank that takes
    its steps on other batches until the others' passes end, too. It is a question where each rank
    trains a model of its own, or where all take as many steps, each going on with its next pass.
    """
    if "join" in run.features or run.cut:
        return
    go_by_steps = not differ(rank.steps_taken for rank in run.ranks.values())
    for loader in run.training_loaders():
        if not len(loader.passes) == len(run.ranks) > 1:
            continue
        if any(each.is_endless for passes in loader.passes.values() for each in passes):
            continue
        counts = {
            rank: [each.progress.backwards for each in passes if each.progress.over]
            for rank, passes in loader.passes.items()
        }
        sums = {rank: sum(row) for rank, row in counts.items()}
        if are_sets_in_turn(loader) and not are_far_apart(sums.values()):
            continue
        if go_by_steps and wait_for_each_other(loader):
            continue
        for number, row in enumerate(zip(*counts.values(), strict=False)):
            if are_far_apart(row):
                kind = Found if run.wrapped and not go_by_steps else Question
                promised = [of[number].start.batches for of in loader.passes.values()]
                why = ""
                if go_by_steps and differ(promised):
                    why = "all take as many steps, so items of a shorter pass come more often"
                elif go_by_steps:
                    why = "all take as many steps: where do the other batches go?"
                yield kind(
                    f"in pass {number + 1} over the loader ({loader.line}) the ranks train on other"
                    f" numbers of batches: {on_each(dict(zip(counts, row, strict=True)))}",
                    why,
                    "pitfalls/uneven_inputs.py",
                    once="passes differ",
                )
                break


def are_far_apart(counts):
    """Return whether numbers of batches differ by more than one, and by more than 2%."""
    return max(counts) - min(counts) > 1 and max(counts) > 1.02 * min(counts)


def are_sets_in_turn(loader):
    """Return whether the passes of a rank are over several sets, as over files one by one."""
    return any(
        differ(each.start.dataset_object for each in passes) for passes in loader.passes.values()
    )


def wait_for_each_other(loader):
    """Return whether no rank begins a next pass before all have ended the same one."""
    rows = list(zip(*loader.passes.values(), strict=False))
    ends = [[each.progress.last_batch for each in row] for row in rows[:-1]]
    begins = [min(each.start.time for each in row) for row in rows[1:]]
    known = [(max(row), begin) for row, begin in zip(ends, begins, strict=True) if None not in row]
    return bool(known) and all(begin > end for end, begin in known)


@rule(unless={"calls"})
def batch_skipped_alone(run):
    """Before some steps, the ranks took different numbers of batches.

    Looks alike, and is right: Join, ranks that differ in most steps (one reads more at once),
    ranks that go through the same batches, of which each takes some, and ranks that tell each other
    in each step whether they have a batch.
    """
    if "join" in run.features or not run.wrapped:
        return
    if all_draw_the_same(run) or has_a_sum_in_each_step(run):
        return
    for steps in run.optimizers():
        common = steps.common
        odd = [n for n in common if differ(step.batches for step in steps.at(n).values())]
        if len(steps.of) < 2 or not 0 < len(odd) < len(common) / 2:
            continue
        if max(common) < 8:
            continue
        row = steps.at(odd[0])
        yield Question(
            f"before step {odd[0] + 1} ({row[min(row)].line}) the ranks took different numbers of"
            f" batches: {on_each({rank: step.batches for rank, step in row.items()})}",
            "a rank that skips a batch alone is a step ahead: gradients of different steps are"
            " averaged",
            CLIP,
        )
        return


def all_draw_the_same(run):
    """Return whether all ranks train on loaders that give all of them the same batches."""
    loaders = run.training_loaders()
    return bool(loaders) and all(
        len(loader.passes) == len(run.ranks)
        and all(loader.batch_bits())
        and not differ(loader.batch_bits())
        for loader in loaders
    )


@rule()
def loader_is_empty(run):
    """A loader yields nothing, and nothing is trained.

    Looks alike, and is right: an evaluation (then some steps are taken), and predictions, of which
    another pass or rank gets some batches, and nobody takes a step.
    """
    everybody = run.ranks.values()
    if not any(rank.steps for rank in everybody) and any(
        each.progress.batches for rank in everybody for each in rank.passes
    ):
        return
    for rank in run.ranks.values():
        for each in rank.passes:
            empty = each.progress.exhausted and each.progress.batches == 0
            if empty and not rank.steps:
                yield Found(
                    f"the loader of {each.start.line} yields no batch: nothing is trained",
                    f"{each.start.length} items, drop_last: {each.start.drop_last}",
                )
