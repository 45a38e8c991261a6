"""The generators of random numbers of this process: torch's on the CPU, numpy's and Python's."""

import contextlib
import random
import sys
import zlib
from dataclasses import dataclass

import torch

from ..records.data import Drawn
from .counters import counters
from .fingerprints import FIRST, checksum_of_memory, looked_at, random_state
from .state import kept

LOOKED_AT = range(1, 5)  # batches: with the first one, a sampler may draw an order
PASSES = 20  # over a loader, in which they are looked at
DEPTH = 5  # of samplers in samplers
CPU = torch.device("cpu")


@dataclass
class AfterBatch:
    """The generator of the model's device, as it was when a loader last gave a batch."""

    device: torch.device = CPU  # of the DDP object that was last called
    bits: int | None = None  # of its state; None: not looked at, or a forward has asked since


after_batch = kept(AfterBatch())


def note_batch():
    """Look at the generator of the model's device: a loader has given a batch."""
    number = counters.forwards
    near = after_batch.device.type == "cpu" or number < FIRST
    after_batch.bits = random_state(after_batch.device) if near and looked_at(number) else None


def drew_since_batch(device, bits):
    """Return Forward.drew_since_batch. bits: of the state of the device's generator now."""
    before, same_device = after_batch.bits, after_batch.device == device
    after_batch.device, after_batch.bits = device, None
    return None if before is None or not same_device else before != bits


def states():
    """Return {library: bits of the state of its own generator}. Nothing is drawn."""
    found = {"torch": random_state(CPU), "random": hash(random.getstate()[1])}
    if "numpy.random" in sys.modules:
        found["numpy"] = _numpys_state(sys.modules["numpy.random"])
    return found


@contextlib.contextmanager
def given_back(thing):
    """Set all generators back, if what runs inside draws from them; also those of a sampler.

    thing: a sampler, or a loader.
    """
    before, own = states(), [(each, each.get_state()) for each in generators_of(thing)]
    state, of_python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy.random")
    of_numpy = None if numpy is None else numpy.get_state(legacy=False)
    try:
        yield
    finally:
        libraries = {each.library for each in moved(before, 0)}
        if "torch" in libraries:
            torch.set_rng_state(state)
        if "random" in libraries:
            random.setstate(of_python)
        if "numpy" in libraries:
            numpy.set_state(of_numpy)
        for generator, kept in own:
            generator.set_state(kept)


def generators_of(thing):
    """Return the generators that a sampler or a loader has been given, with those of its parts."""
    found = []
    for _ in range(DEPTH):
        has = getattr(thing, "__dict__", {})
        if isinstance(has.get("generator"), torch.Generator):
            found.append(has["generator"])
        of_batches = has.get("batch_sampler")
        thing = has.get("sampler") if of_batches is None else of_batches
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
