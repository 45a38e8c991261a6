"""Are the ranks' models alike, with their buffers and learning rates?"""

from ..findings import Found, Question, rule
from ..records.model import Buffers, Wrapped
from ..records.optimizer import Plateau
from ..records.process import JoinBegun
from ..words import differ, most, on_each
from .apart import steps_of_each_model
from .pages import AGREE, CLIP, SILENT


@rule("models")
def models_are_not_alike(run):
    """DDP pairs parameters by their order, and the ranks' models have other names or another order.

    Looks alike, and is right: stages of a pipeline, which are in other groups.
    """
    for number, wrapped in run.wrapped.items():
        members = run.members(wrapped)
        made = [
            each
            for rank in members
            for each in run.ranks[rank].records(Wrapped)
            if each.ddp == number
        ]
        if differ(each.names for each in made) and not differ(each.group for each in made):
            yield Found(
                f"the ranks' models are not alike ({wrapped.line}): DDP pairs parameters by their"
                " order, and the names differ",
                "sort what the layers are made from",
                SILENT,
            )


@rule()
def group_of_one(run):
    """A DDP object averages in a group of one rank.

    Looks alike, and is right: models that are split over the ranks.
    """
    if run.features & {"shards", "to_one"} or run.world_size == 1:
        return
    for wrapped in run.wrapped.values():
        if len(wrapped.group) == 1:
            yield Question(
                f"DDP() of {wrapped.line} is given a group of one rank: it averages with nobody"
            )


@rule()
def own_batch_norm(run):
    """DDP broadcasts no buffers: each rank's BatchNorm keeps means of its own.

    Looks alike, and is right: the script averages them before each evaluation, or the means are
    frozen.
    """
    for place, wrapped in enumerate(run.wrapped.values()):
        if evaluate_with_equal_means(run, place) or means_stay_equal(run, wrapped):
            continue
        own = wrapped.has_batch_norm and not wrapped.sends_buffers
        if own and len(wrapped.group) > 1:
            yield Question(
                f"DDP() of {wrapped.line} sends no buffers before a forward: each rank's BatchNorm"
                " has means of its own",
                "are they averaged before each evaluation and save? Else take SyncBatchNorm",
                "pitfalls/small_batch_norm.py",
            )


def means_stay_equal(run, wrapped):
    """Return whether BatchNorm's means were compared in the ninth step, and are equal: frozen."""
    noted = [buffers.means for buffers in buffers_of(run, wrapped)]
    return len(noted) == len(run.members(wrapped)) and all(noted) and not differ(noted)


def buffers_of(run, wrapped):
    """Return the Buffers of a DDP object, of all ranks that have noted them."""
    return [
        each
        for rank in run.members(wrapped)
        for each in run.ranks[rank].records(Buffers)
        if each.ddp == wrapped.ddp
    ]


def evaluate_with_equal_means(run, place):
    """Return whether the ranks' BatchNorms have equal means in all evaluations of all ranks.

    place: of the DDP object among those that were made.
    """
    rows = [
        [each.progress.modes_after[place : place + 1] for each in row]
        for loader in run.evaluation_loaders()
        if len(loader.passes) == len(run.ranks)
        for row in zip(*loader.passes.values(), strict=False)
    ]
    norms = [[mode.norms for modes in row for mode in modes] for row in rows]
    return bool(norms) and all(
        len(row) == len(run.ranks) and all(row) and not differ(row) for row in norms
    )


@rule(unless={"models"})
def buffers_differ(run):
    """Buffers other than BatchNorm's differ between the ranks in the ninth step.

    Codebooks, queues and running figures are such buffers. It is a question: a rank may have some
    of its own, such as a cache or its number.
    """
    for wrapped in run.wrapped.values():
        noted = [buffers.bits for buffers in buffers_of(run, wrapped)]
        names = noted[0] if noted else []
        odd = [name for name in names if differ(bits.get(name) for bits in noted)]
        if not odd:
            continue
        why = "each rank fills its own"
        if wrapped.sends_buffers:
            why += (
                "; DDP sends rank 0's before each forward, and the others' are lost, but it sends"
                " no buffer that forward() has replaced"
            )
        yield Question(
            f"buffers of the model ({wrapped.line}) differ between the ranks in step 9:"
            f" {', '.join(odd[:3])}",
            why,
            SILENT,
        )


@rule("rates")
def rates_differ(run):
    """The learning rates of one optimizer differ by rank at the same step.

    Looks alike, and is right: stages of a split model, whose optimizers have other parameters; the
    n-th step of ranks that are in different epochs by then, where they do not exchange it.
    """
    for steps in optimizers_of_one_model(run):
        text = first_difference(run, steps, "rates")
        if text:
            yield Found(
                f"the learning rates differ {text}",
                "step a schedule on all ranks, by figures that they share: all_reduce the loss",
                AGREE,
            )
            return
    yield from rates_differ_by_join(run)


def rates_differ_by_join(run):
    """Yield what is found if the rates differ by rank where torch's Join begins anew.

    All ranks enter it together, though they have taken other numbers of steps by then.
    """
    if run.may_split_the_model:
        return
    rounds = [*zip(*run.records_by_rank(JoinBegun).values(), strict=False)]
    for steps in optimizers_of_one_model(run):
        for number, row in enumerate(rounds):
            rates = {
                rank: begun.rates.get(steps.optimizer)
                for rank, begun in zip(run.ranks, row, strict=True)
            }
            if None not in rates.values() and differ(rates.values()):
                figures = {rank: figures_in_words(mine) for rank, mine in sorted(rates.items())}
                yield Found(
                    f"the learning rates differ when round {number + 1} of Join begins"
                    f" ({row[0].line}): {on_each(figures)}",
                    "a rank that runs out of batches steps its schedule less often: step it once in"
                    " an epoch",
                    "pitfalls/uneven_inputs.py",
                )
                return


def figures_in_words(figures):
    """Return "0.1, 0.02"."""
    return ", ".join(f"{figure:.3g}" for figure in figures)


@rule()
def scales_differ(run):
    """The scales of GradScaler differ by rank at the same step.

    Looks alike, and is right: as for the rates.
    """
    for steps in optimizers_of_one_model(run):
        text = first_difference(run, steps, "scales")
        if text:
            yield Found(
                f"the scales of GradScaler differ {text}",
                "one rank skips steps that others take",
                CLIP,
            )
            return


def optimizers_of_one_model(run):
    """Return the Steps of the optimizers that have the same parameters of DDP on all ranks."""
    found = []
    for steps in steps_of_each_model(run):
        notes = [run.ranks[rank].optimizers[steps.optimizer] for rank in steps.of]
        alike = not differ((note.shapes, note.names) for note in notes)
        if any(notes[0].names) and alike:
            found.append(steps)
    return found


def rates_of_ddp(note, rates):
    """Return those of an Optimizer's rates by which parameters of DDP objects are trained.

    A group without any may be the rank's own, with a rate of its own.
    """
    if len(note.sizes) != len(rates) or sum(note.sizes) != len(note.names):
        return rates
    kept, begin = [], 0
    for size, rate in zip(note.sizes, rates, strict=True):
        if any(note.names[begin : begin + size]):
            kept.append(rate)
        begin += size
    return kept


def first_difference(run, steps, what):
    """Return "from step 3 on (train.py:42): 0.1 on rank 0, 0.2 on rank 1", or "" if all are equal.

    what: "rates" or "scales", a list of figures in each Step.
    """
    for number in run.same_steps(steps):
        row = steps.at(number)
        figures = {rank: getattr(step, what) for rank, step in row.items()}
        if what == "rates":
            notes = {rank: run.ranks[rank].optimizers[steps.optimizer] for rank in row}
            figures = {rank: rates_of_ddp(notes[rank], mine) for rank, mine in figures.items()}
        if differ(figures.values()):
            line = row[min(row)].line
            texts = [
                f"{figures_in_words(mine)} on rank {rank}"
                for rank, mine in sorted(figures.items())[:4]
            ]
            return f"from step {number + 1} on ({line}): {'; '.join(texts)}"
    return ""


@rule(unless={"rates"})
def plateau_by_own_figures(run):
    """ReduceLROnPlateau is given another figure on each rank: the rates will come apart."""
    if not run.wrapped or run.may_split_the_model:
        return
    calls = run.records_by_rank(Plateau)
    rows = [[each.value for each in row] for row in zip(*calls.values(), strict=False)]
    far = [row for row in rows if max(row) - min(row) > 1e-3 * max(map(abs, row))]
    if most(len(far), len(rows), least=2):
        figures = {rank: f"{value:.4g}" for rank, value in zip(run.ranks, far[0], strict=True)}
        yield Question(
            f"ReduceLROnPlateau ({run.records(Plateau)[0].line}) is given another figure on each"
            f" rank: {on_each(figures)}",
            "it will lower the rate on some ranks before others: all_reduce the figure before",
            AGREE,
        )
