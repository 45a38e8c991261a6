"""A collective inside "if rank == 0": the other ranks do not call it, or call a different one.

    torchrun --standalone --nproc-per-node=2 pitfalls/collective_on_one_rank.py
    torchrun --standalone --nproc-per-node=2 pitfalls/collective_on_one_rank.py --fixed

You see two training steps. Rank 0 alone adds up the loss, to print it. In step 1 its all_reduce
meets the all_reduce in which rank 1 adds up the gradients. Neither fails, and both results are
wrong. In step 2 rank 1 is busy elsewhere: rank 0 waits for it until the timeout. That is 3 seconds
here; by default it is 10 minutes (backend "nccl") or 30.

Recognise it: the job stands still, far from the mistake, often with its GPUs at 100 % (NCCL waits
in a busy loop). On a CPU, "py-spy dump --pid PID" shows where each rank stands: the lines differ.
(On GPUs, not tried, a call returns before it is done. All ranks may then stand in the same later
line that waits for the GPU, .item() say. The last lines of recipes/who_is_missing.py help there.)
With TORCH_DISTRIBUTED_DEBUG=DETAIL in front of the command, the error names the rank that did not
come: "Ranks 1 failed to pass monitoredBarrier". (On a CPU, DDP() crashes with DETAIL, in
torch 2.11 to 2.15.)
Cure: every rank calls the collective. Only the printing stays inside the "if".
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def broken(loss, gradient):
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # the mistake: the other ranks do not call it
    dist.all_reduce(gradient)


def fixed(loss, gradient):
    dist.all_reduce(loss)  # the cure: every rank calls it
    dist.all_reduce(gradient)


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    sums = []
    for step in (1, 2):
        loss, gradient = torch.tensor(1.0), torch.tensor(100.0)  # the same on both ranks
        try:
            (fixed if cure else broken)(loss, gradient)
        except RuntimeError as error:
            if cure:
                raise
            log(f"symptom: all_reduce failed: {str(error).rpartition('] ')[2]}")
            dist.destroy_process_group()  # with Gloo only: after an error, NCCL could wait here
            return
        log(f"step {step}: losses add up to {loss:g}, gradients to {gradient:g}", every_rank=True)
        sums.append((loss.item(), gradient.item()))
    if not cure and dist.get_rank() == 1:
        time.sleep(5)  # rank 1 is busy: it reads the data of the next epoch, say
    elif sums != [(2, 200), (2, 200)]:
        raise RuntimeError(f"rank 0 did not wait; the sums are {sums}")
    if cure:
        dist.barrier()  # both ranks have found what they should
        log("cured: both ranks have the right sums in both steps")
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
