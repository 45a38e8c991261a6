"""A tensor touched before its async_op=True collective is done: an old value, a wrong sum.

    torchrun --standalone --nproc-per-node=2 pitfalls/async_read_too_early.py
    torchrun --standalone --nproc-per-node=2 pitfalls/async_read_too_early.py --fixed

You see rank 0 put in 1, and rank 1, a second late, 2. With async_op=True all_reduce returns at once
and works on the tensor in the background. Rank 0 does not wait: it reads its own 1 and no sum. Then
it zeroes the tensor, as zero_grad() would, and the 0 gets into the sum that rank 1 waits for.

Recognise it: nothing fails, and the figures change from run to run, with who comes late. They
become right when a print slows the code down, and with async_op=False.
Cure: work.wait() before anything reads or writes the tensor. Other work goes in between.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank = dist.get_rank()
    gradient = torch.tensor(rank + 1.0)
    if rank == 1:
        time.sleep(1)  # rank 1 is busy, and comes late
    work = dist.all_reduce(gradient, async_op=True)
    if fixed or rank == 1:  # the mistake: rank 0 leaves this out
        work.wait()
    read = gradient.item()
    if rank == 0:
        gradient.zero_()
    work.wait()  # too late
    log(f"put in {rank + 1}, read {read:g}", every_rank=True)
    reads = [None, None]
    dist.all_gather_object(reads, read)
    if reads != ([3, 3] if fixed else [1, 2]):
        raise RuntimeError(f"read {reads}")
    log(f"{'cured' if fixed else 'symptom'}: the sum is 3; rank 0 read {reads[0]:g},"
        f" and rank 1, which did wait, {reads[1]:g}")
    dist.destroy_process_group()


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
