"""Tensors of different shapes in one all_reduce: no error, a wrong sum, and a rank that waits.

    torchrun --standalone --nproc-per-node=2 pitfalls/mismatched_shapes.py
    torchrun --standalone --nproc-per-node=2 pitfalls/mismatched_shapes.py --fixed

You see each rank count its labels with bincount, which makes 4 counts on rank 0 and 3 on rank 1.
The all_reduce gives rank 1 a wrong sum and no error; rank 0 waits in it, until the timeout.

Recognise it: wrong sums, a hang, or an abort ("Received data size doesn't match expected size"), as
the sizes have it. TORCH_DISTRIBUTED_DEBUG=DETAIL in front gives "Detected mismatch between
collectives on ranks" and both shapes. (Try it without DDP: torch 2.15 crashes in DDP() with it.)
Cure: agree on one length, then pad. Better, where it is known: bincount(labels, minlength=4). For
an all_gather of tensors of any length: gather the lengths, pad to the longest, gather, cut.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    labels = torch.tensor([[0, 1, 1, 2, 3, 3, 3], [0, 0, 1, 1, 1, 2, 2]][dist.get_rank()])
    counts = torch.bincount(labels)  # the mistake: the largest label decides on the length
    if fixed:
        longest = torch.tensor(len(counts))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        counts = pad(counts, (0, longest - len(counts)))
    log(f"own labels: {counts.tolist()}", every_rank=True)
    try:
        dist.all_reduce(counts)
    except RuntimeError as error:
        return log(f"symptom: all_reduce failed: {str(error).rpartition('] ')[2]}")
    outcome = "cured" if fixed else "no error"
    log(f"{outcome}: together {counts.tolist()}, {counts.sum()} of 14 labels", every_rank=True)
    if (counts.tolist() == [3, 5, 3, 3]) != fixed or dist.get_rank() == 0 and not fixed:
        raise RuntimeError("this is neither the symptom nor the cure")
    time.sleep(0 if fixed else 5)  # rank 1 goes on with its wrong sum
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
