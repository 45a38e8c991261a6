"""What torchrun starts in place of a script: the script, with a signal sent at a chosen moment.

fault_campaign.py gives it the plan of a round. The scripts know nothing of this: a function that
they call is replaced by one that counts its calls, and sends the signal at the planned one.
"""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import signal
import sys
import time


def moments(script, plan):
    """{moment: (owner, name of the function that is called then, what replaces it)}."""
    import torch  # not before the script, which must ask for its parent first

    def before(function, strike, condition=lambda: True):
        def call(*args, **kwargs):
            if condition():
                strike()
            return function(*args, **kwargs)

        return call

    def without_gradients(forward, strike):
        return before(forward, strike, lambda: not torch.is_grad_enabled())

    def after(function, strike):
        def call(*args):
            function(*args)
            strike()

        return call

    def in_halves(save, strike):
        def call(state, file):
            whole = io.BytesIO()
            save(state, whole)
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
            strike()
            file.write(whole.getvalue()[whole.tell() // 2 :])

        return call

    return {
        "rank starts": (script, "pick_device", before),
        "resuming": (script, plan["resume"], before),
        "step": (torch.optim.Optimizer, "zero_grad", before),
        "evaluation": (getattr(script, plan["net"]), "forward", without_gradients),
        "writing": (torch, "save", in_halves),
        "before the move": (os, "replace", before),
        "after the move": (os, "replace", after),
        "the end": (script, "check_replicas", before),
    }


def strike_once(plan, folder):
    """Send the signal to the victim, unless an earlier attempt has done so."""
    try:
        (folder / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    pids, deadline = {"launcher": os.getppid()}, time.monotonic() + 60
    while len(pids) <= plan["world_size"]:  # torchrun has started them all by now
        for rank in range(plan["world_size"]):
            with contextlib.suppress(OSError, ValueError):  # not yet there, or not yet whole
                pids[f"rank {rank}"] = int((folder / f"rank {rank}").read_text())
        if time.monotonic() > deadline:
            raise RuntimeError(f"fault_worker.py: only {sorted(pids)} have come")
        time.sleep(0.01)
    myself_last = sorted(pids, key=lambda name: name == f"rank {os.environ['RANK']}")
    for victim in myself_last if plan["victim"] == "job" else [plan["victim"]]:
        with contextlib.suppress(ProcessLookupError):  # torchrun may have been faster
            os.kill(pids[victim], signal.Signals[plan["signal"]])


def main():
    plan, folder, *sys.argv = sys.argv[1:]
    plan, folder, rank = json.loads(plan), pathlib.Path(folder), int(os.environ["RANK"])
    (folder / f"rank {rank}").write_text(str(os.getpid()))
    spec = importlib.util.spec_from_file_location("script", sys.argv[0])
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if hasattr(script, "REPORT_EVERY"):
        script.REPORT_EVERY = 1  # so that repeated work can be counted
    calls = 0

    def strike():
        nonlocal calls
        calls += 1
        if calls == plan["count"]:
            strike_once(plan, folder)

    if rank == plan["actor"] and plan["moment"] != "torchrun starts":
        owner, name, replaced = moments(script, plan)[plan["moment"]]
        setattr(owner, name, replaced(getattr(owner, name), strike))
    script.main()


if __name__ == "__main__":
    main()
