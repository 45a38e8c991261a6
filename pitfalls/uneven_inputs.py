"""Ranks with different numbers of batches: DDP waits in backward() for a rank that has finished.

    torchrun --standalone --nproc-per-node=2 pitfalls/uneven_inputs.py
    torchrun --standalone --nproc-per-node=2 pitfalls/uneven_inputs.py --fixed

You see rank 0 train on 5 batches, and rank 1 on 3. Each backward() averages the gradients over both
ranks. In its 4th one, rank 0 waits for rank 1, which has left the loop.

Recognise it: a hang at the end of an epoch. "py-spy dump --pid PID" shows some ranks in backward().
Cure: run the loop in "with Join([model])". A rank that has finished then adds zeros to the mean
until all have finished. It does so for DDP's own exchanges only: an all_reduce of yours in that
loop meets another one, and gives a wrong sum or an error. Or give all ranks the same number of
batches: DistributedSampler repeats some samples for that, or leaves some out (drop_last=True).
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by DDP, it would keep the group open to the end
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def broken(model, optimizer, batches):
    for step, batch in enumerate(batches, start=1):  # the mistake: more steps on one of the ranks
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        log(f"step {step} done", every_rank=True)


def fixed(model, optimizer, batches):
    with Join([model]):  # the cure
        for step, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            log(f"step {step} done", every_rank=True)


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    train_an_uneven_epoch(cure)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()  # with Gloo: after an error, NCCL could wait here


def train_an_uneven_epoch(cure):
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.rand([5, 3][dist.get_rank()], 8, 4)
    try:
        (fixed if cure else broken)(model, optimizer, batches)
    except RuntimeError as error:
        if cure:
            raise
        log(f"symptom: backward() failed: {str(error).rpartition('] ')[2]}")
        return
    if cure:
        weights = [None, None]
        dist.all_gather_object(weights, model.module.weight.tolist())
        if weights[0] != weights[1]:
            raise RuntimeError(f"the weights differ: {weights}")
        log("cured: both ranks have trained on all their batches; replicas identical")
    elif dist.get_rank() == 0:
        raise RuntimeError("rank 0 did not wait")
    else:
        time.sleep(5)  # rank 1 is busy: it evaluates, say


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
