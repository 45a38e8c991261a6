"""A batch size per rank: with more ranks the same learning rate gives another training.

    torchrun --standalone --nproc-per-node=4 pitfalls/learning_rate_and_world_size.py
    torchrun --standalone --nproc-per-node=4 pitfalls/learning_rate_and_world_size.py --fixed

You see an epoch of one process, then of four ranks. 16 samples on each rank are a global batch of
64: a quarter of the steps, none of them longer, so the loss falls less far.
Recognise it: nothing fails, but the more GPUs, the higher the loss after the same epochs.
Cure: keep the global batch, batch // world_size on each rank: the same steps, up to rounding. Or
make the learning rate as many times larger, with a warm-up: "linear scaling", Goyal et al. 2017.
"""

import argparse
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def one_epoch(rank, world_size, share):
    torch.manual_seed(0)
    samples, model = torch.randn(1024, 20), torch.nn.Linear(20, 1)  # to learn: a sample's sum
    trained = torch.nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(samples[rank::world_size].split(share), start=1):
        optimizer.zero_grad()
        (trained(batch)[:, 0] - batch.sum(1)).square().mean().backward()
        optimizer.step()
    loss = (model(samples)[:, 0] - samples.sum(1)).square().mean()
    log(f"global batch {world_size} x {share}, {step} steps an epoch: loss {loss:.4f} after it")
    return model.weight.detach()


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    alone = one_epoch(0, 1, 16)  # no DDP
    off = (one_epoch(dist.get_rank(), 4, 4 if fixed else 16) - alone).abs().max()  # the mistake: 16
    if not (off < 1e-5 if fixed else off > 0.1):
        raise RuntimeError(f"weights differ by {off:.1e}")
    log(f"{'cured' if fixed else 'symptom'}: weights up to {off:.1e} off those of one process")
    gc.collect()  # else what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit(f"start it with torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
