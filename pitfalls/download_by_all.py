"""Every rank downloads the data: one finds the file that another has begun, and reads half of it.

    torchrun --standalone --nproc-per-node=2 pitfalls/download_by_all.py
    torchrun --standalone --nproc-per-node=2 pitfalls/download_by_all.py --fixed

You see rank 0 download a file of 600,000 bytes, slowly (played: no network is used). Rank 1 starts
a second later, as ranks do, finds that the file is there, and reads what there is.
Recognise it: with an empty cache some ranks fail (wrong size or checksum, damaged archive), or
train on less data; the second start works, since the file is whole by then.
Cure: on each machine local rank 0 downloads to a temporary name and moves the whole file to the
final one; the others wait at a barrier, then read. The group's timeout must allow for the download.
"""

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta

import torch.distributed as dist


def main(fixed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/data"]
        dist.broadcast_object_list(paths)  # now all ranks have rank 0's path
        time.sleep(dist.get_rank())
        absent = not os.path.exists(paths[0])  # the mistake: it is there from its first byte on
        target = paths[0] + ".tmp" if fixed else paths[0]
        if absent and (os.environ["LOCAL_RANK"] == "0" or not fixed):
            with open(target, "wb", buffering=0) as file:
                for _ in range(6):
                    file.write(bytes(100_000))
                    time.sleep(0.5)
            os.replace(target, paths[0])
        if fixed:
            dist.barrier()
        sizes = [None, None]
        with open(paths[0], "rb") as file:
            dist.all_gather_object(sizes, len(file.read()))
    assert fixed == (sizes == [600_000, 600_000]), sizes
    log(f"{'cured' if fixed else 'symptom'}: of 600000 bytes the ranks have read {sizes}")
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
