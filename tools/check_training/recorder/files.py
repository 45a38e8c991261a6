"""Files that the script saves, loads and moves: notes Save, Load, Move."""

import os

import torch

from ..records.files import Load, Move, Save
from . import model, optimizer, state_dicts
from .counters import counters
from .fingerprints import keys_in
from .hooks import RAISED, after, around
from .machine import folder_of
from .notebook import count, note, now, stand
from .script_lines import where
from .times import span

OF_OPTIMIZERS = {"param_groups", "state"}  # keys in the state of each


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
    of_ddp = any(known.names <= keys for known in model.state.wrappers.values())
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
        names_of_wrapper=of_ddp and "n_averaged" not in keys,  # an AveragedModel's are alike
        age=max(map(state_dicts.age, [content, *parts])),
    )
    stand("")


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
