"""A group for GPUs alone: the first exchange of something on the CPU fails.

    torchrun --standalone --nproc-per-node=2 pitfalls/backend_without_cpu.py
    torchrun --standalone --nproc-per-node=2 pitfalls/backend_without_cpu.py --fixed

You see an all_reduce of a CPU tensor, say of a loss or a flag, in a group that was made for GPUs.
"nccl" alone makes such a group. Here "cuda:gloo" stands for it, so that you need no GPU.

Recognise it: "No backend type associated with device type cpu". It often comes late in a job: from
a metric or a flag that is on the CPU, or from clip_grad_norm_() with FSDP2's CPUOffloadPolicy.
Cure: for flags and metrics, a group of their own, dist.new_group(backend="gloo"). Or a backend for
each kind of device, "cpu:gloo,cuda:nccl", as here. Then pass timeout= and device_id=, too: without
them, the default timeout is Gloo's 30 minutes, and barrier() no longer waits for the GPU. And
get_backend() returns that whole text. Or move the tensor to the GPU: then reading the result
(item) waits for all that the GPU still has to do.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=10)


def broken():
    dist.init_process_group("cuda:gloo", timeout=TIMEOUT)  # the mistake: nobody serves the CPU


def fixed():
    dist.init_process_group("cpu:gloo,cuda:gloo", timeout=TIMEOUT)  # the cure


def main(cure):
    (fixed if cure else broken)()
    flag = torch.tensor(1.0 + dist.get_rank())  # on the CPU
    try:
        dist.all_reduce(flag)
    except RuntimeError as error:
        if cure:
            raise
        log(f"symptom: {error}")
    else:
        if not cure or flag != 3:
            raise RuntimeError(f"all_reduce gave {flag.item()}")
        log(f"cured: the sum of 1 and 2 is {flag.item():.0f}")
    # The other rank may still be connecting: leave together. (This group is the first cure above.)
    dist.barrier(dist.new_group(backend="gloo", timeout=TIMEOUT))
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
