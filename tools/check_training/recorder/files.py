"""Files that the script saves, loads and moves: notes Save, Load, OtherFile, Move."""

import contextlib
import json
import os
import pickle
import time

import torch

from ..records.files import Load, Move, OtherFile, Save
from . import model, optimizer, state_dicts
from .counters import counters
from .fingerprints import keys_in
from .hooks import RAISED, after, around, before
from .machine import folder_of
from .notebook import count, note, now, stand, uses
from .script_lines import where
from .times import span

OF_OPTIMIZERS = {"param_groups", "state"}  # keys in the state of each
BEGIN = time.time()  # of this process, by the clock that files have


@around(torch, "save", also=[torch.serialization], closed=True)
def save(args, kwargs):
    """Note a save that has ended."""
    file = args[1] if len(args) > 1 else kwargs.get("f")
    yield from _save(args[0] if args else kwargs.get("obj"), file)


@around("safetensors.torch", "save_file", closed=True)
def save_tensors(args, kwargs):
    """Note a save that has ended."""
    file = args[1] if len(args) > 1 else kwargs.get("filename")
    yield from _save(args[0] if args else kwargs.get("tensors"), file)


def _save(content, file):
    line, phase, begin = where(), counters.phase, now()
    stand("a file", line)
    yield
    keys = {*keys_in(content)}
    span("saving", begin, now())
    parts = content.values() if isinstance(content, dict) else ()
    note(
        Save,
        begin=begin,
        line=line,
        path=path_of(file),
        folder=folder_of(path_of(file)),
        phase_begun=phase,
        phase=counters.phase,
        has_optimizer=keys >= OF_OPTIMIZERS,
        only_optimizer=isinstance(content, dict) and {*content} == OF_OPTIMIZERS,
        names_of_wrapper=any(
            known.names <= keys and state_dicts.is_saved_in(content, ddp, known.names)
            for ddp, known in list(model.state.wrappers.items())
        ),
        age=max(map(state_dicts.age, [content, *parts])),
        has_model=_has_model(content, keys),
    )
    stand("")


def _has_model(content, keys):
    """Return Save.has_model. keys: all that are in the content."""
    if not isinstance(content, dict):
        return None
    if not model.state.wrappers:  # it may have another one, if any has given its state by then
        return None if state_dicts.state.made else False
    if any(state_dicts.is_known(each) for each in (content, *content.values())):
        return True
    names = {name for known in list(model.state.wrappers.values()) for name in known.names}
    names |= {name.removeprefix("module.") for name in names}
    return not keys.isdisjoint(names)


@around(torch, "load", also=[torch.serialization], closed=True, even_if_it_fails=True)
def load(args, kwargs):
    """Note a load that has ended or failed."""
    yield from _load(args[0] if args else kwargs.get("f"))


@around("safetensors.torch", "load_file", closed=True, even_if_it_fails=True)
def load_tensors(args, kwargs):
    """Note a load that has ended or failed."""
    yield from _load(args[0] if args else kwargs.get("filename"))


def _load(file):
    line, phase, begin = where(), counters.phase, now()
    stand("a file", line)
    result = yield
    keys = {*keys_in(None if result is RAISED else result)}
    note(
        Load,
        begin=begin,
        line=line,
        path=path_of(file),
        folder=folder_of(path_of(file)),
        steps=optimizer.steps(),
        phase_begun=phase,
        phase=counters.phase,
        has_optimizer=keys >= OF_OPTIMIZERS,
    )
    stand("")


@before("torch.distributed.checkpoint.state_dict_saver", "save")
@before("torch.distributed.checkpoint.state_dict_saver", "async_save")
def save_shards(args, kwargs):
    """Note that ranks save their shards; what they save is not looked at."""
    uses("sharded saves")


@after(pickle, "dump")
@after(json, "dump")
def dumped(result, args, kwargs):
    """Note a file that was written, but for its last bytes: it is not closed yet."""
    note_other(args[1] if len(args) > 1 else kwargs.get("file", kwargs.get("fp")), is_read=False)


@after("numpy", "save")
def array_saved(result, args, kwargs):
    """Note a file that was written."""
    note_other(args[0] if args else kwargs.get("file"), is_read=False)


@after(pickle, "load")
@after(json, "load")
@after("numpy", "load")
def read(result, args, kwargs):
    """Note a file that was read, if it is as young as this process."""
    file = args[0] if args else kwargs.get("file", kwargs.get("fp"))
    with contextlib.suppress(OSError):
        if os.stat(path_of(file) or "").st_mtime >= BEGIN:
            note_other(file, is_read=True)


def note_other(file, is_read):
    """Note a file that is no checkpoint of torch: the first ones."""
    path = path_of(file)
    if path is not None and count("other file") < 1000:
        note(OtherFile, path=path, is_read=is_read)


@after(os, "replace")
@after(os, "rename")
def moved(result, args, kwargs):
    """Note that a file was given another name."""
    if len(args) > 1 and count("move") < 1000:
        note(Move, source=path_of(args[0]), path=path_of(args[1]))


def path_of(file):
    """Return the whole path of a file, given by its name or open; None: it has no known name."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.path.realpath(os.fspath(name)) if isinstance(name, (str, os.PathLike)) else None
