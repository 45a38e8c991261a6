"""DistributedSampler without set_epoch: every epoch repeats the order of the first.

    torchrun --standalone --nproc-per-node=2 pitfalls/no_set_epoch.py
    torchrun --standalone --nproc-per-node=2 pitfalls/no_set_epoch.py --fixed

You see the first items that each rank draws in three epochs. The sampler shuffles with a generator
seeded with seed + epoch, and its epoch stays 0 until somebody tells it. So shuffle=True shuffles
once: the same batches come in the same order, and a rank sees its own share of the data only.

Recognise it: nothing fails. The loss curve looks the same in every epoch, bump for bump, and the
result is a bit worse than that of one process, whose DataLoader does shuffle anew. Print the first
indices (or a batch's labels) of two epochs: they must differ.
Cure: sampler.set_epoch(epoch) before each epoch's loop; with "in loader" the order is drawn.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    sampler = DistributedSampler(range(1000), shuffle=True)
    loader = DataLoader(range(1000), batch_size=10, sampler=sampler)
    orders = []
    for epoch in range(3):
        if fixed:  # the mistake: this line is missing
            sampler.set_epoch(epoch)
        orders.append(torch.cat(list(loader)).tolist())
        log(f"epoch {epoch}: items {str(orders[-1][:8])[:-1]}, ...", every_rank=True)
    distinct, seen = len(set(map(tuple, orders))), len(set().union(*orders))
    if distinct != (3 if fixed else 1) or (seen > 500) != fixed:
        raise RuntimeError(f"{distinct} different orders, {seen} different items")
    dist.barrier()  # passed only if no rank has raised
    log(f"{'cured' if fixed else 'symptom'}: {distinct} different order{'s' * fixed} in 3 epochs;"
        f" rank 0 saw {seen} of the 1000 items")
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
