"""A data set split (or made) without a common seed: the ranks shard different data.

    torchrun --standalone --nproc-per-node=2 pitfalls/unseeded_dataset.py
    torchrun --standalone --nproc-per-node=2 pitfalls/unseeded_dataset.py --fixed

You see 1000 items split at random into 800 for training and 200 for the test, on every rank by
itself. Each rank then trains on its share of the 800, and the shares do not fit together: items are
in both or in none. And one rank tests on what another trains on: all ranks train one model.

Recognise it: nothing fails, and the test accuracy is too good. Compare a checksum of the data set
(or of the split's indices) over the ranks, at the start of the job: it must be the same.
Cure: a generator of its own, with the same seed on every rank, for all that makes or splits data.
Without any seed it is the same mistake: torch seeds each process at random.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import random_split
from torch.utils.data.distributed import DistributedSampler


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    torch.manual_seed(dist.get_rank())  # as is right for dropout and augmentation: they may differ
    # With None, random_split draws from the generator that was seeded just now.
    generator = torch.Generator().manual_seed(0) if fixed else None  # the mistake: None
    train, test = random_split(range(1000), [800, 200], generator=generator)
    log(f"test split starts with items {list(test)[:6]}", every_rank=True)

    mine = [train[index] for index in DistributedSampler(train)], list(test)
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    (trained0, tested0), (trained1, tested1) = [map(set, pair) for pair in everybodys]
    shared, leaked = len(trained0 & trained1), len((trained0 | trained1) & (tested0 | tested1))
    if (shared == leaked == 0) != fixed:
        raise RuntimeError(f"{shared} shared items, {leaked} leaked ones")
    log(f"{'cured' if fixed else 'symptom'}: {shared} items are in both training shares;"
        f" {leaked} test items were trained on")
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
