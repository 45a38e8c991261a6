"""Every rank saves to the same file: it mixes the weights of two ranks, or does not load any more.

    torchrun --standalone --nproc-per-node=2 pitfalls/every_rank_saves.py
    torchrun --standalone --nproc-per-node=2 pitfalls/every_rank_saves.py --fixed

You see both ranks save at the same time, again and again, until a snapshot is damaged. (It is a
matter of chance, but mostly the first one is.) All weights of rank 0 are 0, those of rank 1 are 1.
A damaged file holds both and loads without an error, or torch.load fails. In every second snapshot
rank 1 has a bit more to save, a history of its own, say: then the damaged ones fail to load.

Recognise it: now and then a restart fails with "PytorchStreamReader failed reading file ...:
invalid header or archive is corrupted". If every rank writes to a temporary file first and then
moves it, the move fails with FileNotFoundError.
Cure: only rank 0 saves: with DDP, all ranks have the same weights. The barrier after it makes sure
that no rank reads the file before it is complete.
"""

import argparse
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist


def broken(weights, path):
    torch.save(weights, path)  # the mistake: all ranks write to one file
    dist.barrier()


def fixed(weights, path):
    if dist.get_rank() == 0:  # the cure
        torch.save(weights, path)
    dist.barrier()


def examine(path):
    """Load the snapshot; return "whole", "mixed" or "unreadable"."""
    try:
        weights = torch.cat(torch.load(path))
    except Exception as error:  # each kind of damage raises a type of its own
        log(f"torch.load failed: {str(error).partition(':')[0]}")
        return "unreadable"
    return "whole" if weights.min() == weights.max() else "mixed"


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # now both ranks have the folder of rank 0
        path, rank = f"{folders[0]}/snapshot.pt", dist.get_rank()
        for number in range(10 if cure else 100):
            tensors = 8 + (number % 2) * rank
            weights = [torch.full((500_000,), float(rank)) for _ in range(tensors)]
            (fixed if cure else broken)(weights, path)
            found.append(examine(path))
            dist.barrier()
            if found[-1] != "whole":
                break
    if cure != (found[-1] == "whole"):
        raise RuntimeError(f"snapshots: {found}")
    log(
        f"cured: {len(found)} snapshots, all of them whole"
        if cure
        else f"symptom: snapshot {len(found)} is {found[-1]}"
    )
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
