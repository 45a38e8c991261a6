"""A pause on one rank that is longer than the timeout: the others fail, though nothing is broken.

    torchrun --standalone --nproc-per-node=2 pitfalls/slow_rank.py
    torchrun --standalone --nproc-per-node=2 pitfalls/slow_rank.py --fixed

You see rank 1 pause for 5 seconds, as it may to save or to fetch data. Rank 0 waits for it in an
all_reduce. The timeout is 3 seconds here (by default 10 minutes with "nccl", else 30), so rank 0
gives up.

Recognise it: a timeout where one rank has more to do: it validates, saves or downloads. The rank
that waited reports the timeout. The slow one then says "Connection closed by peer".
Cure: wait for the slow rank in a group of its own, with a longer timeout and the Gloo backend (also
beside NCCL). Gloo's monitored_barrier also names the rank that does not come in time: "Rank 1
failed to pass monitoredBarrier in 10000 ms". Set the timeout twice: rank 0 uses that of the
barrier, the other ranks use that of the group.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def broken(ranks):
    if dist.get_rank() == 1:
        work_for_5_seconds()
    dist.all_reduce(ranks)  # the mistake: the timeout of 3 seconds holds for the pause, too


def fixed(ranks):
    longer = timedelta(seconds=30)
    # The cure: a group that is more patient. All ranks make it, once, at the start of the job.
    patient = dist.new_group(backend="gloo", timeout=longer)
    if dist.get_rank() == 1:
        work_for_5_seconds()
    dist.monitored_barrier(patient, timeout=longer)  # the cure: wait for the pause here
    dist.all_reduce(ranks)


def work_for_5_seconds():
    time.sleep(5)
    log("back from a pause of 5 s", every_rank=True)


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    ranks = torch.tensor(1)
    try:
        (fixed if cure else broken)(ranks)
    except RuntimeError as error:
        if cure:
            raise
        reason = str(error).rpartition("] ")[2].partition(". ")[0]
        log(f"symptom: all_reduce failed: {reason}", every_rank=True)
        dist.destroy_process_group()  # with Gloo only: after an error, NCCL could wait here
        return
    if not cure or ranks != 2:
        raise RuntimeError(f"all_reduce over {ranks} ranks, and rank 0 did not give up")
    log(f"cured: all_reduce over {ranks} ranks, after a pause that is longer than the timeout")
    dist.destroy_process_group()


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    main(args.fixed)
