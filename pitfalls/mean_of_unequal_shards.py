"""Batches of different sizes on the ranks: DDP's mean is not the gradient of the whole batch.

    torchrun --standalone --nproc-per-node=2 pitfalls/mean_of_unequal_shards.py
    torchrun --standalone --nproc-per-node=2 pitfalls/mean_of_unequal_shards.py --fixed

You see a batch of ten samples, eight on rank 0 and two on rank 1. The loss of each rank is the mean
over its own samples, and DDP takes the mean of the ranks' gradients. So a sample on rank 1 counts
four times as much as one on rank 0. This happens when the number of ranks does not divide the
batch, in the last batch of an epoch, and with sequences of different lengths.

Recognise it: nothing fails. The training differs from that of one process by more than rounding.
Print how many items the loss is a mean of on each rank: samples, labels, or tokens without padding.
Cure, exact for any batch that does not divide evenly: multiply the loss by
    own count * world_size / count over all ranks
before backward(). DDP's mean is then the gradient of the whole batch.
"""

import argparse
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by DDP, it would keep the group open to the end
from torch.nn.parallel import DistributedDataParallel as DDP


def broken(model, samples):
    loss = (model(samples) ** 2).mean()
    loss.backward()  # the mistake: DDP gives all ranks the same weight, not all samples


def fixed(model, samples):
    loss = (model(samples) ** 2).mean()
    count = torch.tensor(len(samples))
    dist.all_reduce(count)
    weight = len(samples) * dist.get_world_size() / count  # 1.6 on rank 0, 0.4 on rank 1
    (weight * loss).backward()  # the cure: all samples have the same weight


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    off = show_gradients(fixed if cure else broken)
    if not (off < 1e-5 if cure else off > 0.1):
        raise RuntimeError(f"gradient off by {off:.1e}")
    log(f"{'cured' if cure else 'symptom'}: gradient {off:.1e} of its length off one process's")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def show_gradients(backward):
    """Return how far the gradient is off that of one process, relative to its length."""
    torch.manual_seed(0)  # the same samples and weights on both ranks
    samples, model = torch.randn(10, 20), torch.nn.Linear(20, 1)
    whole, _ = torch.autograd.grad((model(samples) ** 2).mean(), model.parameters())  # no DDP
    own = samples.split([8, 2])[dist.get_rank()]
    log(f"{len(own)} of {len(samples)} samples", every_rank=True)
    backward(DDP(model), own)
    return ((model.weight.grad - whole).norm() / whole.norm()).item()


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
