"""DistributedSampler without set_epoch: every epoch repeats the order of the first one.

    torchrun --standalone --nproc-per-node=2 pitfalls/no_set_epoch.py
    torchrun --standalone --nproc-per-node=2 pitfalls/no_set_epoch.py --fixed

You see the first items that each rank draws in three epochs. The sampler shuffles with the seed
"seed + epoch", and its epoch stays 0 until you set it. So shuffle=True shuffles only once: every
epoch has the same batches in the same order, and each rank sees its own half of the data only.

Recognise it: nothing fails. The loss curve has the same bumps in every epoch. The result is a bit
worse than that of one process, whose DataLoader shuffles anew each time. Print the first indices
(or the labels of the first batch) of two epochs: they must differ.
Cure: call sampler.set_epoch(epoch) before the loop over the loader in each epoch.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def broken(sampler, loader):
    orders = []
    for epoch in range(3):
        # The mistake: nothing tells the sampler that a new epoch begins.
        orders.append(torch.cat(list(loader)).tolist())
        log(f"epoch {epoch}: items {str(orders[-1][:8])[:-1]}, ...", every_rank=True)
    return orders


def fixed(sampler, loader):
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)  # the cure
        orders.append(torch.cat(list(loader)).tolist())
        log(f"epoch {epoch}: items {str(orders[-1][:8])[:-1]}, ...", every_rank=True)
    return orders


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    sampler = DistributedSampler(range(1000), shuffle=True)
    loader = DataLoader(range(1000), batch_size=10, sampler=sampler)
    orders = (fixed if cure else broken)(sampler, loader)
    distinct, seen = len(set(map(tuple, orders))), len(set().union(*orders))
    if distinct != (3 if cure else 1) or (seen > 500) != cure:
        raise RuntimeError(f"{distinct} different orders, {seen} different items")
    dist.barrier()  # both ranks have found what they should
    log(
        f"{'cured' if cure else 'symptom'}: {distinct} different order{'s' if cure else ''} in 3"
        f" epochs; rank 0 saw {seen} of the 1000 items"
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
