"""Fetch MNIST once, before any training: 12 MB to download, 67 MB on disk.

    python download_mnist.py                         # into data/, where the scripts look for it
    python download_mnist.py --data-dir /mnt/digits  # then give the scripts the same --data-dir
    python download_mnist.py --mirror http://localhost:8000/mnist    # tried before the usual ones

Why this is a script of its own: every rank of a distributed job runs the same lines. With
download=True in a training script, all ranks write the same files at the same time, and one reads
what another has only half written. So download first, and train with download=False.

A set that is there and whole is left alone; a damaged one is fetched again. Files are downloaded
into MNIST.partial, beside MNIST, and moved into place when all are complete. So MNIST never holds
half a file, whatever ends the download. The next call goes on from there.

Without the set the training scripts still run, on generated images of the same shape.
"""

import argparse
import contextlib
import errno
import fcntl
import http.client
import os
import shutil
import socket
import struct
import sys
import time
import zlib

if not sys.stderr.isatty():  # before the import below, in which tqdm reads it
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars in a log file
from torchvision.datasets import MNIST
from torchvision.datasets.utils import check_integrity, download_and_extract_archive


def find_fault(root):
    """Return what is wrong with the set that MNIST(root) reads, or None if nothing is."""
    try:
        for train in (True, False):
            split = MNIST(root, train=train)
            if len(split.data) != len(split.targets):
                return "images and labels differ in number"
        # Loading compares lengths alone. The archives have checksums, if they are there.
        for name, md5 in MNIST.resources:
            archive = os.path.join(split.raw_folder, name)
            if not os.path.exists(archive):
                continue
            if not check_integrity(archive, md5):
                return f"wrong checksum of {name}"
            # A gzip archive ends with the CRC-32 of what is packed in it, and its length.
            with open(archive, "rb") as packed, open(archive.removesuffix(".gz"), "rb") as unpacked:
                packed.seek(-8, os.SEEK_END)
                if struct.unpack("<I", packed.read(4))[0] != zlib.crc32(unpacked.read()):
                    return f"{name} holds other data than the file unpacked from it"
    except Exception as error:  # each kind of damage raises a type of its own
        return f"it does not load: {type(error).__name__} {error}".rstrip()
    return None


def fetch(name, md5, folder, mirrors):
    """Download one archive to folder and unpack it there; try the mirrors in turn."""
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}"
        print(url, flush=True)
        try:
            # Compares the checksum, and keeps an archive from an earlier call that matches.
            download_and_extract_archive(url, download_root=folder, filename=name, md5=md5)
            return
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # the fault is not the mirror's
            print(f"  failed: {error}", flush=True)
    stop(
        f"no mirror has a sound {name}: check the network or give one with --mirror URL."
        " The scripts also run without MNIST, on generated images"
    )


def move_files(source, target):
    """Move the files of one folder to another, each in one step; the folder whole if it is new."""
    try:
        os.rename(source, target)
    except OSError:  # there are files already: the damaged set
        for name in os.listdir(source):
            os.replace(os.path.join(source, name), os.path.join(target, name))


def stop(message, status=1):
    """End this process with one line and no traceback: for what the caller can mend."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def main():
    args = parse_args()
    target, partial = (os.path.join(args.data_dir, name) for name in ("MNIST", "MNIST.partial"))
    start = time.perf_counter()
    if (fault := find_fault(args.data_dir)) is None:
        print(f"{target} is complete: nothing to do ({time.perf_counter() - start:.1f} s to check)")
        return
    if os.path.exists(target):
        print(f"{target} is damaged and is fetched again: {fault}", flush=True)
    socket.setdefaulttimeout(30)  # seconds without a byte; a silent mirror would hold us forever
    try:
        os.makedirs(args.data_dir, exist_ok=True)
        # One download at a time: another call waits here, and then finds the set. The system frees
        # the lock when the process ends, however it ends; the empty file stays.
        with open(os.path.join(args.data_dir, ".MNIST.lock"), "w") as lock:
            with contextlib.suppress(OSError):  # some network disks have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if find_fault(args.data_dir) is not None:
                raw = os.path.join(partial, "MNIST", "raw")
                for name, md5 in MNIST.resources:
                    fetch(name, md5, raw, args.mirror + MNIST.mirrors)
                if fault := find_fault(partial):
                    stop(f"the download is damaged: {fault}. Delete {partial} and try again")
                os.makedirs(target, exist_ok=True)
                move_files(raw, os.path.join(target, "raw"))
            shutil.rmtree(partial, ignore_errors=True)
    except KeyboardInterrupt:
        stop(f"interrupted: the files in {partial} are kept, call again to go on")
    except OSError as error:
        stop(f"cannot write to {args.data_dir}: {error}. Choose another --data-dir")
    print(f"{target} is complete")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = lambda message: stop(message, status=2)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="URL",
        help="tried before the usual ones; may be given more than once",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
