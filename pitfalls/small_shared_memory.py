"""A container has 64 MB of shared memory, and the loader's workers need more: the job stands still.

    python pitfalls/small_shared_memory.py
    python pitfalls/small_shared_memory.py --fixed

You see a loader whose worker sends batches of 256 KB. They travel through /dev/shm, a disk in
memory. Here that is a small one, of this script alone: 320 KB, which a second batch fills up. The
worker prints an error and goes on with the next batch; the loader waits for the lost one, without
the timeout here for ever. (unshare(1) makes such a disk. In most containers, it is not allowed to.)

Recognise it: "unable to allocate shared memory(shm) for file ... No space left on device (28)" and
a job that stands still, or "DataLoader worker (pid ...) is killed by signal: Bus error. It is
possible that dataloader's workers are out of shared memory". `df -h /dev/shm` prints the size.
Cure: docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory at
/dev/shm. Without such rights: fewer workers, a smaller prefetch_factor, or num_workers=0.
"""

import argparse
import os
import re
import subprocess
import sys

import torch
from torch.utils.data import DataLoader


def broken():
    return "320k"  # the mistake


def fixed():
    return "64m"  # the cure: room for prefetch_factor * num_workers batches, and the one in use


def load():
    dataset = torch.zeros(64, 64 * 1024)  # items of 256 KB
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=5
    )  # seconds; without it, the loader waits for ever
    return sum(1 for batch in loader)


def main(cure):
    size = fixed() if cure else broken()
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && exec " + '"$@"'
    for rights in ([], ["--map-root-user"]):
        unshare = ["unshare", *rights, "--mount", "sh", "-c", mount, "-"]
        if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode == 0:
            break
    else:
        raise SystemExit("this user cannot mount a disk here: try it as root, outside a container")
    job = subprocess.run(
        [*unshare, sys.executable, *sys.argv],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"INSIDE": "1"},
    )
    said = re.findall("unable to allocate shared memory.*|DataLoader timed out.*", job.stderr)
    if cure != (job.stdout == "64 batches\n") or cure == bool(said):
        raise RuntimeError(job.stdout + job.stderr)
    print(
        f"cured: with {size}, {job.stdout.strip()} have come"
        if cure
        else f"symptom: {said[0]}\nsymptom: {said[-1]}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if "INSIDE" in os.environ:
        print(load(), "batches")
    else:
        main(args.fixed)
