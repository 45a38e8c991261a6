"""A layer used twice under reentrant checkpointing: DDP averages half of its gradient, in silence.

    torchrun --standalone --nproc-per-node=2 pitfalls/reentrant_checkpoint.py
    torchrun --standalone --nproc-per-node=2 pitfalls/reentrant_checkpoint.py --fixed

You see a layer that the forward pass uses twice, each time with its activations recomputed in
backward() instead of kept. The reentrant kind runs a backward pass of its own for each use. After
the first of them, DDP takes the layer's gradient for complete and averages it. What the second adds
on each rank stays there. The right gradient is that of one process with the rows of both ranks.

Recognise it: weights of the ranks that drift apart without an error; or, if the model was wrapped
with find_unused_parameters=True, "Expected to mark a variable ready only once".
Cure: checkpoint(..., use_reentrant=False). If a library asks for the reentrant kind, and each step
uses the same layers as often: DDP(model, static_graph=True), but not with no_sync() in its
first step (torch 2.11 to 2.15).
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
from torch.utils.checkpoint import checkpoint


class UsedTwice(torch.nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.layer, self.recompute = torch.nn.Linear(1, 1, bias=False), recompute
        torch.nn.init.constant_(self.layer.weight, 2)

    def forward(self, images):
        return self.recompute(self.layer, self.recompute(self.layer, images))


def broken(layer, inputs):
    return checkpoint(layer, inputs, use_reentrant=True)  # the mistake


def fixed(layer, inputs):
    return checkpoint(layer, inputs, use_reentrant=False)  # the cure


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    recompute = fixed if cure else broken
    gradients = [None, None]
    dist.all_gather_object(gradients, gradient_of(DDP(UsedTwice(recompute))))
    # The output is weight * weight * image, so its gradient 2 * weight * image: 4 from rank 0, 12
    # from rank 1. Of the two uses, each brings half.
    if gradients != ([8, 8] if cure else [6, 10]):
        raise RuntimeError(f"gradients {gradients}")
    if not cure:
        try:
            gradient_of(DDP(UsedTwice(recompute), find_unused_parameters=True))
            raise SystemExit("find_unused_parameters=True: no error")
        except RuntimeError as error:
            log(f"with find_unused_parameters=True: {str(error).partition('. ')[0]}")
    log(f"{'cured' if cure else 'symptom'}: gradients {gradients} on the two ranks; right is 8")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()  # with Gloo: after an error, NCCL could wait here


def gradient_of(model):
    image = torch.tensor([[1.0 + 2 * dist.get_rank()]], requires_grad=True)  # 1 and 3
    model(image).sum().backward()
    return model.module.layer.weight.grad.item()


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
