"""A data set split (or made) without a common seed: the ranks share out different data.

    torchrun --standalone --nproc-per-node=2 pitfalls/unseeded_dataset.py
    torchrun --standalone --nproc-per-node=2 pitfalls/unseeded_dataset.py --fixed

You see 1000 items split at random into 800 for training and 200 for the test. Each rank makes its
own split, and trains on its half of its own 800. The halves do not fit together: some items are in
both, others in none. And one rank tests on items that the other trains on. As all ranks train one
model, the model knows these test items.

Recognise it: nothing fails, and the test accuracy is too good. At the start of the job, compare a
checksum of the data set (or of the indices of the split) over the ranks: it must be the same.
Cure: a generator for everything that makes or splits data, with the same seed on every rank. Having
no seed at all is the same mistake: torch then seeds each process at random.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import random_split
from torch.utils.data.distributed import DistributedSampler


def broken():
    return random_split(range(1000), [800, 200])  # the mistake: each rank draws its own numbers


def fixed():
    generator = torch.Generator().manual_seed(0)  # the cure: the same numbers on every rank
    return random_split(range(1000), [800, 200], generator=generator)


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    torch.manual_seed(dist.get_rank())  # right for dropout and augmentation: they may differ
    train, test = (fixed if cure else broken)()
    log(f"test split starts with items {list(test)[:6]}", every_rank=True)

    own = {train[index] for index in DistributedSampler(train)}, set(test)
    pairs = [None, None]
    dist.all_gather_object(pairs, own)
    (trained0, tested0), (trained1, tested1) = pairs
    shared, leaked = len(trained0 & trained1), len((trained0 | trained1) & (tested0 | tested1))
    if (shared == leaked == 0) != cure:
        raise RuntimeError(f"{shared} shared items, {leaked} leaked ones")
    log(
        f"{'cured' if cure else 'symptom'}: {shared} items are in both training shares;"
        f" {leaked} test items were trained on"
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
