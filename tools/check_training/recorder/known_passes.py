"""What is known of a pass over a loader while it is under way."""

import threading
from dataclasses import dataclass, field

from ..records.data import Drawn, Mode
from .counters import counters


@dataclass(slots=True)
class KnownPass:
    """A pass over a loader, as far as it has come. What Progress has, means the same here."""

    number: int  # of all passes
    pass_of_loader: int  # of those over loaders that the same lines made
    every: int  # of the indices, those that this number divides are in the sketch
    workers: int
    promised: int | None  # batches, as Pass.batches
    share: int | None  # items, as Pass.share
    backwards_before: int  # that the process had made
    no_grad_forwards_before: int
    steps_before: int  # of any optimizer
    modes_before: list[Mode]
    modes_after: list[Mode] | None = None  # with the last batch that was promised
    last_batch: float | None = None
    items: int = 0
    order: int = 0
    first_items: int = 0
    first_orders: list[int] = field(default_factory=list)
    index_sum: int = 0
    sketch: list[int] = field(default_factory=list)
    rising: bool = True
    batches: int = 0
    batches_at_step: int = 0  # that were taken before the last step
    thread: int = 0  # that has taken the last batch
    rows: int = 0
    batch_bits: list[int] = field(default_factory=list)
    tensor_bits: list[int] = field(default_factory=list)
    content: float = 0.0
    drawn: list[Drawn] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)  # before the batch; {}: not looked at
    gradients: bool = False
    backwards: int = 0  # when another loader gave a batch
    no_grad_forwards: int = 0
    steps: int = 0
    left: float | None = None  # as in Progress
    times_left: int = 0  # that was noted so often
    over: bool = False
    workers_epoch: int | None = None  # as in Pass
    draws_its_items: bool = False  # as in Pass
    labels: list[int | None] = field(default_factory=list)
    sizes_as_labels: int = 0  # as in Progress

    @property
    def complete(self):
        """Whether all batches that the loader promises were taken; it may not be over yet."""
        return bool(self.promised) and self.batches >= self.promised

    def count(self):
        """Count the passes of the model: no other loader has given a batch since the last one."""
        self.backwards = counters.backwards - self.backwards_before
        self.no_grad_forwards = counters.no_grad_forwards - self.no_grad_forwards_before
        self.steps = counters.all_steps - self.steps_before

    def taken_for_a_step(self):
        """Return how many batches were taken since this was last asked, when a step begins.

        A thread of its own may fetch them ahead: these are taken for no step.
        """
        taken, self.batches_at_step = self.batches - self.batches_at_step, self.batches
        return taken if self.thread == threading.get_ident() else 0


@dataclass(slots=True)
class EndedPass:
    """The last pass that was over, and what the counters said then."""

    known: KnownPass
    backwards: int
    batches: int
