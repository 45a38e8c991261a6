"""Workers that torchrun starts again read the addresses of the dead: restarts fail, by chance.

    python pitfalls/stale_addresses.py
    python pitfalls/stale_addresses.py --fixed

You see jobs in which rank 1 is killed once. One restart should be enough. But torchrun keeps one
store for all attempts, with the addresses that the ranks of the first attempt left there. A rank
that looks up the other one before that has left its new address finds the old one. It cannot
connect, and the attempt fails. This is a matter of chance: jobs start until one needs more than one
restart, which can take a minute or two.

Recognise it: after a restart "Gloo connectFullMesh failed ... Connection refused" or "Connect
timeout"; all restarts used up at once; or a job that hangs in init_process_group.
Cure on one machine: a prefix in the store for each attempt. On several machines, whose attempts can
have different numbers: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun.
Each attempt then gets a new store.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def broken(timeout):
    dist.init_process_group("gloo", timeout=timeout)  # the mistake: no prefix for the attempt


def fixed(timeout):
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"attempt {attempt}", store)  # the cure: the dead used another prefix
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def worker(meet):
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"attempt {attempt}\n", end="", flush=True)
    meet(timedelta(seconds=3))
    dist.all_reduce(torch.ones(1))
    if attempt == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()


def main(cure):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    clean, jobs = 0, 0
    while clean == jobs < (4 if cure else 20):
        command = [*torchrun, "--max-restarts=3", *sys.argv]
        job = subprocess.run(command, check=False, capture_output=True, text=True)
        jobs += 1
        restarts = max(re.findall(r"^attempt (\d)", job.stdout, re.MULTILINE))
        lost = re.findall("Gloo connectFullMesh failed.*", job.stderr)
        refused = sum("Connection refused" in line for line in lost)
        print(
            f"job {jobs}: status {job.returncode}, restarts {restarts}, {len(lost)} lines 'Gloo"
            f" connectFullMesh failed', {refused} with 'Connection refused'",
            flush=True,
        )
        clean += (job.returncode, restarts) == (0, "1")
    if cure != (clean == jobs):
        raise RuntimeError(f"{clean} of {jobs} jobs went on after one restart")
    print(f"{'cured' if cure else 'symptom'}: {clean} of {jobs} jobs went on after one restart")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        worker(fixed if args.fixed else broken)
    else:
        main(args.fixed)
