"""Every rank downloads the data: one finds the file that another is writing, and reads half of it.

    torchrun --standalone --nproc-per-node=2 pitfalls/download_by_all.py
    torchrun --standalone --nproc-per-node=2 pitfalls/download_by_all.py --fixed

You see rank 0 download a file of 600,000 bytes, slowly. (The download is played; no network is
used.) Rank 1 comes a little later. It finds that the file is there, and reads what there is.

Recognise it: with an empty cache, some ranks fail (wrong size or checksum, damaged archive) or
train on less data. The second start works, because the file is complete by then.
Cure: on each machine, local rank 0 downloads to a temporary name, then moves the complete file to
the final one. The others wait at a barrier, and then read. The temporary name holds machine and
process: if machines share the disk, several ranks download at the same time. (The global rank 0
alone would do there, but not on disks apart.) The timeout of the process group must be longer than
the download.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta

import torch.distributed as dist


def broken(path):
    if not os.path.exists(path):  # the mistake: the file exists from its first byte on
        download(path)
    with open(path, "rb") as file:
        return file.read()


def fixed(path):
    if os.environ["LOCAL_RANK"] == "0" and not os.path.exists(path):  # the cure: one rank only
        temporary = f"{path}.{socket.gethostname()}.{os.getpid()}"  # another machine's differs
        download(temporary)
        os.replace(temporary, path)  # the cure: the final name stands for a complete file
    dist.barrier()  # the cure: the others wait
    with open(path, "rb") as file:
        return file.read()


def download(path):
    with open(path, "wb", buffering=0) as file:
        for _ in range(6):
            file.write(bytes(100_000))
            time.sleep(0.4)


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # now both ranks have the folder of rank 0
        while dist.get_rank() == 1 and not os.listdir(folders[0]):
            time.sleep(0.1)  # rank 1 comes a little later
        sizes = [None, None]
        dist.all_gather_object(sizes, len((fixed if cure else broken)(f"{folders[0]}/data")))
    if cure != (sizes == [600_000, 600_000]):
        raise RuntimeError(f"read {sizes}")
    log(f"{'cured' if cure else 'symptom'}: of 600000 bytes the ranks have read {sizes}")
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
