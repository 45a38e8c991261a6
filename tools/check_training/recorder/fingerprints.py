"""Which tensors may be read, and when, and their checksums.

A check is cheap only if it is rare, and if it waits for no GPU. All ranks read the same tensors in
the same steps.
"""

import collections.abc
import ctypes
import dataclasses
import itertools
import math
import zlib

import torch

from ..records.base import Print

FIRST = 20  # steps in which tensors of a GPU are read
LATER = 10**9  # a step in which they are not
SAMPLE = 200_000  # values of all weights, or of all gradients, that are read in a step, at most


def looked_at(number):
    """Return whether what is done for this time is looked at: the same times on all ranks."""
    if number < 30:
        return True
    if number < 300:
        return number % 10 == 0
    return number % (100 if number < 3000 else 1000) == 0


def readable(tensor, step=LATER):
    """Return whether a tensor may be read in a step: it is whole, and no GPU must be waited for."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    if tensor.device.type != "cpu" and (step >= FIRST or tensor.device.type == "meta"):
        return False
    if tensor.numel() and not tensor.untyped_storage().size():  # FSDP2 has freed its memory
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def memory_of(tensor):
    """Return the address of the memory that a tensor is a part of; None: it is not known."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None


def bits(tensor, most=16384):
    """Return the bits of a tensor, by so many of its values at most."""
    return _sample(tensor, most)[0]


def prints(tensors, step):
    """Return the Print of each tensor; None for one that is None, or may not be read in a step."""
    found, samples, most = [None] * len(tensors), [], max(64, SAMPLE // max(1, len(tensors)))
    with torch.no_grad():
        for place, tensor in enumerate(tensors):
            if tensor is None or not readable(tensor, step):
                continue
            checksum, values = _sample(tensor, most)
            found[place] = Print(checksum, 0.0)
            samples.append(values if values.is_floating_point() else values.abs().float())
        norms = torch._foreach_norm(samples) if samples else ()
        read = [each for each in found if each is not None]
        for each, norm in zip(read, norms, strict=True):
            each.norm = float(norm)
    return found


def _sample(tensor, most):
    """Return (bits of every n-th value, so many at most; these values, on the CPU)."""
    values = tensor.detach().reshape(-1)
    every = max(1, math.ceil(len(values) / most))
    values = values[::every].contiguous().cpu()
    return checksum_of_memory(values.data_ptr(), values.nbytes), values


def checksum_of_memory(address, size):
    """Return the CRC-32 of so many bytes."""
    return zlib.crc32(ctypes.string_at(address, size))


def random_state(device):
    """Return the bits of the state of a device's generator of random numbers."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return checksum_of_memory(state.data_ptr(), state.numel())


def tensors_in(value, depth=0):
    """Yield the tensors in a value, also those in what it is made of.

    It may be made of mappings, lists, tuples and objects of dataclasses. Of each of these, the
    first 64 items are looked at.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4:
        for item in itertools.islice(_items_of(value), 64):
            yield from tensors_in(item, depth + 1)


def _items_of(value):
    """Return an iterator over what a value is made of; it yields nothing for what has no parts."""
    if isinstance(value, (list, tuple)):
        return iter([*value])
    if isinstance(value, dict):  # as it is: a class of its own may make values when it is asked
        return iter([*dict.values(value)])
    if isinstance(value, collections.abc.Mapping):
        return (value[key] for key in [*value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return (getattr(value, name, None) for name in names)
    return iter(())


def keys_in(value, depth=0):
    """Yield the keys of a dict, and of the dicts in it, as texts; 3,000 of each at most."""
    if isinstance(value, dict) and depth < 4:
        for key in list(value)[:3000]:
            yield str(key)
            yield from keys_in(value[key], depth + 1)
