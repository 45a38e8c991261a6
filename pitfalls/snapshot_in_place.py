"""A snapshot written over the old one: killed half-way, the job has neither the new nor the old.

    python pitfalls/snapshot_in_place.py
    python pitfalls/snapshot_in_place.py --fixed

You see the snapshot of epoch 1 replaced by that of epoch 2, by a process that is killed (SIGKILL)
when half of the file is written. Opening a file to write it empties it: epoch 1 is gone as well.
Recognise it: the job was killed, or ran out of time, memory or disk; after that torch.load says
"PytorchStreamReader failed reading zip archive: failed finding central directory", at every start.
Cure: write to a temporary file in the same folder, flush and fsync it, then move it over the old
one with os.replace: the name stands for the whole old file or the whole new one at any moment.
"""

import argparse
import io
import os
import signal
import tempfile
from multiprocessing import Process

import torch


class DeadlyFile(io.FileIO):
    def write(self, data):
        written = super().write(data[: 100_000 - self.tell()])
        if self.tell() == 100_000:  # about half of what torch.save has to write
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def write_snapshot(epoch, path, fixed, kind):
    target = f"{path}.tmp" if fixed else path  # the mistake: writing where a restart reads
    with kind(target, "wb") as file:
        torch.save({"epoch": epoch, "weights": torch.zeros(50_000)}, file)
        os.fsync(file.fileno())  # after file.flush(), where a file has a buffer: this one has none
    os.replace(target, path)


def main(fixed):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/snapshot.pt"
        for epoch, kind in ((1, io.FileIO), (2, DeadlyFile)):
            writer = Process(target=write_snapshot, args=(epoch, path, fixed, kind))
            writer.start()
            writer.join()
            print(f"epoch {epoch}: exit {writer.exitcode}, file of {os.path.getsize(path)} bytes")
        try:
            epoch = torch.load(path)["epoch"]
            outcome = f"cured: the snapshot of epoch {epoch} is still there"
        except RuntimeError as error:
            outcome = f"symptom: {str(error).partition('. ')[0]}"
    assert outcome.startswith("cured") == fixed, outcome
    print(outcome)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
