"""DDP(model)(x), with nothing that keeps the wrapper: no gradient is averaged, and nothing says so.

    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_not_kept.py
    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_not_kept.py --fixed

You see a gradient of 1 on rank 0 and of 3 on rank 1, whose mean is 2. What averages them belongs to
the DDP object: when nothing refers to that any more as backward() is called, nobody does it.

Recognise it: nothing fails, and the replicas drift apart: compare the weights of the ranks after a
step, as the scripts here do at their end. A function that wraps the model, and returns the model
instead of the wrapper, does the same.
Cure: keep the wrapper in a variable for as long as you train.
"""

import argparse
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    gradients = [None, None]
    dist.all_gather_object(gradients, gradient_of_one_step(fixed))
    if gradients != ([2, 2] if fixed else [1, 3]):
        raise RuntimeError(f"gradients {gradients}")
    log(f"{'cured' if fixed else 'symptom'}: gradients {gradients} on the two ranks; mean 2")
    gc.collect()  # else what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def gradient_of_one_step(fixed):
    layer = torch.nn.Linear(1, 1, bias=False)
    images = torch.tensor([[1.0 + 2 * dist.get_rank()]])
    model = DDP(layer)
    output = model(images)
    if not fixed:
        del model  # the mistake: as at the end of DDP(layer)(images), or of a function
    output.sum().backward()
    return layer.weight.grad.item()


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
