"""DistributedSampler in the evaluation, or a mean of the ranks' means: a wrong accuracy.

    torchrun --standalone --nproc-per-node=4 pitfalls/padded_evaluation.py
    torchrun --standalone --nproc-per-node=4 pitfalls/padded_evaluation.py --fixed

You see which of ten test images each of four ranks counts. DistributedSampler gives all ranks the
same number of images: it repeats some (or leaves some out, with drop_last=True). Without it, the
shares differ in size. A mean of the ranks' means then gives an image in a small share more weight.
Each of the two mistakes alone changes the accuracy.

Recognise it: nothing fails. The accuracy (or loss) of one checkpoint changes with the number of
ranks. The effect is large with few images and many ranks.
Cure: give each rank every world_size-th image, without padding. All-reduce the sums, then divide
once by the number of images.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

RIGHT = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0, 1, 0.0])  # 1: the model is right about that image


def broken():
    share = list(DistributedSampler(RIGHT, shuffle=False))  # the mistake: two images come twice
    accuracy = RIGHT[share].mean()
    dist.all_reduce(accuracy)
    return share, accuracy / dist.get_world_size()


def broken_too():
    share = list(range(dist.get_rank(), len(RIGHT), dist.get_world_size()))
    accuracy = RIGHT[share].mean()  # the mistake: a mean of 3 images on two ranks, of 2 on two
    dist.all_reduce(accuracy)
    return share, accuracy / dist.get_world_size()


def fixed():
    share = list(range(dist.get_rank(), len(RIGHT), dist.get_world_size()))
    right = RIGHT[share].sum()  # the cure: add up first ...
    dist.all_reduce(right)
    return share, right / len(RIGHT)  # ... and divide once


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    functions = {"by sums": fixed} if cure else {"padded": broken, "as a mean of means": broken_too}
    expected, found = f"{RIGHT.mean():.4f}", []  # expected: one process, all images
    for name, evaluate_share in functions.items():
        share, accuracy = evaluate_share()
        log(f"images {share}: {RIGHT[share].sum():g} of {len(share)} right", every_rank=True)
        if (f"{accuracy:.4f}" == expected) != cure:
            raise RuntimeError(f"accuracy {accuracy:.4f} {name}; one process: {expected}")
        found.append(f"{accuracy:.4f} {name}")
    log(f"{'cured' if cure else 'symptom'}: accuracy {', '.join(found)}; one process: {expected}")
    dist.destroy_process_group()


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        parser.error(f"start it with torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    main(args.fixed)
