"""A snapshot written over the old one: killed half-way, the job has neither the new nor the old.

    python pitfalls/snapshot_in_place.py
    python pitfalls/snapshot_in_place.py --fixed

You see the snapshot of epoch 1 replaced by that of epoch 2. The process that writes it dies when
half of the file is written. Opening a file to write to it empties it first, so the snapshot of
epoch 1 is gone as well.

Recognise it: the job was killed, or ran out of time, memory or disk. After that, torch.load fails
at every start: "PytorchStreamReader failed reading zip archive: failed finding central directory".
Cure: write to a temporary file in the same folder, flush it to the disk, and move it over the old
file with os.replace. At any moment, the name stands for the whole old file or the whole new one.
"""

import argparse
import os
import resource
import signal
import tempfile
from multiprocessing import Process

import torch


def broken(state, path):
    torch.save(state, path)  # the mistake: from now until the end, there is no whole snapshot


def fixed(state, path):
    with open(f"{path}.tmp", "wb") as file:  # the cure: beside the old snapshot
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before its name changes, in case the machine fails
    os.replace(f"{path}.tmp", path)


def main(cure):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/snapshot.pt"
        for epoch in (1, 2):
            writer = Process(target=write, args=(fixed if cure else broken, epoch, path))
            writer.start()
            writer.join()
            print(f"epoch {epoch}: exit {writer.exitcode}, file of {os.path.getsize(path)} bytes")
        if writer.exitcode != -signal.SIGXFSZ:
            raise RuntimeError("the process was not killed")
        try:
            outcome = f"cured: the snapshot of epoch {torch.load(path)['epoch']} is still there"
        except RuntimeError as error:
            outcome = f"symptom: {str(error).partition('. ')[0]}"
    if outcome.startswith("cured") != cure:
        raise RuntimeError(outcome)
    print(outcome)


def write(save, epoch, path):
    """Save the snapshot of an epoch; in epoch 2, the system kills this process half-way."""
    if epoch == 2:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes in a file
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the signal for more than that: it kills
    save({"epoch": epoch, "weights": torch.zeros(50_000)}, path)  # 200,000 bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
