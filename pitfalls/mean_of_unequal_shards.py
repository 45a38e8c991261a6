"""Batches of unequal size on the ranks: DDP's mean is not the gradient of the whole batch.

    torchrun --standalone --nproc-per-node=2 pitfalls/mean_of_unequal_shards.py
    torchrun --standalone --nproc-per-node=2 pitfalls/mean_of_unequal_shards.py --fixed

You see a batch of ten samples, eight on rank 0 and two on rank 1, as an epoch's last batch can be.
Each rank's loss is the mean over its own samples, and DDP takes the mean of both gradients: a
sample of rank 1 weighs four times as much as one of rank 0.

Recognise it: nothing fails; the training is off from one process's by more than rounding. Print
each rank's count of whatever the loss is a mean of: samples, tokens without padding, labels.
Cure: multiply the loss by own count * world_size / count of all ranks, before backward().
"""

import argparse
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def compare_gradients(fixed):
    torch.manual_seed(0)  # the same samples and weights on both ranks
    samples, model = torch.randn(10, 20), torch.nn.Linear(20, 1)
    whole, _ = torch.autograd.grad((model(samples) ** 2).mean(), model.parameters())  # no DDP
    ddp, own = DDP(model), samples.split([8, 2])[dist.get_rank()]
    dist.all_reduce(count := torch.tensor(len(own)))
    weight = len(own) * dist.get_world_size() / count if fixed else 1  # the mistake: 1
    log(f"{len(own)} of {count} samples, loss times {weight:g}", every_rank=True)
    (weight * (ddp(own) ** 2).mean()).backward()
    off = ((model.weight.grad - whole).norm() / whole.norm()).item()
    if not (off < 1e-5 if fixed else off > 0.1):
        raise RuntimeError(f"gradient off by {off:.1e}")
    log(f"{'cured' if fixed else 'symptom'}: gradient {off:.1e} of its length off one process's")


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    compare_gradients(fixed)
    gc.collect()  # else what is left of DDP can abort the process at its exit
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
