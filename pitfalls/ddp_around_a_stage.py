"""DDP around a pipeline's stage: the first step is right, the second one fails.

    torchrun --standalone --nproc-per-node=2 pitfalls/ddp_around_a_stage.py
    torchrun --standalone --nproc-per-node=2 pitfalls/ddp_around_a_stage.py --fixed

You see two replicas of a pipeline, for brevity of one stage, and two micro-batches. In its first
backward pass, DDP notes in which order the gradients come. Before the next forward pass, it sorts
its buckets (groups of gradients) in that order. But if that first pass is a pipeline's, DDP notes
each gradient twice. (torch 2.11 does not. With one micro-batch, nothing happens.)

Recognise it: the second step fails with "rebuilt parameter indices size is not same as original
model parameters size", and twice as many parameters as there are. Above it stands "failed to run
forward". Other stages may report a closed connection instead.
Cure: before the first step, run the stage forward and backward twice without the pipeline: the
second forward pass sorts the buckets. find_unused_parameters=True helps, too, but costs a walk
through the graph in each step, and a warning.
"""

import argparse
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by DDP, it would keep the group open to the end
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel as DDP


def broken(stage):
    return DDP(stage)  # the mistake: the pipeline's first step is DDP's first backward pass


def fixed(stage):
    model = DDP(stage)
    for _ in range(2):  # the cure
        model(torch.zeros(1, 1)).sum().backward()
    return model


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    run_two_steps((fixed if cure else broken)(torch.nn.Linear(1, 1)), cure)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()  # with Gloo: after an error, NCCL could wait here


def run_two_steps(model, cure):
    # Each rank is a replica: a pipeline of one stage, in a process group of its own.
    groups = [dist.new_group([rank]) for rank in (0, 1)]
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=groups[dist.get_rank()])
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, _: output.mean())
    images = torch.full((2, 1), 1.0 + 2 * dist.get_rank())  # 1 on rank 0, 3 on rank 1
    for step in (1, 2):
        model.zero_grad()
        try:
            schedule.step(images, target=images)  # the loss leaves the target out
        except RuntimeError as error:
            reason = str(error.__cause__).partition("rebuilt parameter indices size")
            if cure or step == 1 or not reason[1]:
                raise
            log(f"symptom: step 2: {reason[1]}{reason[2]}")
            return
        gradient = model.module.weight.grad.item()
        log(f"step {step}: gradient {gradient}, the mean of 1 and 3", every_rank=True)
        if gradient != 2:
            raise RuntimeError("this is neither the symptom nor the cure")
    if cure:
        log("cured: both steps averaged the gradients")
    elif torch.__version__.startswith("2.11."):
        log("symptom: none, as torch 2.11 notes each gradient once")
    else:
        raise RuntimeError("step 2 did not fail")


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
