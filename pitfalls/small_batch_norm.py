"""Batch norm with few images on a rank: each rank normalises by its own images alone.

    torchrun --standalone --nproc-per-node=4 pitfalls/small_batch_norm.py
    torchrun --standalone --nproc-per-node=4 pitfalls/small_batch_norm.py --fixed

You see 8 images with 3 features each, two images on each of four ranks, go through batch norm. DDP
averages gradients, not the mean and variance inside a layer: each rank takes those of two images.
Of two, batch norm makes about +1 and -1 in each feature, whatever they show.
Recognise it: nothing fails. The same global batch trains worse the more ranks share it.
Cure, on GPUs: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), before DDP (not run
here: it refuses a CPU). What it does in forward is made by hand below; it does backward as well.
Anywhere: nn.GroupNorm or nn.LayerNorm, which normalise each image by itself.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    images = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    norm = torch.nn.BatchNorm1d(3, affine=False)
    own, expected = (tensor.chunk(4)[dist.get_rank()] for tensor in (images, norm(images)))
    output = norm(own)  # the mistake: mean and variance of own images only
    if fixed:
        try:
            torch.nn.SyncBatchNorm(3)(own)
        except ValueError as error:
            log(f"on a CPU: {error}")
        sums = torch.stack([own.sum(0), (own**2).sum(0), torch.full((3,), len(own))])
        dist.all_reduce(sums)
        mean, mean_of_squares = sums[:2] / sums[2]
        output = (own - mean) / (mean_of_squares - mean**2 + norm.eps).sqrt()
    log(f"feature 0: {output[:, 0]}; one process: {expected[:, 0]}", every_rank=True)
    off = (output - expected).abs().max()
    dist.all_reduce(off, dist.ReduceOp.MAX)
    if not (off < 1e-5 if fixed else off > 0.1):
        raise RuntimeError(f"off by {off:.1e}")
    log(f"{'cured' if fixed else 'symptom'}: outputs are off one process's by up to {off:.1e}")
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
