"""torchrun killed with SIGKILL: its workers live on, and nothing is left to end them.

    python pitfalls/orphans.py
    python pitfalls/orphans.py --fixed

You see two workers (the processes that torchrun starts) that report twice a second. Then torchrun
is killed with SIGKILL, as the out-of-memory killer does.

Recognise it: no job is running, yet nvidia-smi shows memory in use, a port is taken, or snapshots
change. "ps -o pid,ppid,args -u $USER" shows workers that have another parent: process 1, or a
service. End them by their pids.
Cure: each worker ends itself when its parent is gone. To stop a job, send SIGTERM to torchrun
(plain "kill"): it then ends its workers.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time

LAUNCHER = os.getppid()  # ask before you import torch: that takes seconds


def broken():
    report_for_a_minute()  # the mistake: nothing ends this worker when torchrun cannot


def fixed():
    # The cure: otherwise this worker would go on training, keep its GPU, and save over the
    # snapshots of the job that you start next.
    exit_with_launcher()
    report_for_a_minute()


def exit_with_launcher():
    """End this process when torchrun is gone."""

    def watch():
        while os.getppid() == LAUNCHER:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def report_for_a_minute():
    for step in range(120):
        print(f"worker {os.getpid()} of parent {os.getppid()}: step {step}\n", end="", flush=True)
        time.sleep(0.5)


def main(cure):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.Popen([*torchrun, *sys.argv], stdout=subprocess.PIPE, text=True)
    pids, reports = set(), 0  # of the workers; how many there were without torchrun
    for line in job.stdout:  # ends when no process is left that could print
        print(line, end="")
        pids.add(int(line.split()[1]))
        reports += job.returncode is not None
        if len(pids) == 2 and job.returncode is None:
            job.kill()  # SIGKILL
            print(f"torchrun killed: exit status {job.wait()}")
        if reports == 12:  # enough: end the orphans by their pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    if len(pids) != 2 or cure != (reports < 12):
        raise RuntimeError(f"{reports} reports from {pids}")
    outcome = "cured" if cure else "symptom"
    print(f"{outcome}: the workers reported {reports} times without torchrun")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if "RANK" in os.environ:  # this process is a worker
        (fixed if args.fixed else broken)()
    else:
        main(args.fixed)
