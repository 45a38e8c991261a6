"""A collective inside "if rank == 0": the others never come, or meet it with another one.

    torchrun --standalone --nproc-per-node=2 pitfalls/collective_on_one_rank.py
    torchrun --standalone --nproc-per-node=2 pitfalls/collective_on_one_rank.py --fixed

You see rank 0 sum up the loss alone, to print it. In step 1 its all_reduce meets the one in which
rank 1 sums the gradients, and both go on with wrong numbers. In step 2 it waits for a rank that is
busy elsewhere, until the timeout: 3 seconds here, 10 (NCCL) to 30 minutes (Gloo) by default.

Recognise it: the job stands still, far from the mistake, often with its GPUs at 100 % (NCCL waits
busily). py-spy dump --pid PID shows the line where each rank stands: they differ. With
TORCH_DISTRIBUTED_DEBUG=DETAIL in front it names the rank that did not come ("Ranks 1 failed to pass
monitoredBarrier"). (Not with DDP on a CPU, which torch 2.15 crashes in then.)
Cure: every rank calls the collective; the "if" is around the printing alone.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    for step in (1, 2):
        loss, gradient = torch.tensor(1.0), torch.tensor(100.0)  # the same on both ranks
        if fixed or dist.get_rank() == 0:  # the mistake is this "if"
            try:
                dist.all_reduce(loss)
            except RuntimeError as error:
                log(f"symptom: all_reduce failed: {str(error).rpartition('] ')[2]}")
                return
        dist.all_reduce(gradient)
        log(f"step {step}: losses add up to {loss:g}, gradients to {gradient:g}", every_rank=True)
    if not fixed:
        time.sleep(5)  # rank 1 is busy: with the next epoch's data, say
    dist.destroy_process_group()


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
