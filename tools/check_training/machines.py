"""The machines of a run, by the names that the user knows, and who runs on which."""

import collections
import re
from dataclasses import replace

from .words import in_words

ONE_RANK = re.compile(r"\brank (\d+)\b(?! \()")
RANKS = re.compile(r"\branks (\d+(?:(?:, | and | to )\d+)*)(?! \()")


def names_of(ranks):
    """Return {key of a machine: its name} of a list of Rank.

    The name is the host's, without its domain. Where machines have the same one, as containers may,
    it is their number and their address: "machine 0 (10.0.0.1)".
    """
    firsts = {}  # {key: the Rank with the lowest number there}
    for rank in sorted(ranks, key=lambda rank: rank.number):
        firsts.setdefault(rank.machine.key, rank)
    whole = collections.Counter(rank.host for rank in firsts.values())
    short = collections.Counter(_short(rank.host) for rank in firsts.values())
    nodes = [rank.machine.node for rank in firsts.values()]
    numbered = None not in nodes and len({*nodes}) == len(nodes)
    names = {}
    for place, (key, rank) in enumerate(firsts.items()):
        if short[_short(rank.host)] == 1:
            names[key] = _short(rank.host)
        elif whole[rank.host] == 1:
            names[key] = rank.host
        else:
            number = rank.machine.node if numbered else place
            address = rank.machine.address
            names[key] = f"machine {number}" + (f" ({address})" if address else "")
    return names


def _short(host):
    return host.partition(".")[0]


def by_machine(run, figures):
    """Return {name of a machine: [figure of each of its ranks]}. figures: {rank: figure}."""
    found = collections.defaultdict(list)
    for rank, figure in sorted(figures.items()):
        found[run.machine_of(rank)].append(figure)
    return found


def usual_and_odd(figures):
    """Return (the machine that has what most have, the machines that have another figure).

    figures: {name of a machine: figure}. If no figure is more frequent, the first machine's counts.
    """
    counts = collections.Counter(repr(figure) for figure in figures.values())
    usual, _ = counts.most_common(1)[0]  # of equally frequent ones, the first that came
    odd = [name for name, figure in figures.items() if repr(figure) != usual]
    return next(name for name in figures if name not in odd), odd


def with_names(finding, run):
    """Return a Finding that names the machines of its ranks, if the run has several."""
    what = in_text(finding.what, run)
    return replace(finding, what=what, once=finding.once or finding.what)


def in_text(text, run):
    """Return a text with the machine behind each rank, "rank 6 (node2)", if the run has several."""
    if len(run.machines) < 2:
        return text

    def of_one(found):
        return f"{found[0]}{_in_brackets(run, [int(found[1])])}"

    def of_several(found):
        ranks = _numbers_in(found[1])
        return f"{found[0]}{_in_brackets(run, ranks)}"

    return RANKS.sub(of_several, ONE_RANK.sub(of_one, text))


def _numbers_in(text):
    """Return the numbers of "0, 1 and 3", or of "0 to 5"."""
    first, _, last = text.partition(" to ")
    if last:
        return [*range(int(first), int(last) + 1)]
    return [int(number) for number in re.findall(r"\d+", text)]


def _in_brackets(run, ranks):
    """Return " (node2)" if all these ranks run there; "" if they run on several machines.

    Of a name with an address, " (machine 0, 10.0.0.1)".
    """
    names = {run.machine_of(rank) for rank in ranks if rank in run.ranks}
    if len(names) != 1:
        return ""
    return f" ({names.pop().replace(' (', ', ').rstrip(')')})"


def lines_of(run):
    """Yield the line that says which ranks run on which machine, if there are several."""
    if len(run.machines) > 1:
        parts = [
            f"{name}: {in_words(ranks)}"
            for name, ranks in by_machine(run, {rank: rank for rank in run.ranks}).items()
        ]
        yield f"machines: {'; '.join(parts)}"
