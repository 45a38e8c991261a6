"""Ranks and their figures in words, and how they are compared."""


def in_words(ranks, run=None):
    """Return "rank 1", "ranks 0, 1 and 3", or "ranks 0 to 5" if they are four or more in a row.

    "all ranks" if they are all of a run's ranks.
    """
    ranks = sorted(ranks)
    if run and len(ranks) == len(run.ranks) > 1:
        return "all ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def verb(name, ranks):
    """Return a verb as it stands after in_words(ranks): "calls" for one rank, "call" for more."""
    return f"{name}s" if len(ranks) == 1 else name


def on_each(figures):
    """Return "3 on rank 0, 4 on rank 1" for {rank: figure}, of four ranks at most."""
    return ", ".join(f"{figure} on rank {rank}" for rank, figure in [*figures.items()][:4])


def differ(values):
    """Return whether the values are not all the same. (By their text: a nan is equal to a nan.)"""
    return len({repr(value) for value in values}) > 1


def most(count, total, least=8):
    """Return whether count is more than half of a total that is not less than least."""
    return total >= least and count > total / 2


def of_some_alone(lists):
    """Return the ranks whose list is not empty, if others' are; else [].

    lists: {rank: list}
    """
    if all(lists.values()):
        return []
    return [rank for rank, content in lists.items() if content]
