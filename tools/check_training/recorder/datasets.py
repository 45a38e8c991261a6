"""What can be known of datasets and samplers: notes SubsetMade, SetEpoch.

No dataset is asked for an item, which could draw random numbers.
"""

import contextlib
import dis
import functools
import os
import sys
import zlib
from dataclasses import dataclass, field

import torch
from torch.utils.data import dataloader, distributed
from torch.utils.data import dataset as torch_dataset
from torch.utils.weak import WeakIdKeyDictionary

from ..records.data import Listed, SetEpoch, SubsetMade
from . import generators
from .fingerprints import bits, checksum_of_memory, readable, tensors_in
from .hooks import after, before
from .notebook import count, note, now, site
from .script_lines import where
from .state import kept

DEPTH = 8  # of datasets in datasets
COLUMNS = 8  # of a table that are read
EPOCHS = "epoch", "_epoch", "current_epoch"  # names of an attribute
STRETCHES, STRETCH = 16, 256  # how many stretches of memory are read, and the bytes of each


@dataclass
class Datasets:
    """The datasets of this process."""

    seen: WeakIdKeyDictionary = field(  # {dataset: as Pass.dataset_seen}
        default_factory=WeakIdKeyDictionary
    )


state = kept(Datasets())


def size_of(thing):
    """Return the length of a thing, or None: it does not say.

    A sampler may draw all its indices to count them.
    """
    with generators.given_back(thing):
        try:
            return len(thing)
        except Exception:
            return None


def data_in(dataset):
    """Return (contents, listed) of a record. What a dataset in it has, is behind "dataset."."""
    contents, listed, prefix = {}, {}, ""
    for _ in range(DEPTH):
        for name, value in list(getattr(dataset, "__dict__", {}).items())[:50]:
            if isinstance(value, (torch.Tensor, tuple)):
                tensors = [each for each in tensors_in(value) if readable(each)]
                contents[prefix + name] = [bits(each, 4096) for each in tensors]
            elif isinstance(value, (list, dict)):
                _list_texts(listed, prefix + name, value)
                _list_dicts(listed, prefix + name, value, dataset)
            else:
                found = bits_of_table(value) or bits_of_array(value)
                if found:
                    contents[prefix + name] = found
        inner = getattr(dataset, "dataset", None)
        if inner is None or inner is dataset:
            break
        dataset, prefix = inner, f"{prefix}dataset."
    return contents, listed


def chosen_in(dataset):
    """Return Pass.chosen: 2,000 indices of each Subset are read, at most."""
    found = []
    for _ in range(DEPTH):
        if isinstance(dataset, torch_dataset.Subset):
            indices = dataset.indices
            every = max(1, len(indices) // 2000)
            some = [int(indices[place]) for place in range(0, len(indices), every)]
            found.append(hash((len(indices), *some)))  # of numbers: alike in all processes
        inner = getattr(dataset, "dataset", None)
        if inner is None or inner is dataset:
            break
        dataset = inner
    return found


def bits_of_table(value):
    """Return the bits of each column of a table of Arrow, as `datasets` has it; [] for others.

    What a table was cut out of has the same memory: so where it begins in it counts, too.
    """
    if not callable(getattr(value, "column", None)) or not hasattr(value, "num_columns"):
        return []
    found = []
    try:
        for place in range(min(COLUMNS, value.num_columns)):
            column, parts = value.column(place), []
            for chunk in column.chunks[:1] + column.chunks[1:][-1:]:
                kept = [each for each in chunk.buffers() if each is not None]
                parts += [chunk.offset, len(chunk)]
                parts += [bits_of_memory(each.address, each.size) for each in kept]
            found.append(hash(tuple(parts)))
    except Exception:  # it looks like such a table, and is none
        return []
    return found


def bits_of_array(value):
    """Return the bits of an array of numpy in a list; [] for others."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return []
    if value.dtype.hasobject or not value.flags.c_contiguous:
        return []
    return [bits_of_memory(value.ctypes.data, value.nbytes)]


def bits_of_memory(address, size):
    """Return a hash of some stretches of memory, from its begin to its end."""
    step = max(STRETCH, size // STRETCHES)
    return hash(
        tuple(
            checksum_of_memory(address + start, min(STRETCH, size - start))
            for start in range(0, size, step)
        )
    )


def _list_texts(listed, name, value):
    """Add the Listed of a list or a dict of texts, or of tuples that begin with one or a tensor.

    Where a dict's entries stand means nothing. What does is a whole number that an entry has.
    """
    if not value or not isinstance(next(iter(value)), (str, tuple)):
        return
    keys = list(value)[: 100_000 if isinstance(value, dict) else 5000]
    known = [_checked(key[0] if isinstance(key, tuple) and key else key) for key in keys]
    if None in known:  # what else may stand there has another text in each process
        return
    entries = _without_folders([str(each) for each in known])
    if isinstance(value, dict):
        values = [*dict.values(value)][: len(keys)]
        numbers = [each if isinstance(each, int) else 0 for each in values]
        entries = sorted(zip(entries, numbers, strict=True))
        listed[name] = Listed(_checksum(entries), _checksum([entry for entry, _ in entries]))
    else:
        listed[name] = Listed(_checksum(entries), _checksum(sorted(entries)))


def _without_folders(texts):
    """Return the names of files without the folder of all, which a rank may have for itself."""
    names = [os.path.basename(text) for text in texts]
    if len({*names}) == len({*texts}):
        return names
    start = len(os.path.commonprefix(texts))  # files of one name in many folders: these tell more
    return [text[start:] for text in texts]


def _list_dicts(listed, name, value, dataset):
    """Add the Listed of a list with a dict for each item of a dataset: texts, paths, arrays."""
    if not value or not isinstance(value, list) or not isinstance(value[0], dict):
        return
    if len(value) != size_of(dataset):
        return
    some = value[:: max(1, len(value) // 200)]
    entries = [[_checked(each) for each in list(dict.values(item))[:COLUMNS]] for item in some]
    if any(any(entry) for entry in entries):
        listed[name] = Listed(_checksum(entries), _checksum(sorted(map(str, entries))))


def _checked(value):
    """Return what stands for a value of an item, alike in all processes; None: unknown."""
    if isinstance(value, (str, os.PathLike, int, float)):
        return str(value)
    if isinstance(value, torch.Tensor):
        return [bits(value, 64)] if readable(value) else None
    return bits_of_array(value) or None


def _checksum(entries):
    return zlib.crc32(str(entries).encode())


def epoch_in(dataset):
    """Return the number that a dataset, or one in it, holds as its epoch; None: it holds none.

    A property does not count: it may read memory that workers share.
    """
    for _ in range(DEPTH):
        own = getattr(dataset, "__dict__", {})
        for name in (*EPOCHS, *_names_of_its_epoch(type(dataset))):
            if type(own.get(name)) is int:
                return own[name]
        inner, several = own.get("dataset"), own.get("datasets")
        if inner is None and isinstance(several, (list, tuple)):
            inner = next(iter(several), None)
        if inner is None or inner is dataset:
            break
        dataset = inner
    return None


@functools.cache
def _names_of_its_epoch(kind):
    """Return the names of the attributes that a class of datasets sets in its set_epoch()."""
    code = getattr(getattr(kind, "set_epoch", None), "__code__", None)
    if code is None:
        return []
    return [each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"]


def reads_its_epoch(dataset):
    """Return Pass.reads_epoch: a function of the dataset's class reads such a name of an attribute.

    True if that is not known, as of a dataset in this one.
    """
    kind = type(dataset)
    if hasattr(dataset, "dataset") or hasattr(dataset, "datasets"):
        return True
    names = {*EPOCHS, *_names_of_its_epoch(kind)}
    codes = [getattr(each, "__code__", None) for each in vars(kind).values()]
    return any(
        code is not None and code.co_name != "__init__" and _loads_one_of(code, names)
        for code in codes
    )


def _loads_one_of(code, names):
    """Return whether a function's code, or one in it, reads an attribute of one of the names."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD") and instruction.argval in names:
            return True
    inner = [each for each in code.co_consts if hasattr(each, "co_code")]
    return any(_loads_one_of(each, names) for each in inner)


def draws_its_items(dataset):
    """Return whether a dataset, or one in it, never reads the index that it is asked for.

    It gives what it draws by itself, a window of a long text say. So indices are no items of it. A
    stream is asked for none.
    """
    if isinstance(dataset, torch_dataset.IterableDataset):
        return False
    for _ in range(DEPTH):
        kind = type(dataset)
        getter = getattr(kind, "__getitems__", None) or getattr(kind, "__getitem__", None)
        code = getattr(getter, "__code__", None)
        if code is not None and code.co_argcount > 1 and not _reads(code, code.co_varnames[1]):
            return True
        inner = getattr(dataset, "dataset", None)
        if inner is None or inner is dataset:
            break
        dataset = inner
    return False


def _reads(code, name):
    """Return whether a function's code reads an argument before it gives it another value."""
    if name in code.co_cellvars:  # a function within it may read it
        return True
    may_be_skipped = False
    for instruction in dis.get_instructions(code):
        operation, names = instruction.opname, instruction.argval
        may_be_skipped = may_be_skipped or "JUMP" in operation
        names = names if isinstance(names, tuple) else (names,)  # an instruction may have two
        if name not in names or "FAST" not in operation:
            continue
        if operation.startswith("LOAD") or names[0] != name:
            return True
        if operation.startswith("STORE") and not may_be_skipped:
            return False
    return False


@after(dataloader.DataLoader, "__init__")
def loader_made(result, args, kwargs):
    """Remember when a dataset was put into a loader first."""
    with contextlib.suppress(TypeError):  # a list, of which there are no weak references
        state.seen.setdefault(args[0].dataset, now())


def seen_at(dataset):
    """Return Pass.dataset_seen."""
    try:
        return state.seen.get(dataset)
    except TypeError:
        return None


def samplers_of(loader):
    """Return a loader's sampler, of batches or of items, and those that are in it.

    A loader of another library may have none, and may take torch's iterator nevertheless.
    """
    of_batches = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None) if of_batches is None else of_batches]
    while len(samplers) < 5:
        inner = getattr(samplers[-1], "sampler", None)
        if inner is None:
            break
        samplers.append(inner)
    return samplers


def sampler_of(loader):
    """Return the sampler of a loader that shares out its items, else the innermost one."""
    samplers = samplers_of(loader)
    return next((each for each in samplers if hasattr(each, "num_replicas")), samplers[-1])


def number_of(sampler, name):
    """Return an attribute of a sampler that is an integer or a bool, else None."""
    value = getattr(sampler, name, None)
    return value if isinstance(value, int) else None


@after(torch_dataset.Subset, "__init__")
def made_subset(result, args, kwargs):
    """Note Subset(dataset, indices), also by random_split."""
    dataset, indices = args[0].dataset, args[0].indices
    if not size_of(indices) or count("subset") >= 100:
        return
    chosen, length = [int(index) for index in indices], size_of(dataset) or 0
    lines, number = site("u")
    contents, listed = data_in(dataset)
    every = max(1, length // 2000)
    note(
        SubsetMade,
        key=f"{lines} {number}",
        line=where(),
        length=len(chosen),
        of_length=length,
        order=hash(tuple(chosen)),  # of numbers: alike in all processes
        sketch=[index for index in chosen if index % every == 0][:3000],
        contents=contents,
        listed=listed,
    )


@before(distributed.DistributedSampler, "set_epoch")
def set_epoch(args, kwargs):
    """Note that a sampler was told the epoch."""
    if count("epoch set") < 300:
        epoch = args[1] if len(args) > 1 else kwargs.get("epoch")
        note(SetEpoch, line=where(), sampler_object=id(args[0]), epoch=epoch)
