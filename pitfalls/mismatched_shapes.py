"""Tensors of different shapes in one all_reduce: no error, a wrong sum, and a rank that waits.

    torchrun --standalone --nproc-per-node=2 pitfalls/mismatched_shapes.py
    torchrun --standalone --nproc-per-node=2 pitfalls/mismatched_shapes.py --fixed

You see each rank count its labels with bincount. It returns 4 counts on rank 0 and 3 on rank 1. The
all_reduce gives rank 1 a wrong sum and no error. Rank 0 waits in it until the timeout.

Recognise it: wrong sums, a hang, or an abort ("Received data size doesn't match expected size");
which of them depends on the sizes. With TORCH_DISTRIBUTED_DEBUG=DETAIL in front of the command, the
error is "Detected mismatch between collectives on ranks", with both shapes. (On a CPU, DDP()
crashes with DETAIL, in torch 2.11 to 2.15.)
Cure: agree on one length first, then pad. If you know the number of classes, it is simpler:
bincount(labels, minlength=4). To gather tensors of different lengths: gather the lengths, pad to
the longest, gather, cut.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def broken(labels):
    counts = torch.bincount(labels)  # the mistake: the largest label here decides the length
    log(f"own labels: {counts.tolist()}", every_rank=True)
    dist.all_reduce(counts)
    return counts


def fixed(labels):
    counts = torch.bincount(labels)
    length = torch.tensor(len(counts))
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    counts = pad(counts, (0, length - len(counts)))  # the cure: the same length on all ranks
    log(f"own labels: {counts.tolist()}", every_rank=True)
    dist.all_reduce(counts)
    return counts


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    labels = torch.tensor([[0, 1, 1, 2, 3, 3, 3], [0, 0, 1, 1, 1, 2, 2]][dist.get_rank()])
    try:
        counts = (fixed if cure else broken)(labels)
    except RuntimeError as error:
        if cure:
            raise
        log(f"symptom: all_reduce failed: {str(error).rpartition('] ')[2]}")
        dist.destroy_process_group()  # with Gloo only: after an error, NCCL could wait here
        return
    log(
        f"{'cured' if cure else 'no error'}: together {counts.tolist()},"
        f" {counts.sum()} of 14 labels",
        every_rank=True,
    )
    if (counts.tolist() == [3, 5, 3, 3]) != cure or dist.get_rank() == 0 and not cure:
        raise RuntimeError("this is neither the symptom nor the cure")
    if not cure:
        time.sleep(5)  # rank 1 goes on with its wrong sum
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
