"""A tensor used before its async_op=True collective is done: an old value, and a wrong sum.

    torchrun --standalone --nproc-per-node=2 pitfalls/async_read_too_early.py
    torchrun --standalone --nproc-per-node=2 pitfalls/async_read_too_early.py --fixed

You see rank 0 put in 1, and rank 1, a second later, 2. With async_op=True, all_reduce returns at
once and works on the tensor in the background. Rank 0 does not wait for it. It reads its own 1
instead of the sum. Then it zeroes the tensor, as zero_grad() would, and rank 1 gets a sum with a 0
in it, although rank 1 does wait.

Recognise it: nothing fails. The figures change from run to run, depending on which rank is late.
They become right with async_op=False, or when a print slows the code down.
Cure: call work.wait() before anything reads or writes the tensor. Other work can go in between.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def broken(gradient):
    work = dist.all_reduce(gradient, async_op=True)
    read = gradient.item()  # the mistake: the sum is not there yet
    gradient.zero_()  # the mistake: all_reduce may still have to send what this overwrites
    work.wait()  # too late
    return read


def fixed(gradient):
    work = dist.all_reduce(gradient, async_op=True)
    work.wait()  # the cure: from here on, the tensor holds the sum
    read = gradient.item()
    gradient.zero_()
    return read


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(1)  # rank 1 is busy, and comes late
    # Rank 1 always waits, as it should: the mistake of rank 0 spoils its sum all the same.
    read = (fixed if cure or rank == 1 else broken)(torch.tensor(rank + 1.0))
    log(f"put in {rank + 1}, read {read:g}", every_rank=True)
    reads = [None, None]
    dist.all_gather_object(reads, read)
    if reads != ([3, 3] if cure else [1, 2]):
        raise RuntimeError(f"read {reads}")
    log(
        f"{'cured' if cure else 'symptom'}: the sum is 3; rank 0 read {reads[0]:g},"
        f" and rank 1, which did wait, {reads[1]:g}"
    )
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
