"""Which graphs of autograd are held long after their backward pass: total += loss keeps them all.

Marks hang on nodes of a graph, and go with them. Here are weak references to the marks.
"""

import collections
import weakref
from dataclasses import dataclass, field

from .counters import counters
from .fingerprints import looked_at
from .state import kept

MARK = "check_training"  # in a node's metadata, where anybody may leave a note
NODES = 64  # that are marked, those near the loss first: an output of the model may be kept, too
MOST = 300  # backward passes whose graphs are marked, where looked_at() chooses them
AGE = 100  # backward passes after which a graph should be gone
SOON = 30  # and after which one of all should be gone


class Mark:
    """What hangs on a node."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Graph:
    """The graph of a backward pass."""

    number: int  # of the backward pass
    marks: list[weakref.ref]

    def is_held(self):
        """Return whether a part of it is still there."""
        return any(mark() is not None for mark in self.marks)


@dataclass
class Graphs:
    """The graphs that were marked, without those that are known to be gone."""

    marked: list[Graph] = field(default_factory=list)
    one_has_gone: bool = False


state = kept(Graphs())


def mark(root):
    """Mark the graph of a backward pass that begins. root: a tensor, or None."""
    number = counters.backwards
    if root is None or root.grad_fn is None or number >= MOST or not looked_at(number):
        return
    marks = []
    for node in _nodes_near(root.grad_fn):
        note = Mark()
        node.metadata[MARK] = note
        marks.append(weakref.ref(note))
    state.marked.append(Graph(number, marks))


def _nodes_near(first):
    """Return a node and those that follow, the nearest first; no parameter's node."""
    found, waiting = {}, collections.deque([first])
    while waiting and len(found) < NODES:
        node = waiting.popleft()
        if node not in found:
            found[node] = None
            following = [each for each, _ in node.next_functions if each is not None]
            waiting.extend(each for each in following if not hasattr(each, "variable"))
    return found


def held():
    """Return (Step.graphs_held, Step.graphs_since_start)."""
    there = [each for each in state.marked if each.is_held()]
    state.one_has_gone |= len(there) < len(state.marked)
    state.marked = there
    ages = [counters.backwards - each.number for each in there]
    since_start = 0 if state.one_has_gone else sum(age > SOON for age in ages)
    return sum(age > AGE for age in ages), since_start
