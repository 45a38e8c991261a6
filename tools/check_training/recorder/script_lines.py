"""Which line of the script asked for something."""

import functools
import os
import sys
import threading

import torch

CALLS_OF_A_TRAINER = 3  # of a package; fewer are those of a bar around a loader, or of a wrapper
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
# The code of functions with which processes begin that this one, or its parent, has started.
entries = set()


@functools.lru_cache(maxsize=4096)
def kind_of(path):
    """Return whose file of code that is: SCRIPT (the user's), PACKAGE or TORCH."""
    if path.startswith((TORCH_FOLDER, "<")) or path.startswith(OWN_FILES):
        return TORCH
    if "-packages" in path:
        return PACKAGE
    return TORCH if path.startswith(PYTHON_FOLDER) else SCRIPT


@functools.lru_cache(maxsize=4096)
def package_of(path):
    """Return the name of the package that a file of the kind PACKAGE belongs to."""
    inside = path.rpartition("-packages")[2].strip(os.sep)
    return inside.partition(os.sep)[0].removesuffix(".py")


def where():
    """Return the line that runs, "train.py:42": the innermost of the script, else of a package.

    If that line only starts a trainer, some calls of a package above, the trainer's own innermost
    line comes first: "trainer.py:2674 of transformers, from train.py:40".
    """
    frame, innermost, calls, name = sys._getframe(1), {}, 0, None  # innermost: {package: frame}
    while frame:
        path = frame.f_code.co_filename
        kind = kind_of(path)
        if kind == SCRIPT:
            break
        if kind == PACKAGE:
            name, calls = package_of(path), calls + 1
            innermost.setdefault(name, frame)
        frame = frame.f_back
    if frame is None and innermost:
        return _line(next(iter(innermost.values())))
    if frame is None:
        is_main = threading.current_thread() is threading.main_thread()
        return "?" if is_main else "? (in a thread of torch's own)"
    if calls < CALLS_OF_A_TRAINER:
        return _line(frame)
    return f"{_line(innermost[name])} of {name}, from {_line(frame)}"


def all_lines():
    """Return all lines of the script and of packages that run, the innermost first, as a text.

    They end with the function that a process begins with. A rank may start the others, and then
    call that function by itself: its lines are the same.
    """
    frame, found = sys._getframe(1), []
    while frame:
        if kind_of(frame.f_code.co_filename) != TORCH:
            found.append(_line(frame))
        if frame.f_code in entries:
            break
        frame = frame.f_back
    return " ".join(found)


def remember_entry(function):
    """Remember that a process which this one starts begins with a function."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is not None and kind_of(code.co_filename) != TORCH:
        entries.add(code)


def innermost_files(count):
    """Return the files of so many of the innermost frames that are not the recorder's own."""
    frame, found = sys._getframe(1), []
    while frame and len(found) < count:
        path = frame.f_code.co_filename
        if not path.startswith((*OWN_FILES, f"{TORCH_FOLDER}/watched")):
            found.append(path)
        frame = frame.f_back
    return found


def line_of_error(traceback):
    """Return the innermost line of the script in a traceback, "train.py:42"; "": there is none."""
    line = ""
    while traceback:
        path = traceback.tb_frame.f_code.co_filename
        if kind_of(path) == SCRIPT:
            line = f"{os.path.basename(path)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _line(frame):
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
