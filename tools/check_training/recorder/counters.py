"""What this process has done so far, where several subjects count or ask for that."""

from dataclasses import dataclass

from .state import kept


@dataclass
class Counters:
    """All but the last two only rise, until the process joins another group."""

    phase: int = 0  # exchanges with other ranks that have ended, since it joined its group
    steps: int = 0  # of the optimizer that has taken most, which may be gone by now
    all_steps: int = 0  # of all optimizers
    forwards: int = 0  # calls of DDP objects with gradients on
    no_grad_forwards: int = 0  # and with gradients off
    backwards: int = 0  # calls of backward()
    loss: float | None = None  # as in Step
    batches: int = 0  # that were taken from loaders
    small_sums: int = 0  # collective calls with at most 16 numbers
    backward_line: str = ""  # of the last backward()
    feeding: object = None  # the passes.KnownPass that the last batch came from


counters = kept(Counters())
