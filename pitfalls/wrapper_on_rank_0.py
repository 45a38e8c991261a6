"""Calling the DDP wrapper on rank 0 alone: its forward pass broadcasts, and nobody takes part.

    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_on_rank_0.py
    torchrun --standalone --nproc-per-node=2 pitfalls/wrapper_on_rank_0.py --fixed

You see rank 0 evaluate while rank 1 waits in a barrier. It goes well with a model that has no
buffers. BatchNorm has (its running mean), and with buffers each model(x) first broadcasts those of
rank 0, also after eval() and under no_grad(): rank 0 waits there until the timeout.

Recognise it: the evaluation hangs since there is a BatchNorm; py-spy dump --pid PID shows rank 0 in
_sync_buffers. If rank 1 trains on meanwhile, its next forward pass takes that broadcast, and all
later calls meet wrong ones.
Cure: model.module(x), the model without DDP. Or let every rank evaluate a share.
"""

import argparse
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    for layer in (torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)):
        model = torch.nn.parallel.DistributedDataParallel(layer).eval()
        try:
            if dist.get_rank() == 0:
                with torch.no_grad():
                    (model.module if fixed else model)(torch.ones(2, 4))  # the mistake: model
                log(f"{type(layer).__name__}: rank 0 has evaluated alone")
            dist.barrier()
        except RuntimeError as error:
            if fixed:
                raise
            reason = str(error).rpartition("] ")[2]
            return log(f"symptom: {type(layer).__name__}: model(x) failed: {reason}")
    if not fixed:
        raise RuntimeError("rank 0 did not wait")
    log("cured: rank 0 has evaluated both alone, and both ranks have passed the barriers")


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
