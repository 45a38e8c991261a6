"""How do I save and leave in time when SIGTERM comes, losing no step?

    asked = flag_on_sigterm()  # before the loop
    flags = dist.new_group(backend="gloo", timeout=timedelta(minutes=10))  # over the CPU
    loader = DataLoader(dataset, num_workers=2, worker_init_fn=ignore_sigterm,
                        multiprocessing_context="fork")

    if step % ASK_EVERY == 0 and any_rank(asked.is_set(), flags):  # at the end of a step
        save(step)  # as in your script: rank 0, say
        dist.destroy_process_group()
        sys.exit(128 + signal.SIGTERM)  # not 0, which says that the job has done its work

SIGTERM is how a job is asked to end: by kill, by Slurm at its time limit, by Kubernetes, by a
machine that shuts down. torchrun passes it on to its ranks (processes), and kills what is still
there after 30 s. So each rank notes the signal, and after some steps all ask each other whether one
has noted it: they leave after the same step. torchrun signals the loader's workers (processes that
read data), too. If one ends, its rank fails, so they have to ignore the signal. (On a Mac they
cannot: take num_workers=0 there, without the last two arguments.)

    python recipes/leave_in_time.py

    [rank 0/2] no handler             60 steps done,  40 saved: 20 lost
    [rank 0/2] asks after each epoch 224 steps done, 200 saved: 24 lost; killed after 10 s
    [rank 0/2] workers get SIGTERM    60 steps done,  40 saved: 20 lost; a worker had ended
    [rank 0/2] asks in each step      60 steps done,  60 saved:  0 lost
    [rank 0/2] SIGTERM after step 60 of 1000, a snapshot after every 40: the last way loses nothing

Each line is a job of two ranks, which gets SIGTERM during an epoch of 1000 steps. In place of
torchrun's 30 s, it has 10 here (torch 2.11 knows 30 alone). Choose ASK_EVERY so that so many steps,
or your evaluation, and a save fit into the 30 s. Since torch 2.12,
TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 in torchrun's environment grants more (but when a machine joins
the job, or a rank has failed, it is always 30 s). Whoever sends SIGTERM to torchrun has a time of
his own: 30 s in Kubernetes (terminationGracePeriodSeconds) and in Slurm (KillWait), 10 s in Docker
(docker stop -t). Slurm can begin before its limit: launch/slurm.sbatch. In a container, only the
first process gets SIGTERM: start torchrun there by exec. A rank that waits for a dead one in a
collective call does not run its handler. What ends such a rank in time: leave_on_sigterm in
template/survive.py.
"""

import argparse
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

STEPS, SAVE_EVERY, SIGNAL_AFTER = 1000, 40, 60
ASK_EVERY = 1  # steps here are slow. For 100 steps a second: 100
TIMEOUT = timedelta(seconds=60)  # how long ranks wait for each other
GRACE = 10  # seconds, in place of torchrun's 30; torch 2.11 keeps to these
WAYS = {"no handler": "nothing", "asks after each epoch": "epoch",
        "workers get SIGTERM": "workers", "asks in each step": "step"}
SIGNS = {  # what torch prints, and what that means
    "epoch": ("forcefully exiting", "; killed after {:.0f} s"),
    # A traceback from the loader: mostly "DataLoader worker (pid ...) is killed by signal:
    # Terminated", or ConnectionResetError if the worker ended while it handed over a batch.
    "workers": ("torch/utils/data/", "; a worker had ended"),
}


def flag_on_sigterm():
    """Return an Event that SIGTERM sets. Ask it with is_set(), after a step: not in the handler,
    which runs between any two instructions, when half of the weights may be updated."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    # A process that is forked later, and that you end by terminate(), must obey it.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    return asked


def ignore_sigterm(worker):
    """What a loader's worker calls first: only its rank ends it, not torchrun's signal to all."""
    # If a worker ended first, its rank would fail. If a worker ignored SIGTERM from its rank, too,
    # the rank could not end after an error. And if the rank was killed in the worker's first
    # moments, PyTorch's own worker would stay for ever. (A program that the worker starts ignores
    # SIGTERM, too: end it by kill().)
    if not hasattr(signal, "sigtimedwait"):  # a Mac: torchrun's SIGTERM costs the epoch there
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank = multiprocessing.parent_process().pid

    def watch():
        while os.getppid() == rank:
            asked = signal.sigtimedwait({signal.SIGTERM}, 1)  # None after a second
            if asked and asked.si_pid == rank:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def any_rank(condition, group):
    """Return True on every rank if condition is true on any of them. All ranks must call it."""
    flag = torch.tensor(float(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag.item() > 0


def train(way, path):
    """One rank. way: "step" is the right one; "nothing", "epoch" and "workers" are wrong."""
    rank = dist.get_rank()
    flags = dist.new_group(backend="gloo", timeout=TIMEOUT)  # a timeout of its own
    if way != "nothing":
        asked = flag_on_sigterm()
    loader = DataLoader(range(2 * STEPS), batch_size=2, num_workers=1,
                        worker_init_fn=None if way == "workers" else ignore_sigterm,
                        multiprocessing_context="fork")
    for step, batch in enumerate(loader, 1):
        exchange_gradients(batch)
        if rank == 0:
            print(f"step {step}\n", end="", flush=True)
        ask = way in ("step", "workers") and step % ASK_EVERY == 0
        if ask and any_rank(asked.is_set(), flags):
            save_step(step, path)
            dist.destroy_process_group()
            sys.exit(128 + signal.SIGTERM)
        if step % SAVE_EVERY == 0:
            save_step(step, path)
    if way == "epoch" and any_rank(asked.is_set(), flags):
        save_step(step, path)


def exchange_gradients(batch):
    """Stands for your step: DistributedDataParallel waits for all ranks in each backward()."""
    dist.all_reduce(batch.float())
    time.sleep(0.05)


def save_step(step, path):
    """Stands for your save: rank 0, beside the old file, then moved over it."""
    if dist.get_rank() == 0:
        time.sleep(0.2)  # a snapshot of some GB takes longer
        torch.save({"step": step}, f"{path}.new")
        os.replace(f"{path}.new", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    if "RANK" in os.environ:
        parser.error(f"it starts its processes itself; start it with: python {sys.argv[0]}")
    lost = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        jobs = {name: pool.submit(run_job, way, os.path.join(folder, f"{way}.pt"))
                for name, way in WAYS.items()}  # side by side: mostly they wait
        for name, job in jobs.items():
            done, saved, end = job.result()
            lost[name] = done - saved
            show(f"{name:<21} {done:>3} steps done, {saved:>3} saved: {lost[name]:>2} lost{end}")
    nothing, _, workers, right = lost.values()  # the second is killed at any step: see SIGNS
    if right or not (nothing and workers):
        raise RuntimeError("this is not what this file says")
    show(f"SIGTERM after step {SIGNAL_AFTER} of {STEPS}, a snapshot after every {SAVE_EVERY}: the"
         " last way loses nothing")


# ---- Helpers that are no part of the lesson ----


def show(message):
    print(f"[rank 0/2] {message}")  # what rank 0 has done and saved


def run_job(way, path):
    """Start a job of two ranks, and send SIGTERM to torchrun; return (steps done, saved, end)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.Popen([*torchrun, sys.argv[0], way, path], text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, env={
                               **os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE)})
    (sign, end), output, done, asked_at, seconds = SIGNS.get(way, ("", "")), "", 0, 0, 0
    for line in job.stdout:
        output += line
        if sign in line:
            seconds = time.monotonic() - asked_at
        if found := re.fullmatch(r"step (\d+)\n", line):
            done = int(found[1])
            if done == SIGNAL_AFTER:
                job.send_signal(signal.SIGTERM)
                asked_at = time.monotonic()
    job.wait()
    if done < SIGNAL_AFTER:
        raise RuntimeError(output)
    if sign not in output or way == "step" and SIGNS["epoch"][0] in output:  # not in time
        raise RuntimeError(f"this is not what this file says of {way}: {output}")
    return done, torch.load(path)["step"], end.format(seconds)


def run_rank(way, path):
    dist.init_process_group("gloo", timeout=TIMEOUT)
    train(way, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) == 3:  # started by run_job()
        run_rank(*sys.argv[1:])
    else:
        main()
