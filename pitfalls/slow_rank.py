"""A pause on one rank that is longer than the timeout: the others die, though nothing is broken.

    torchrun --standalone --nproc-per-node=2 pitfalls/slow_rank.py
    torchrun --standalone --nproc-per-node=2 pitfalls/slow_rank.py --fixed

You see rank 1 pause for 5 seconds, to save or to fetch data, while rank 0 waits in an all_reduce.
The timeout is 3 seconds here, 10 (NCCL) to 30 minutes (Gloo) by default: rank 0 gives up.

Recognise it: a timeout where one rank has more to do: validating, saving, downloading. The rank
that waited reports it; the slow one, back again, says "Connection closed by peer".
Cure: wait for the pause in a Gloo group (under NCCL, too) with a longer timeout of its own. Gloo's
monitored_barrier also names who is late for that ("Rank 1 failed to pass monitoredBarrier in 10000
ms"). Set the timeout twice: rank 0 goes by the barrier's, the other ranks by the group's.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
    start, ranks = time.monotonic(), torch.tensor(1)
    if dist.get_rank() == 1:
        time.sleep(5)
        log("back from a pause of 5 s", every_rank=True)
    if fixed:  # the mistake: without this, the next collective waits for the pause
        dist.monitored_barrier(patient, timeout=timedelta(seconds=10))
    try:
        dist.all_reduce(ranks)
    except RuntimeError as error:
        if fixed:
            raise
        reason = str(error).rpartition("] ")[2].partition(". ")[0]
        return log(f"symptom: all_reduce failed: {reason}", every_rank=True)
    if not fixed:
        raise RuntimeError("rank 0 has waited longer than its timeout")
    log(f"cured: all_reduce over {ranks} ranks, {time.monotonic() - start:.0f} s after the start")
    dist.destroy_process_group()


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
