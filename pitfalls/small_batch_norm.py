"""Batch norm with few images on a rank: each rank normalises by its own images alone.

    torchrun --standalone --nproc-per-node=4 pitfalls/small_batch_norm.py
    torchrun --standalone --nproc-per-node=4 pitfalls/small_batch_norm.py --fixed

You see 8 images with 3 features each go through batch norm, two images on each of four ranks. DDP
averages gradients. It does not average the mean and the variance inside a batch norm layer: each
rank uses those of its own two images. With two images, batch norm turns each feature into about +1
and -1, whatever the images show.

Recognise it: nothing fails. The same global batch trains worse, the more ranks share it.
Cure on GPUs: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), before DDP. It refuses a
CPU, so the cure below does by hand what it does in the forward pass. (It also does the backward
pass.) On any device: nn.GroupNorm or nn.LayerNorm, which normalise each image by itself.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def broken(norm, images):
    return norm(images)  # the mistake: mean and variance of the two images on this rank


def fixed(norm, images):  # the cure on a CPU: what SyncBatchNorm does on GPUs
    count = torch.full((3,), float(len(images)))
    sums = torch.stack([images.sum(0), (images**2).sum(0), count])
    dist.all_reduce(sums)
    mean, mean_of_squares = sums[:2] / sums[2]
    return (images - mean) / (mean_of_squares - mean**2 + norm.eps).sqrt()


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    images = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))  # equal on all ranks
    norm = torch.nn.BatchNorm1d(3, affine=False)
    own, expected = (tensor.chunk(4)[dist.get_rank()] for tensor in (images, norm(images)))
    if cure:
        try:
            torch.nn.SyncBatchNorm(3)(own)
        except ValueError as error:
            log(f"on a CPU: {error}")
    output = (fixed if cure else broken)(norm, own)
    log(f"feature 0: {output[:, 0]}; one process: {expected[:, 0]}", every_rank=True)
    off = (output - expected).abs().max()
    dist.all_reduce(off, dist.ReduceOp.MAX)
    if not (off < 1e-5 if cure else off > 0.1):
        raise RuntimeError(f"off by {off:.1e}")
    log(f"{'cured' if cure else 'symptom'}: outputs are off one process's by up to {off:.1e}")
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
