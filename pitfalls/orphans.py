"""torchrun killed with SIGKILL: its workers live on, and nobody is left to end them.

    python pitfalls/orphans.py
    python pitfalls/orphans.py --fixed

You see two workers that report twice a second, and torchrun killed, as by the out-of-memory killer.
Recognise it: no job runs, and nvidia-smi shows memory in use, a port is taken, or snapshots change.
In "ps -o pid,ppid,args -u $USER" workers have another parent: 1, or a service. End them by pid.
Cure: each worker ends once its parent is another. Stop a job with SIGTERM (plain kill) to torchrun.
"""

import argparse
import os
import subprocess
import sys
import threading
import time


def exit_with_launcher():
    """End this process once its launcher is gone, killed so that it could tell nobody."""
    # SIGKILL leaves torchrun no time to end its workers: they would train on unseen, keep their
    # GPUs, and save over the snapshots of the job that you start next.
    def watch(launcher):
        while os.getppid() == launcher:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


def report_for_a_minute(fixed):
    if fixed:  # the mistake: a worker that does without
        exit_with_launcher()
    for step in range(120):
        print(f"worker {os.getpid()} of parent {os.getppid()}: step {step}\n", end="", flush=True)
        time.sleep(0.5)


def main(fixed):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.Popen([*torchrun, *sys.argv], stdout=subprocess.PIPE, text=True)
    pids, after = set(), 0
    for line in job.stdout:  # this ends when nobody is left who could print
        print(line, end="")
        pids.add(int(line.split()[1]))
        after += job.returncode is not None
        if len(pids) == 2 and after == 0:
            job.kill()
            print(f"torchrun killed: exit status {job.wait()}")
        for pid in pids if after == 12 else ():
            os.kill(pid, 9)  # SIGKILL
    assert len(pids) == 2 and fixed == (after < 12), f"{after} reports from {pids}"
    print(f"{'cured' if fixed else 'symptom'}: the workers reported {after} times without torchrun")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    (report_for_a_minute if "RANK" in os.environ else main)(parser.parse_args().fixed)
