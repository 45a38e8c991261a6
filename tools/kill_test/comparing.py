"""Is the result of a round that of the undisturbed run? What was printed, and files."""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from .words import clip

# The names of numbers in files of safetensors, and torch's. Numbers of others are compared by byte.
SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class Difference(NamedTuple):
    text: str  # in what the results differ
    judged: bool = True  # False: the round has no result that could be compared


def difference(options, reference, run):
    """Return the Difference between the result of a run and the undisturbed one, or None."""
    of_lines = difference_of_lines(reference, run)
    return of_lines or difference_of_files(options.file, reference.run, run)


# ---- What was printed ----


def difference_of_lines(reference, run):
    """Return the first Difference between the results that were printed, or None."""
    since = last_missed(run)
    for words, expected in reference.finals.items():
        results = [result for result in run.results if result.words == words]
        if not results and not any(result.words in reference.finals for result in run.results):
            results = run.results  # its words change from run to run
        new = [result.texts for result in results if result.line > since][-len(expected) :]
        if not new and results:
            if not any(result.line > since for result in run.results):
                return Difference(
                    "not judged: its result came before the last kill, and not again. Print it"
                    " also if all is done, or give --file",
                    judged=False,
                )
            # Of a rank that lived on:
            new = [result.texts for result in results][-len(expected) :]
        if sorted(new) == sorted(expected):
            continue
        if not new and run.shells and run.kills and run.kills[-1].kind == "launcher":
            return Difference(
                "no result, and status 0 though the launcher was killed: does a pipeline"
                " hide its status? Let the shell set -o pipefail"
            )
        printed = clip(", ".join(text for texts in new for text in texts))
        return Difference(printed or "it printed no result (--line)")
    return None


def last_missed(run):
    """Return the number of the line after which the last kill came that somebody missed, or 0."""
    for kill in reversed(run.kills):
        if kill.restarted or kill.kind == "launcher" or run.lines > kill.lines:
            return kill.lines
    return 0


# ---- Files ----


def difference_of_files(names, undisturbed, run):
    """Return the first Difference between the files of these names in two runs, or None."""
    for name in names:
        loaded = load(run, name)
        if loaded.fault:
            return Difference(f"it {loaded.fault}")
        expected, key = load(undisturbed, name).content, name.rstrip("/")
        text = first_difference(expected, loaded.content, key)
        if text:
            return Difference(text)
    return None


@dataclass
class Loaded:
    """A file that a run has left."""

    content: Any = None  # what torch.save() was given; of a text its lines
    fault: str = ""  # why it cannot be compared: "left no train.pt"


def load(run, name):
    """Return a file of a Run's working directory, or all files of a folder, Loaded."""
    path = f"{run.folder}/work/{name}"
    try:
        content = content_of_folder(path) if os.path.isdir(path) else content_of(path)
        empty = isinstance(content, (list, dict, tuple)) and not any(map(str, content))
        return Loaded(fault=f"left an empty {name}") if empty else Loaded(content)
    except FileNotFoundError:
        return Loaded(fault=f"left no {name}")
    except Exception as error:  # of many types
        return Loaded(fault=f"left a {name} that cannot be loaded ({clip(str(error))})")


def content_of(path):
    """Return what was given to torch.save() or to safetensors; of a text its lines."""
    if path.endswith(".safetensors"):
        return tensors_of(path)
    with contextlib.suppress(UnicodeDecodeError), open(path, encoding="utf-8") as file:
        return file.read().splitlines()
    import torch  # takes seconds, and texts do without

    return torch.load(path, weights_only=True, map_location="cpu")


def content_of_folder(path):
    """Return {name of a file in the folder: its content}, those with tensors first.

    Of a file that cannot be loaded the bytes are compared, by their checksum.
    """
    contents = {}
    for file in sorted(pathlib.Path(path).rglob("*")):
        if not file.is_file():
            continue
        try:
            content = content_of(str(file))
        except Exception:  # of many types
            content = f"bytes with sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
        contents[str(file.relative_to(path))] = content
    return dict(sorted(contents.items(), key=lambda item: not isinstance(item[1], dict)))


def tensors_of(path):
    """Return {name: tensor} of a file of safetensors, and its metadata, if there are some.

    The file has 8 bytes (the length of what follows, little-endian), a JSON text that says where
    each tensor lies, and then the numbers of all tensors.
    """
    import torch

    with open(path, "rb") as file:
        places = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        numbers = bytearray(file.read())
    data = torch.empty(0, dtype=torch.uint8)
    if numbers:
        data = torch.frombuffer(numbers, dtype=torch.uint8)
    tensors = {}
    for name, place in places.items():
        if name == "__metadata__":
            tensors[name] = place
            continue
        begin, end = place["data_offsets"]
        part = data[begin:end].clone()  # which begins where numbers may begin
        kind = SAFETENSORS.get(place["dtype"])
        tensors[name] = part.view(getattr(torch, kind)).reshape(place["shape"]) if kind else part
    return tensors


def first_difference(one, other, key):
    """Return where the second value first differs from the first, and by how much, or "".

    key: what the values are called: "train.pt['step']".
    """
    if type(one) is type(other) and isinstance(one, (dict, list, tuple)):
        one, other = as_dict(one), as_dict(other)
        for name in [*one, *other]:
            if name not in one or name not in other:
                return f"{key}[{name!r}] is {'missing' if name in one else 'new'}"
        for name in one:
            if text := first_difference(one[name], other[name], f"{key}[{name!r}]"):
                return text
        return ""
    torch = sys.modules.get("torch")
    if torch and isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return difference_of_tensors(torch, one, other, key)
    same = type(one) is type(other) and (one == other or repr(one) == repr(other))  # nan, say
    return "" if same else f"{key} is {clip(str(other))}, not {clip(str(one))}"


def as_dict(values):
    return dict(values if isinstance(values, dict) else enumerate(values))


def difference_of_tensors(torch, one, other, key):
    """Return how a tensor differs from another, or ""."""
    try:
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        return f"{key} has no data (it is on the meta device)" if one.is_meta else ""
    except AssertionError as error:  # it says how many differ, and by how much
        return f"{key}: {clip(str(error), 130)}"
    except Exception as error:  # of many types: a nested tensor, say
        return f"{key} cannot be compared ({clip(str(error))})"
