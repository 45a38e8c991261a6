"""A layer that a step does not use: no gradient is averaged, and only the next step fails.

    torchrun --standalone --nproc-per-node=2 pitfalls/unused_parameters.py
    torchrun --standalone --nproc-per-node=2 pitfalls/unused_parameters.py --fixed

You see a model with a layer that its forward pass leaves out, like a head for another task. DDP
averages gradients in buckets (groups of some MB), when all gradients of a bucket have come. Here
one never comes. backward() ends without an error, and each rank has its own gradients.

Recognise it: the next step fails with "Expected to have finished reduction in the prior iteration"
and the numbers of the parameters. With TORCH_DISTRIBUTED_DEBUG=INFO in front of the command, it
gives their names, too. If the last step of a job leaves a layer out, nothing fails. If some ranks
leave it out, and others use it, those that use it wait in backward(), and only the others report.
Cure: find_unused_parameters=True. It costs a walk through the graph in each step. Cheaper: have no
idle layers, or add 0 * p.sum() for each parameter p of theirs to what forward() returns.
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


class HalfUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.used(x)  # self.idle takes no part


def broken():
    return DDP(HalfUsed())  # the mistake: DDP waits for gradients that do not come


def fixed():
    return DDP(HalfUsed(), find_unused_parameters=True)  # the cure


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    train_two_steps((fixed if cure else broken)(), cure)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()  # with Gloo: after an error, NCCL could wait here


def train_two_steps(model, cure):
    for step in (1, 2):
        model.zero_grad()
        try:
            model(torch.tensor([[1.0 + dist.get_rank()]])).backward()
        except RuntimeError as error:
            if cure or step == 1:
                raise
            which = str(error).partition("rank 0: ")[2].partition("\n")[0]
            log(f"symptom: step 2: {str(error).partition(' bef')[0]} (parameters {which})")
            return
        gradient = model.module.used.weight.grad.item()  # 1 from rank 0, 2 from rank 1
        log(f"step {step}: gradient {gradient}", every_rank=True)
        if (gradient == 1.5) != cure:
            raise RuntimeError("this is neither the symptom nor the cure")
    if not cure:
        raise RuntimeError("step 2 did not fail")
    log("cured: the gradients 1 and 2 averaged to 1.5 in both steps")


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
