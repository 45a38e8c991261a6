"""What torchrun starts in place of a script: the script, with a signal sent at a chosen moment.

fault_campaign.py gives it the plan of a round. The scripts know nothing of this: a function that
they call is replaced by one that counts its calls, and sends the signal at the planned one.
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import pathlib
import signal
import sys
import time


def place_of(moment, script):
    """(owner, name) of the function that is called at that moment."""
    import torch  # not before the script, which must ask for its parent first

    survive = getattr(script, "survive", None)  # of the template
    return {
        "rank starts": (survive or script, "pick_device"),
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
    import torch

    def call(*args, **kwargs):
        if moment == "writing":
            state, file = args
            whole = io.BytesIO()
            function(state, whole)
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            strike()
            file.write(whole.getvalue()[whole.tell() // 2 :])
        elif moment == "after the move":
            function(*args)
            strike()
        else:
            if moment != "evaluation" or not torch.is_grad_enabled():
                strike()
            return function(*args, **kwargs)

    return call


def strike_once(plan, folder):
    """Send the signal to the victim, unless an earlier attempt has done so."""
    try:
        (folder / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    mine = f"rank {os.environ['RANK']}"
    ranks = [f"rank {rank}" for rank in range(plan["world_size"])]
    everybody = ["launcher", *sorted(ranks, key=mine.__eq__)]  # itself last
    for victim in everybody if plan["victim"] == "job" else [plan["victim"]]:
        with contextlib.suppress(ProcessLookupError):  # torchrun may have been faster
            os.kill(pid_of(victim, folder), signal.Signals[plan["signal"]])


def pid_of(victim, folder):
    """Of torchrun, or of a rank, which it has started by now."""
    while victim != "launcher":
        with contextlib.suppress(OSError, ValueError):  # not yet there, or not yet whole
            return int((folder / victim).read_text())
        time.sleep(0.01)
    return os.getppid()


def main():
    plan, folder, *sys.argv = sys.argv[1:]
    plan, folder, rank = json.loads(plan), pathlib.Path(folder), int(os.environ["RANK"])
    (folder / f"rank {rank}").write_text(str(os.getpid()))
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    script = importlib.import_module(pathlib.Path(sys.argv[0]).stem)
    if hasattr(script, "REPORT_EVERY"):
        script.REPORT_EVERY = 1  # so that repeated work can be counted
    calls = itertools.count(1)

    def strike():
        if next(calls) == plan["count"]:
            strike_once(plan, folder)

    if rank == plan["actor"] and plan["moment"] != "import":
        owner, name = place_of(plan["moment"], script)
        setattr(owner, name, with_strike(getattr(owner, name), plan["moment"], strike))
    script.main()


if __name__ == "__main__":
    main()
