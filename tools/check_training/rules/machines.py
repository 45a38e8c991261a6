"""What differs by machine: the script's files, the data, and whose disk a file is on."""

from ..findings import Found, Question, rule
from ..machines import by_machine, usual_and_odd
from ..words import differ
from .pages import SILENT


@rule("script")
def script_differs(run):
    """The script, or a file that it has imported, has other content on some machine.

    Looks alike, and is right: ranks that run scripts of other names. A file that is not the script
    itself may be made for each machine, such as a config: it is a question.
    """
    if differ(rank.script for rank in run.ranks.values()):
        return
    names = {name for rank in run.ranks.values() for name in rank.sources}
    script = run.first.script
    for name in sorted(names, key=lambda name: (name != script, name)):
        bits = {
            number: rank.sources[name] for number, rank in run.ranks.items() if name in rank.sources
        }
        figures = figure_of_each_machine(run, bits)
        if not figures:
            continue
        usual, odd = usual_and_odd(figures)
        kind = Found if name == script else Question
        what = "the script" if name == script else "a file of the script"
        yield kind(
            f"{what} differs on {' and '.join(odd)}: {name} has other content than on {usual}",
            "each line that is named here may be another one there: copy one version to all"
            " machines",
            SILENT,
            once="script",
        )


def figure_of_each_machine(run, figures):
    """Return {machine: the figure of its ranks} if that differs by machine alone; else {}.

    figures: {rank: figure}. Ranks of one machine must agree: else it is no matter of machines.
    """
    machines = by_machine(run, figures)
    if len(machines) < 2 or any(differ(each) for each in machines.values()):
        return {}
    one_of_each = {name: each[0] for name, each in machines.items()}
    return one_of_each if differ(one_of_each.values()) else {}


@rule("split")
def data_differ_by_machine(run):
    """A DistributedSampler shares out one set to all ranks, and a machine has another one.

    Looks alike, and is right: a sampler that shares out to the ranks of one machine, and sets that
    differ by rank, too. Where a machine has one rank alone, it is a question: each rank's set may
    be its own.
    """
    for loader in run.training_loaders():
        starts = {rank: passes[0].start for rank, passes in loader.passes.items()}
        if any(start.replicas != run.world_size for start in starts.values()):
            continue
        sets = {
            rank: (start.length, start.contents, start.listed) for rank, start in starts.items()
        }
        figures = figure_of_each_machine(run, sets)
        if not figures:
            continue
        usual, odd = usual_and_odd(figures)
        several = all(len(ranks) > 1 for ranks in by_machine(run, sets).values())
        lengths = [figures[name][0] for name in (odd[0], usual)]
        count = f" ({lengths[0]} items, not {lengths[1]})" if differ(lengths) else ""
        kind = Found if several else Question
        yield kind(
            f"the dataset on {' and '.join(odd)} is not the one on {usual}{count}; a"
            f" DistributedSampler shares it out to all ranks ({loader.line})",
            "items are left out, or come twice: copy one set to all machines",
            SILENT,
            once="sets of machines",
        )
