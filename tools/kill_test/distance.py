"""How far apart are two results, where the number of ranks has changed? Then bits must differ."""

import math
import pathlib
import sys
from dataclasses import dataclass, field

from .comparing import content_of
from .words import clip

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors")  # of files with tensors


@dataclass
class Distance:
    """How far the result of a run is from the undisturbed one."""

    far: float = 0.0  # the norm of the difference of all numbers, as a share of their norm
    name: str = ""  # of the file that is furthest away; "" if there was none to compare
    others: dict[str, str] = field(default_factory=dict)  # {where: what is not alike}, no floats


def files_with_tensors(folder, names):
    """Return the names of the files in a folder that may be compared.

    names: of --file; if there are none, all whose names end as those with tensors do.
    """
    if names:
        return [name for name in names if (pathlib.Path(folder) / name).is_file()]
    found = [path for path in pathlib.Path(folder).rglob("*") if path.suffix in ENDINGS]
    return sorted(str(path.relative_to(folder)) for path in found if path.is_file())


def distance(folder, undisturbed, names):
    """Return the Distance of the files in a folder from those of the undisturbed run's folder."""
    furthest = Distance()
    for name in files_with_tensors(undisturbed, names):
        expected, content = content_or_fault(undisturbed, name), content_or_fault(folder, name)
        if isinstance(expected, str):  # it has no tensors
            continue
        if isinstance(content, str):
            furthest.others[name] = f"{name} {content}"
            continue
        far, others = compare(flattened(content, name), flattened(expected, name))
        furthest.others |= others
        if far >= furthest.far:
            furthest.far, furthest.name = far, name
    return furthest


def content_or_fault(folder, name):
    """Return the content of a file with tensors, or in words why it has none."""
    try:
        return content_of(f"{folder}/{name}")
    except FileNotFoundError:
        return "is missing"
    except Exception as error:  # of many types
        return f"cannot be loaded ({clip(str(error))})"


def compare(content, expected):
    """Return (how far two flattened files are apart, {where: what else is not alike})."""
    square = of_both = 0.0
    others = {key: f"{key} is new" for key in content.keys() - expected.keys()}
    for key, value in expected.items():
        if key not in content:
            others[key] = f"{key} is missing"
            continue
        new = content[key]
        if is_real(value) and is_real(new):
            pair = as_numbers(new), as_numbers(value)
            if pair[0].shape == pair[1].shape:
                square += float((pair[0] - pair[1]).nan_to_num().square().sum())
                of_both += float(pair[1].nan_to_num(0, 0, 0).square().sum())
                continue
        if repr(new) != repr(value):
            others[key] = f"{key} is {repr(new)[:40]}, not {repr(value)[:40]}"
    return math.sqrt(square / of_both) if of_both else 0.0, others


def is_real(value):
    """Return whether a value is a float, or a tensor of floats."""
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, float)


def as_numbers(value):
    import torch

    return torch.as_tensor(value, dtype=torch.float64).flatten()


def flattened(value, key):
    """Return {where: value} of all that a nested value holds. key: its name: "train.pt"."""
    if not isinstance(value, (dict, list, tuple)):
        return {key: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = {}
    for name, inner in pairs:
        found |= flattened(inner, f"{key}[{name!r}]")
    return found
