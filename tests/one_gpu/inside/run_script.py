"""Runs a script of this collection, as it is, under settings that it does not have itself."""

import atexit
import json
import linecache
import os
import pathlib
import runpy
import sys
import warnings
from collections import Counter

import torch
import torch.distributed as dist

PACKAGE = pathlib.Path(__file__).resolve().parent.parent  # one_gpu
ROOT = PACKAGE.parent.parent


def run_script(settings, script, *arguments):
    """Run a script under settings, which are joined by "+":

    plain          none
    deterministic  those of template/README.md, with which runs are equal bit by bit
    same-gpu       all ranks take GPU 0
    gloo           all ranks take GPU 0, and exchange its tensors by Gloo
    syncs          count what waits for the GPU, and print SYNCS {line: times} at the end
    """
    settings = settings.split("+")
    if "same-gpu" in settings or "gloo" in settings:
        os.environ["LOCAL_RANK"] = "0"
    if "gloo" in settings:
        dist.get_default_backend_for_device = lambda device: "cpu:gloo,cuda:gloo"
    if "deterministic" in settings:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    if "syncs" in settings:
        count_synchronisations()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def count_synchronisations():
    """Print at the end which lines of this collection made the CPU wait for the GPU."""
    counts = Counter()
    owner = os.getpid()

    def note(message, *_, **__):
        if "synchronizing CUDA operation" in str(message):
            counts[calling_line()] += 1

    def show():
        if os.getpid() == owner:  # and not a loader's worker, which inherits this
            print(f"SYNCS {json.dumps(dict(counts.most_common()))}", flush=True)

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    atexit.register(show)


def calling_line():
    """The innermost line of this collection that is running; "PyTorch" if none is."""
    frame = sys._getframe()
    while frame:
        path = pathlib.Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(PACKAGE):
            line = linecache.getline(str(path), frame.f_lineno).strip()
            return f"{path.name}: {line[:70]}"
        frame = frame.f_back
    return "PyTorch"
