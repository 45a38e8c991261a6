"""Random numbers of loaders: what makes the items draws them, in the process or in workers."""

from ..findings import Found, Question, rule
from ..words import differ, most
from .pages import RANDOMNESS, SILENT

LEAST_CHANGE = 1e-6  # of the sum over all items: less than that is rounding


@rule(unless={"data"})
def loaders_draw_alike(run):
    """All ranks draw the same random numbers while their loaders make batches.

    What the sampler draws is not looked at: it must be alike. Looks alike, and is right: numbers
    that must be alike for other reasons. So it is asked.
    """
    for loader in loaders_of_all_ranks(run):
        for library in ("torch", "numpy", "random"):
            rows = list(states_before_draws(loader, library).values())
            rows = [row for row in rows if len(row) == len(run.ranks)]
            same = sum(not differ(row) for row in rows)
            if most(same, len(rows), least=4):
                yield Question(
                    "the items of all ranks draw the same random numbers in"
                    f" {same} of {len(rows)} batches ({loader.line}, {library})",
                    "their augmentation is alike: seed by rank, unless they must draw alike",
                    RANDOMNESS,
                    once="items draw alike",
                )


def states_before_draws(loader, library):
    """Return {(number of the pass, of the batch): a list of the ranks' Drawn.state}."""
    found = {}
    for passes in loader.passes.values():
        for number, each in enumerate(passes):
            for drawn in each.progress.drawn:
                if drawn.library == library:
                    found.setdefault((number, drawn.batch), []).append(drawn.state)
    return found


@rule(unless={"data"})
def workers_draw_alike(run):
    """The workers of all ranks have the same seed, and the items change from pass to pass.

    Looks alike, and is right: one seed on all ranks where the items need no random numbers. The
    records show that they do: the sum over all ranks' items is another one in the second pass. It
    is a question: the items may seed themselves.
    """
    for loader in loaders_of_all_ranks(run):
        seeds = [
            [each.start.workers_seed for each in passes[:2]] for passes in loader.passes.values()
        ]
        if any(None in each for each in seeds) or differ(seeds):
            continue
        if items_change(loader):
            yield Question(
                f"the loader's workers have the same seeds on all ranks ({loader.line}), and the"
                " items are others in each pass",
                "their augmentation is alike, unless the items seed themselves: seed by rank",
                RANDOMNESS,
                once="workers draw alike",
            )


@rule()
def workers_keep_the_epoch(run):
    """The epoch of a dataset changes, and the workers that persist have a copy of the dataset.

    It is found where a stream, whose order is made in the workers, gives the same batches in two
    passes; else it is asked: its items may not need the epoch, or its sampler alone. Looks alike,
    and is right: an epoch in memory that the workers share, workers that begin in each pass.
    """
    for loader in run.training_loaders():
        for passes in loader.passes.values():
            behind = [each for each in passes if is_behind(each)]
            if not behind:
                continue
            start = behind[-1].start
            proves_it = (
                start.is_stream and start.reads_epoch is not False and gives_the_same(passes)
            )
            kind = Found if proves_it else Question
            yield kind(
                f"the dataset's epoch is {start.dataset_epoch} ({loader.line}), and the loader's"
                f" workers still have {start.workers_epoch}: with persistent_workers=True, they"
                " keep the copy of the dataset with which they began",
                "if its items depend on the epoch, keep it in memory that all share"
                " (torch.tensor(0).share_memory_()), or leave persistent_workers out",
                SILENT,
                once=f"workers' epoch {loader.line}",
            )


def is_behind(one):
    """Return whether the workers of a LoaderPass have another epoch than its dataset."""
    start = one.start
    known = None not in (start.dataset_epoch, start.workers_epoch)
    return known and start.dataset_epoch != start.workers_epoch


def gives_the_same(passes):
    """Return whether two passes with different epochs gave the same batches, several in each."""
    seen = {}
    for each in passes:
        batches = tuple(each.progress.batch_bits)
        if len({*batches}) > 2:
            seen.setdefault(batches, set()).add(each.start.dataset_epoch)
    return any(len(epochs) > 1 for epochs in seen.values())


def items_change(loader):
    """Return whether the same items had other contents in the second pass of all ranks."""
    sums = []
    for number in (0, 1):
        row = [passes[number].progress for passes in loader.passes.values() if passes[number:]]
        if len(row) < len(loader.passes) or not all(map(is_added_up, row)):
            return False
        counts = sum(each.items for each in row), sum(each.index_sum for each in row)
        sums.append((*counts, sum(each.content for each in row)))
    (*first_items, before), (*second_items, after) = sums
    largest = max(abs(before), 1)
    return first_items == second_items and abs(after - before) > LEAST_CHANGE * largest


def is_added_up(progress):
    """Return whether Progress.content has all items of a whole pass."""
    return progress.exhausted and progress.items > 1 and progress.batches < 300


def loaders_of_all_ranks(run):
    """Return the Loaders over which all ranks train, at least two."""
    return [
        loader
        for loader in run.training_loaders()
        if len(loader.passes) == len(run.ranks) and len(loader.passes) > 1
    ]
