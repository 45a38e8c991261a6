"""DDP(model)(x), with nothing that keeps the wrapper: no gradient is averaged, and nothing says so.

    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_not_kept.py
    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_not_kept.py --fixed

You see a gradient of 1 on rank 0 and of 3 on rank 1; their mean is 2. What averages the gradients
belongs to the DDP object. If no variable holds that object when backward() runs, Python has already
deleted it, and nothing averages them.

Recognise it: nothing fails, and the weights of the ranks drift apart. Compare them after a step, as
the scripts of this collection do at their end. A function that wraps the model and returns the
model instead of the wrapper makes the same mistake.
Cure: keep the wrapper in a variable for as long as you train.
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


def broken(layer, images):
    output = DDP(layer)(images)  # the mistake: the wrapper is gone after this line
    output.sum().backward()


def fixed(layer, images):
    model = DDP(layer)  # the cure: a variable holds the wrapper
    output = model(images)
    output.sum().backward()


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    layer = torch.nn.Linear(1, 1, bias=False)
    images = torch.tensor([[1.0 + 2 * dist.get_rank()]])  # 1 on rank 0, 3 on rank 1
    (fixed if cure else broken)(layer, images)
    gradients = [None, None]
    dist.all_gather_object(gradients, layer.weight.grad.item())
    if gradients != ([2, 2] if cure else [1, 3]):
        raise RuntimeError(f"gradients {gradients}")
    log(f"{'cured' if cure else 'symptom'}: gradients {gradients} on the two ranks; mean 2")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
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
