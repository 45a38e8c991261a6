"""nohup torchrun, and the terminal closed: the job ends all the same.

    python pitfalls/closed_terminal.py
    python pitfalls/closed_terminal.py --fixed

You see a job of two workers (the processes that torchrun starts), started with nohup, which ignores
the signal SIGHUP. Then torchrun gets SIGHUP, as when a terminal or an ssh connection is closed. But
torchrun installs a handler of its own for it, and so undoes what nohup did: it ends the workers.

Recognise it: "SignalException: Process ... got signal: 1" at the end of the output, at the time at
which somebody closed a laptop.
Cure: nohup, and take SIGHUP from the signals that torchrun handles, as here. (Without nohup, that
is worse: SIGHUP kills torchrun alone, and its workers live on.) Or start the job where no terminal
can take it along: in tmux, by setsid, or by Slurm.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def broken():
    return start_job(TORCHRUN)  # the mistake: torchrun undoes what nohup did


def fixed():
    return start_job([*TORCHRUN, "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT"])  # the cure


def start_job(torchrun):
    """Start this file as a job."""
    return subprocess.Popen(
        ["nohup", *torchrun, *sys.argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def worker():
    print("worker: training\n", end="", flush=True)
    while not os.path.exists(os.environ["SIGNALLED"]):  # the other one may start later
        time.sleep(0.1)
    time.sleep(5)  # stands for training
    print("worker: done\n", end="", flush=True)


def main(cure):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SIGNALLED"] = os.path.join(folder, "signalled")
        follow((fixed if cure else broken)(), cure)


def follow(job, cure):
    lines = []
    for line in job.stdout:
        lines.append(line.strip())
        if line.startswith("worker: "):
            print(line, end="")
        if lines.count("worker: training") == 2 and line.startswith("worker: training"):
            job.send_signal(signal.SIGHUP)
            print("SIGHUP to torchrun")
            open(os.environ["SIGNALLED"], "w").close()
    status, last = job.wait(), [line for line in lines if "SignalException: " in line][-1:]
    done = lines.count("worker: done")
    if done != (2 if cure else 0) or bool(status) == cure or bool(last) == cure:
        raise RuntimeError(f"exit status {status}: {lines}")
    if cure:
        print("cured: both workers trained to the end")
    else:
        message = last[0].rpartition("api.")[2].replace(str(job.pid), "...")
        print(f"symptom: no worker trained to the end; {message}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if "RANK" in os.environ:  # this process is a worker
        worker()
    else:
        main(args.fixed)
