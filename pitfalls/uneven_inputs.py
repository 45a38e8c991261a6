"""Ranks with different numbers of batches: DDP waits in backward() for a rank that has finished.

    torchrun --standalone --nproc-per-node=2 pitfalls/uneven_inputs.py
    torchrun --standalone --nproc-per-node=2 pitfalls/uneven_inputs.py --fixed

You see rank 0, with 5 batches, wait in its 4th backward() for rank 1, which had 3.
Recognise it: a hang at the end of an epoch; py-spy dump --pid PID shows some ranks in backward().
Cure: Join: a rank that has finished adds zeros to the mean. Or equal shares: DistributedSampler
repeats samples, or leaves some out (drop_last=True).
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer, trained = torch.optim.SGD(model.parameters(), lr=0.1), 0
    try:
        with Join([model], enable=fixed):  # the mistake: no Join, or one that is off, as here
            for batch in torch.rand(5 - 2 * dist.get_rank(), 8, 4):
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()
                trained += 1
    except RuntimeError as error:
        return log(f"symptom: step {trained + 1} failed: {str(error).rpartition('] ')[2]}")
    log(f"trained on {trained} batches", every_rank=True)
    if not fixed and dist.get_rank() == 1:
        return time.sleep(5)  # busy elsewhere: it saves, say
    ranks = [None, None]
    dist.all_gather_object(ranks, (trained, model.module.weight.tolist()))
    assert ranks[0][1] == ranks[1][1] and ranks[1][0] == 3, ranks
    log(f"cured: {ranks[0][0]} + {ranks[1][0]} batches trained on, replicas identical")


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
