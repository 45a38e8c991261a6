"""DistributedSampler in the evaluation, or a mean of the ranks' means: a wrong accuracy.

    torchrun --standalone --nproc-per-node=4 pitfalls/padded_evaluation.py
    torchrun --standalone --nproc-per-node=4 pitfalls/padded_evaluation.py --fixed

You see which of ten test images each of four ranks counts. DistributedSampler gives every rank as
many: it repeats images to fill up (with drop_last=True it leaves some out). Without that the shares
differ in size, and a mean of means gives an image of a small share more weight. Either habit alone
gives another figure than one process gets.

Recognise it: nothing fails. The accuracy (or loss) of one and the same checkpoint changes with the
number of ranks; the more ranks and the fewer images, the more.
Cure: strided shares without padding, sums all-reduced, then one division by the number of images.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

RIGHT = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0, 1, 0.0])  # 1: the model is right on that image


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    padded, strided = DistributedSampler(RIGHT, shuffle=False), range(rank, len(RIGHT), world_size)
    found = []
    for share in [strided] if fixed else [padded, strided]:  # the mistake: padded
        right = RIGHT[list(share)]
        log(f"images {list(share)}: {right.sum():g} of {len(right)} right", every_rank=True)
        value = right.sum() if fixed else right.mean()  # the mistake: mean() of unequal shares
        dist.all_reduce(value)
        found.append(f"{value / (len(RIGHT) if fixed else world_size):.4f}")
    expected = f"{RIGHT.mean():.4f}"  # one process, all images
    if (expected in found) != fixed:
        raise RuntimeError(f"accuracy {found}; of one process: {expected}")
    ways = [" by sums"] if fixed else [" padded", " as a mean of means"]
    found = ", ".join(figure + way for figure, way in zip(found, ways, strict=True))
    log(f"{'cured' if fixed else 'symptom'}: accuracy {found}; one process: {expected}")
    dist.destroy_process_group()


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit(f"start it with torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
