"""Every rank saves to the same file: it holds parts of each, or cannot be read any more.

    torchrun --standalone --nproc-per-node=2 pitfalls/every_rank_saves.py
    torchrun --standalone --nproc-per-node=2 pitfalls/every_rank_saves.py --fixed

You see 10 snapshots, each saved by both ranks at once and loaded when both are done. Where the two
have as much to save, the file mixes their weights, and loads without an error. In every second
snapshot rank 1 has more to save (a history of its own, say), and torch.load fails.
Recognise it: now and then a restart fails with "PytorchStreamReader failed reading file ...:
invalid header or archive is corrupted", or a move to the final name with FileNotFoundError.
Cure: rank 0 saves: in DDP it has all that counts. A barrier before another rank reads the file.
"""

import argparse
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank, counts = dist.get_rank(), {"whole": 0, "mixed": 0, "unreadable": 0}
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/snapshot.pt"]
        dist.broadcast_object_list(paths)  # now all ranks have rank 0's path
        for number in range(1, 11):
            weights = [torch.full((500_000,), float(rank)) for _ in range(8 + number % 2 * rank)]
            if rank == 0 or not fixed:  # the mistake: without the cure there is no such "if"
                torch.save(weights, paths[0])
            dist.barrier()
            try:
                found = torch.cat(torch.load(paths[0]))
                counts["whole" if found.min() == found.max() else "mixed"] += 1
            except Exception as error:  # each kind of damage raises a type of its own
                counts["unreadable"] += 1
                log(f"snapshot {number}: {str(error).partition(':')[0]}")
            dist.barrier()
    assert fixed == (counts["whole"] == 10), counts
    log(f"{'cured' if fixed else 'symptom'}: 10 snapshots: {counts}")
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
