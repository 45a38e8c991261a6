"""A layer that a step does not use: no gradient is averaged, and only the next step fails.

    torchrun --standalone --nproc-per-node=2 pitfalls/unused_parameters.py
    torchrun --standalone --nproc-per-node=2 pitfalls/unused_parameters.py --fixed

You see a model with a layer that its forward pass leaves out, like a head for another task or a
branch not taken. DDP averages gradients by the bucket (some MB), once all in it have come. Here one
never comes, and backward() ends without a word: each rank is left with its own gradients.

Recognise it: "Expected to have finished reduction in the prior iteration", with the numbers of the
parameters, or their names with TORCH_DISTRIBUTED_DEBUG=INFO in front; after the last step nothing.
Cure: find_unused_parameters=True, at the price of a walk through the graph in each step. Cheaper:
no idle layers, or 0 * self.idle(x).sum() added to what forward() returns.
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
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    layer = torch.nn.Linear(1, 1)
    layer.idle = torch.nn.Linear(1, 1)  # has parameters, and takes no part in layer(x)
    model = DDP(layer, find_unused_parameters=fixed)  # the mistake: False, as by default
    for step in (1, 2):
        model.zero_grad()
        try:
            model(torch.tensor([[1.0 + dist.get_rank()]])).backward()
        except RuntimeError as error:
            which = str(error).partition("rank 0: ")[2].partition("\n")[0]
            return log(f"symptom: step 2: {str(error).partition(' bef')[0]} (parameters {which})")
        gradient = layer.weight.grad.item()  # 1 from rank 0, 2 from rank 1
        log(f"step {step}: gradient {gradient}", every_rank=True)
        if (gradient == 1.5) != fixed or (step == 2 and not fixed):
            raise RuntimeError("this is neither the symptom nor the cure")
    log("cured: the gradients 1 and 2 averaged to 1.5 in both steps")


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
    gc.collect()  # without it torch can abort at exit: DDP's threads would outlive Python
    dist.destroy_process_group()
