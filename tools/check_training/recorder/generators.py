"""The generators of random numbers of this process: torch's on the CPU, numpy's and Python's."""

import random
import sys
import zlib

import torch

from ..records.data import Drawn
from .fingerprints import checksum_of_memory, random_state

LOOKED_AT = range(1, 5)  # batches: with the first one, a sampler may draw an order
PASSES = 20  # over a loader, in which they are looked at


def states():
    """Return {library: bits of the state of its own generator}. Nothing is drawn."""
    found = {"torch": random_state(torch.device("cpu")), "random": hash(random.getstate()[1])}
    if "numpy.random" in sys.modules:
        found["numpy"] = _numpys_state(sys.modules["numpy.random"])
    return found


def moved(before, batch):
    """Return a Drawn for each generator whose state is another one now. before: of states()."""
    after = states()
    return [
        Drawn(library, batch, bits)
        for library, bits in before.items()
        if after.get(library) != bits
    ]


def _numpys_state(module):
    state = module.get_state(legacy=False)
    key = state["state"].get("key")
    if key is None:  # another kind of generator was put in the place of numpy's own
        return zlib.crc32(str(state).encode())
    return hash((checksum_of_memory(key.ctypes.data, key.nbytes), state["state"]["pos"]))
