"""A batch size for each rank: with more ranks, the same learning rate trains differently.

    torchrun --standalone --nproc-per-node=4 pitfalls/learning_rate_and_world_size.py
    torchrun --standalone --nproc-per-node=4 pitfalls/learning_rate_and_world_size.py --fixed

You see an epoch of one process, then the same epoch on four ranks. 16 samples on each rank make a
global batch of 64. The epoch then has a quarter of the steps, and each step is no longer than
before, so the loss falls less far.

Recognise it: nothing fails. With more GPUs, the loss after the same number of epochs is higher.
Cure: keep the global batch, and give each rank batch // world_size samples. All steps are the same
then, up to rounding. Or multiply the learning rate by the number of ranks, with a warm-up (the
"linear scaling rule" of Goyal et al., 2017).
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

BATCH = 16


def broken(samples, rank, world_size):
    return samples[rank::world_size].split(BATCH)  # the mistake: a global batch of 16 * world_size


def fixed(samples, rank, world_size):
    return samples[rank::world_size].split(BATCH // world_size)  # the cure: a global batch of 16


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = train_an_epoch(fixed, 0, 1)
    together = train_an_epoch(fixed if cure else broken, rank, world_size)
    off = (together - alone).abs().max()
    if not (off < 1e-5 if cure else off > 0.1):
        raise RuntimeError(f"weights differ by {off:.1e}")
    log(f"{'cured' if cure else 'symptom'}: weights up to {off:.1e} off those of one process")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def train_an_epoch(split_into_batches, rank, world_size):
    """Train a model to add up the numbers of a sample; return its weights."""
    torch.manual_seed(0)  # the same samples and weights on all ranks
    samples, model = torch.randn(1024, 20), torch.nn.Linear(20, 1)
    wrapped = DDP(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = split_into_batches(samples, rank, world_size)
    for batch in batches:
        optimizer.zero_grad()
        (wrapped(batch)[:, 0] - batch.sum(1)).square().mean().backward()
        optimizer.step()
    loss = (model(samples)[:, 0] - samples.sum(1)).square().mean()
    log(
        f"global batch {world_size} x {len(batches[0])}, {len(batches)} steps an epoch:"
        f" loss {loss:.4f} after it"
    )
    return model.weight.detach()


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
