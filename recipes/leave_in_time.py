"""How do I save and leave in time when SIGTERM comes, losing no step?

    asked = flag_on_sigterm()  # before the loop
    flags = dist.new_group(backend="gloo", timeout=timedelta(minutes=10))  # over the CPU
    loader = DataLoader(dataset, num_workers=2, worker_init_fn=ignore_sigterm,
                        multiprocessing_context="fork")

    if step % ASK_EVERY == 0 and any_rank(asked.is_set(), flags):  # at the end of a step
        save(step)  # as in your script: rank 0, say
        dist.barrier(group=flags)  # wait for it: once one rank has left, torchrun ends the others
        return 128 + signal.SIGTERM  # not 0, which says that the job has done its work

    gc.collect()  # when the function that has your model has returned: its DDP could abort the exit
    dist.destroy_process_group()
    sys.exit(status)  # what it returned

SIGTERM is how a job is asked to end: by kill, by Slurm at its time limit, by Kubernetes, by a
machine that shuts down. torchrun passes it on to its ranks (processes), and kills what is still
there after 30 s. So each rank notes the signal, and after some steps all ask each other whether one
has noted it: they leave after the same step. torchrun signals the loader's workers (processes that
read data), too. If one ends, its rank fails, so they have to ignore the signal. (On a Mac they
cannot: take num_workers=0 there, without the last two arguments.)

Only some of the ranks may get the signal, say those of one machine. Then each other machine's
torchrun takes the first rank that leaves for a failed one. It kills the rest after 30 s, in the
middle of a longer save. Hence the barrier.

    python recipes/leave_in_time.py

    [rank 0/2] no handler             60 steps done,  40 saved: 20 lost
    [rank 0/2] asks after each epoch 224 steps done, 200 saved: 24 lost; killed after 10 s
    [rank 0/2] workers get SIGTERM    60 steps done,  40 saved: 20 lost; a worker had ended
    [rank 0/2] asks in each step      61 steps done,  61 saved:  0 lost
    [rank 0/2] leaves without waiting 61 steps done,  40 saved: 21 lost; killed after 30 s
    [rank 0/2] waits for the save     61 steps done,  61 saved:  0 lost
    [rank 0/2] SIGTERM after step 60 of 1000, a snapshot after every 40: the right ways lose nothing

Each line is a job of two ranks. SIGTERM comes in an epoch of 1000 steps: in the first four jobs to
torchrun, in the last two to rank 1 alone, and there the last save takes 40 s or more. In place of
torchrun's 30 s, the second has 10 (torch 2.11 knows 30 alone). Choose ASK_EVERY so that so
many steps, or your evaluation, and a save fit into the 30 s. Since torch 2.12, torchrun
--shutdown-timeout=120 (TORCH_ELASTIC_SHUTDOWN_TIMEOUT) grants more (but when a machine joins the
job, or a rank has failed, it is always 30 s). Whoever sends SIGTERM to torchrun has a time of his
own: 30 s in Kubernetes (terminationGracePeriodSeconds) and in Slurm (KillWait), 10 s in Docker
(docker stop -t). Slurm can begin before its limit: launch/slurm.sbatch. In a container, only the
first process gets SIGTERM: start torchrun there by exec. A rank that waits for a dead one in a
collective call does not run its handler. What ends such a rank in time: leave_on_sigterm in
template/survive.py.
"""

import gc
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
GRACE = {"asks after each epoch": 10}  # seconds, not torchrun's 30; torch 2.11 keeps to these
LONG_SAVE = {"leaves without waiting": 90, "waits for the save": 40}  # seconds; torchrun waits 30
WAYS = [
    "no handler",
    "asks after each epoch",
    "workers get SIGTERM",
    "asks in each step",
    "leaves without waiting",
    "waits for the save",
]
TO_ONE_RANK = WAYS[4:]
KILLED = "forcefully exiting"  # what torchrun prints then
SIGNS = {  # what a job prints, and what that means
    "asks after each epoch": (KILLED, "; killed after {:.0f} s"),
    # A traceback from the loader: mostly "DataLoader worker (pid ...) is killed by signal:
    # Terminated", or ConnectionResetError if the worker ended while it handed over a batch.
    "workers get SIGTERM": ("torch/utils/data/", "; a worker had ended"),
    "leaves without waiting": (KILLED, "; killed after {:.0f} s"),
}


def flag_on_sigterm():
    """Return an Event that SIGTERM sets. Ask it with is_set(), after a step: not in the handler,
    which runs between any two instructions, when half of the weights may be updated."""
    asked = threading.Event()
    # A second one, inside set(), would wait for its lock for ever. (Not SIG_IGN: a program that you
    # start later, to copy the file, say, would ignore SIGTERM, too.)
    signal.signal(
        signal.SIGTERM, lambda *_: (signal.signal(signal.SIGTERM, lambda *_: None), asked.set())
    )
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
    """One rank, its status. Of WAYS, two are right: "asks in each step", "waits for the save"."""

    def save(step):  # rank 0, beside the old file, then moved over it
        if dist.get_rank() == 0:
            time.sleep(LONG_SAVE.get(way, 0.2) if step % SAVE_EVERY else 0.2)
            torch.save({"step": step}, f"{path}.new")
            os.replace(f"{path}.new", path)

    flags = dist.new_group(backend="gloo", timeout=timedelta(minutes=10))
    if way != "no handler":
        asked = flag_on_sigterm()
    loader = DataLoader(
        range(2 * STEPS),
        batch_size=2,
        num_workers=1,
        worker_init_fn=None if way == "workers get SIGTERM" else ignore_sigterm,
        multiprocessing_context="fork",
    )
    for step, batch in enumerate(loader, 1):
        dist.all_reduce(batch.float())  # your step: DDP waits for all ranks in each backward()
        time.sleep(0.05)
        print(f"step {step} of rank {dist.get_rank()}, {os.getpid()}\n", end="", flush=True)
        if way in ("no handler", "asks after each epoch"):
            pass
        elif step % ASK_EVERY == 0 and any_rank(asked.is_set(), flags):
            save(step)
            if way != "leaves without waiting":
                dist.barrier(group=flags)  # until rank 0 has saved
            return 128 + signal.SIGTERM
        if step % SAVE_EVERY == 0:
            save(step)
    if way == "asks after each epoch" and any_rank(asked.is_set(), flags):
        save(step)


def main():
    lost = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(WAYS)) as pool:
        jobs = {
            way: pool.submit(run_job, way, os.path.join(folder, f"{way}.pt")) for way in WAYS
        }  # side by side: mostly they wait
        for way, job in jobs.items():
            done, saved, end = job.result()
            lost[way] = done - saved
            show(f"{way:<22}{done:>3} steps done, {saved:>3} saved: {lost[way]:>2} lost{end}")
    wrong = ("no handler", "workers get SIGTERM", "leaves without waiting")  # see SIGNS, too
    if lost["asks in each step"] or lost["waits for the save"] or not all(map(lost.get, wrong)):
        raise RuntimeError("this is not what this file says")
    show(
        f"SIGTERM after step {SIGNAL_AFTER} of {STEPS}, a snapshot after every {SAVE_EVERY}: the"
        " right ways lose nothing"
    )


def show(message):
    print(f"[rank 0/2] {message}")  # what rank 0 has done and saved


def run_job(way, path):
    """Start a job of two ranks, and send SIGTERM; return (steps done, saved, end)."""
    job = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            sys.argv[0],
            way,
            path,
        ],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE.get(way, 30))},
    )
    (sign, end), output, done, asked_at, seconds = SIGNS.get(way, ("", "")), "", 0, 0, 0
    asked = 1 if way in TO_ONE_RANK else 0  # the rank whose step it is
    for line in job.stdout:
        output += line
        if sign in line:
            seconds = time.monotonic() - asked_at
        if found := re.fullmatch(r"step (\d+) of rank (\d), (\d+)\n", line):
            step, rank, pid = map(int, found.groups())
            done = max(done, step)
            if (step, rank) == (SIGNAL_AFTER, asked):
                os.kill(pid if way in TO_ONE_RANK else job.pid, signal.SIGTERM)
                asked_at = time.monotonic()
    job.wait()
    if done < SIGNAL_AFTER:
        raise RuntimeError(output)
    if sign not in output or not sign and KILLED in output:  # not in time
        raise RuntimeError(f"this is not what this file says of {way}: {output}")
    return done, torch.load(path)["step"], end.format(seconds)


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by run_job()
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        status = train(*sys.argv[1:])
        gc.collect()
        dist.destroy_process_group()
        sys.exit(status)
    else:
        main()
