"""Which line of the script asked for something."""

import functools
import os
import sys

import torch

SCRIPT, PACKAGE, TORCH = range(3)  # kinds of files; the last: of torch, Python or this recorder
TORCH_FOLDER = os.path.dirname(torch.__file__)  # torchvision's name begins alike: it is torch's
PYTHON_FOLDER = os.path.dirname(os.__file__)
# This package, under the name by which the process knows it and under its own. The link to it
# stands beside the sitecustomize.py of the recorder.
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OWN_FILES = (
    OWN_FOLDER + os.sep,
    os.path.realpath(OWN_FOLDER) + os.sep,
    os.path.join(os.path.dirname(OWN_FOLDER), "sitecustomize.py"),
)


@functools.lru_cache(maxsize=4096)
def kind_of(path):
    """Return whose file of code that is: SCRIPT (the user's), PACKAGE or TORCH."""
    if path.startswith((TORCH_FOLDER, "<")) or path.startswith(OWN_FILES):
        return TORCH
    if "-packages" in path:
        return PACKAGE
    return TORCH if path.startswith(PYTHON_FOLDER) else SCRIPT


def where():
    """Return the line that runs, "train.py:42": the innermost of the script, else of a package."""
    frame, package = sys._getframe(1), None
    while frame:
        kind = kind_of(frame.f_code.co_filename)
        if kind == SCRIPT:
            return _line(frame)
        if kind == PACKAGE and package is None:
            package = frame
        frame = frame.f_back
    return _line(package) if package else "?"


def all_lines():
    """Return all lines of the script and of packages that run, the innermost first, as a text."""
    frame, found = sys._getframe(1), []
    while frame:
        if kind_of(frame.f_code.co_filename) != TORCH:
            found.append(_line(frame))
        frame = frame.f_back
    return " ".join(found)


def innermost_files(count):
    """Return the files of so many of the innermost frames that are not the recorder's own."""
    frame, found = sys._getframe(1), []
    while frame and len(found) < count:
        path = frame.f_code.co_filename
        if not path.startswith((*OWN_FILES, f"{TORCH_FOLDER}/watched")):
            found.append(path)
        frame = frame.f_back
    return found


def _line(frame):
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
