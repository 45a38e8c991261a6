"""Sends a signal at a chosen moment of a script, which test_faults.py lets call arm()."""

import contextlib
import io
import itertools
import os
import pathlib
import signal
import sys
import time

import torch

SAVING = ("writing", "before the move", "after the move")  # rank 0 alone saves


def place_of(moment):
    """(owner, name) of the function that is called at that moment."""
    script = sys.modules["__main__"]
    survive = getattr(script, "survive", None)  # of the template
    return {
        "rank starts": (survive, "pick_device") if survive else (script, "join"),
        "resuming": (survive.Snapshot, "load") if survive else (script, "resume"),
        "step": (torch.optim.Optimizer, "zero_grad"),
        "evaluation": (getattr(script, "Net", None) or script.GPT, "forward"),
        "writing": (torch, "save"),
        "before the move": (os, "replace"),
        "after the move": (os, "replace"),
        "the end": (survive, "leave") if survive else (script, "check_replicas"),
    }[moment]


def with_strike(function, moment, strike):
    """The function, but strike() is called in front of it, behind it, or in its middle."""

    def call(*args, **kwargs):
        if moment == "writing":
            state, file = args
            function(state, whole := io.BytesIO())
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            strike()
            return file.write(whole.getvalue()[whole.tell() // 2 :])
        if moment != "after the move" and not (moment == "evaluation" and torch.is_grad_enabled()):
            strike()
        found = function(*args, **kwargs)
        if moment == "after the move":
            strike()
        return found

    return call


def pid_of(victim):
    """Of torchrun, or of a rank, which it has started by now."""
    while victim != "launcher":
        with contextlib.suppress(OSError, ValueError):  # not yet there, or not yet whole
            return int(pathlib.Path(victim).read_text())
        time.sleep(0.01)
    return os.getppid()


def arm(moment, name, victim, count=1):
    """At the count-th such moment, the victim ("rank 1", "launcher", "job") gets the signal."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pathlib.Path(f"rank {rank}").write_text(str(os.getpid()))
    actor = int(victim[-1]) if victim.startswith("rank") else world_size - 1
    if rank != (0 if moment in SAVING else actor):
        return
    others = [f"rank {other}" for other in range(world_size) if other != rank]
    calls = itertools.count(1)

    def strike():
        if next(calls) != count or os.path.exists("struck"):
            return
        open("struck", "x").close()
        job = ["launcher", *others, f"rank {rank}"]  # itself last
        for its in job if victim == "job" else [victim]:
            with contextlib.suppress(ProcessLookupError):  # torchrun may have been faster
                os.kill(pid_of(its), signal.Signals[name])

    owner, function = place_of(moment)
    setattr(owner, function, with_strike(getattr(owner, function), moment, strike))
