"""The weights as they are when a process has trained: notes WeightsAtEnd."""

from ..records.optimizer import WeightsAtEnd
from . import optimizer
from .fingerprints import prints
from .notebook import note


def note_weights():
    """Note the weights of all optimizers that are still there, and have taken a step."""
    for each, known in list(optimizer.state.known.items()):
        if known.step:
            weights = prints(optimizer.parameters_of(each), step=0)
            note(WeightsAtEnd, optimizer=known.key, weights=weights)
