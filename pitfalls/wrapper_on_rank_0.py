"""The DDP wrapper called on rank 0 alone: its forward pass broadcasts, and no rank takes part.

    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_on_rank_0.py
    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_on_rank_0.py --fixed

You see rank 0 evaluate a model while rank 1 waits in a barrier. This works for a model without
buffers (tensors of a model that are not trained). BatchNorm has some, its running mean for one.
With buffers, model(x) first broadcasts those of rank 0, also after eval(). Under no_grad(), the
first one after a training step does.
With Gloo, rank 0 waits there until the timeout. (NCCL, not tried, may let it go on: its broadcast
then meets the next collective of rank 1.)

Recognise it: the evaluation hangs since the model has a BatchNorm. "py-spy dump --pid PID" shows
rank 0 in _sync_buffers. If rank 1 goes on training meanwhile, its next forward pass takes part in
that broadcast, and rank 0's next one sends none. That works until another call comes in between.
Cure: call model.module(x), the model without DDP. Or let every rank evaluate a share.
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


def broken(model, images):
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(images)  # the mistake: the wrapper's forward pass
    dist.barrier()


def fixed(model, images):
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.module(images)  # the cure: the model's own forward pass
    dist.barrier()


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    evaluate_two_models(cure)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()  # with Gloo: after an error, NCCL could wait here


def evaluate_two_models(cure):
    for layer in (torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)):
        name = type(layer).__name__
        try:
            (fixed if cure else broken)(DDP(layer), torch.ones(2, 4))
        except RuntimeError as error:
            if cure or name == "Linear":
                raise
            log(f"symptom: {name}: model(x) failed: {str(error).rpartition('] ')[2]}")
            return
        log(f"{name}: rank 0 has evaluated alone")
    if not cure:
        raise RuntimeError("rank 0 did not wait")
    log("cured: rank 0 has evaluated both alone, and both ranks have passed the barriers")


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
