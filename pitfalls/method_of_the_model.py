"""A method of the model, called behind DDP's back: no gradient is averaged, and nothing says so.

    torchrun --standalone --nproc-per-node=2 pitfalls/method_of_the_model.py
    torchrun --standalone --nproc-per-node=2 pitfalls/method_of_the_model.py --fixed

You see a model with a method loss(). DDP(model) is another module, which has no such method. With
model.module.loss() the error goes away, and so does the averaging: DDP prepares it in its own
forward pass, which is never called. The gradient is 1 on rank 0 and 3 on rank 1; their mean is 2.

Recognise it: "'DistributedDataParallel' object has no attribute", and after the quick cure the
weights of the ranks drift apart, without an error. Compare them after a step, as the scripts of
this collection do at their end.
Cure: in training, let forward() do the work, and call the DDP object: model(...). model.module is
right for what needs no gradient, such as an evaluation, or generating text.
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


class Scale(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1, bias=False)

    def loss(self, images):
        return super().forward(images).sum()

    def forward(self, images):
        return self.loss(images)


def broken(model, images):
    try:
        model.loss(images).backward()
    except AttributeError as error:
        log(f"model.loss(): {error}")
    model.module.loss(images).backward()  # the mistake: DDP does not know of this forward pass


def fixed(model, images):
    model(images).backward()  # the cure: DDP's forward, which calls that of the model


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    model = DDP(Scale())
    images = torch.tensor([[1.0 + 2 * dist.get_rank()]])  # 1 on rank 0, 3 on rank 1
    (fixed if cure else broken)(model, images)
    gradients = [None, None]
    dist.all_gather_object(gradients, model.module.weight.grad.item())
    if gradients != ([2, 2] if cure else [1, 3]):
        raise RuntimeError(f"gradients {gradients}")
    log(f"{'cured' if cure else 'symptom'}: gradients {gradients} on the two ranks; mean 2")
    del model
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
