"""Which graphs of autograd are held long after their backward pass: total += loss keeps them all.

A mark hangs on a node of a graph, and goes with it. Here is a weak reference to the mark.
"""

import weakref
from dataclasses import dataclass, field

from .counters import counters
from .fingerprints import looked_at
from .state import kept

MARK = "check_training"  # in a node's metadata, where anybody may leave a note
DEEP = 3  # nodes from the loss towards the parameters: an output of the model may be kept, too
MOST = 300  # backward passes whose graphs are marked, where looked_at() chooses them
AGE = 100  # backward passes after which a graph should be gone


class Mark:
    """What hangs on a node."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Graph:
    """The graph of a backward pass."""

    number: int  # of the backward pass
    mark: weakref.ref


@dataclass
class Graphs:
    """The graphs that were marked, without those that are known to be gone."""

    marked: list[Graph] = field(default_factory=list)


state = kept(Graphs())


def mark(root):
    """Mark the graph of a backward pass that begins. root: a tensor, or None."""
    number = counters.backwards
    if root is None or root.grad_fn is None or number >= MOST or not looked_at(number):
        return
    node = root.grad_fn
    for _ in range(DEEP):
        following = node.next_functions[0][0] if node.next_functions else None
        if following is None or hasattr(following, "variable"):  # that node is a parameter's
            break
        node = following
    note = Mark()
    node.metadata[MARK] = note
    state.marked.append(Graph(number, weakref.ref(note)))


def held():
    """Return Step.graphs_held."""
    state.marked = [each for each in state.marked if each.mark() is not None]
    return sum(counters.backwards - each.number > AGE for each in state.marked)
