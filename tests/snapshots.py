"""What 02 and 03 must refuse: snapshots that cannot be continued, and bad calls."""

import os
import pickle

import torch

# ---- Snapshots: each function spoils the good one at path, whose content is given, too ----


class Bomb:
    """A pickle that creates a file when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def plain_pickle(path, good):
    path.write_bytes(pickle.dumps(Bomb()))


def pickle_in_an_archive(path, good):
    torch.save({"model": Bomb()}, path)


def flipped_byte(path, good):
    data = bytearray(good)
    largest = max(torch.load(path, weights_only=True)["model"].values(), key=torch.numel)
    data[good.index(largest.numpy().tobytes()) + 100] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)  # torch does not notice


def only_weights(path, good):
    torch.save(torch.load(path, weights_only=True)["model"], path)


BAD_SNAPSHOTS = {
    plain_pickle: "BadZipFile: File is not a zip file",
    pickle_in_an_archive: "UnpicklingError",
    flipped_byte: "wrong checksum",
    only_weights: "KeyError: 'model'",
}


# ---- Calls: {name: (arguments, what the error says, status)} ----

BATCH = "--batch-size must be from 2 (an image for each rank) to 1024"
BAD_CALLS = {
    "batch too small": (["--batch-size", 1], BATCH, 2),
    "batch too large": (["--batch-size", 1026], BATCH, 2),
    "batch in words": (["--batch-size", "many"], "--batch-size: invalid int value: 'many'", 2),
    "negative epochs": ([-3], "TOTAL_EPOCHS", 2),
    "save every 0": ([3, 0], "SAVE_EVERY", 2),
    "folder missing": (["--snapshot-path", "no/such.pt"], "cannot write no/such.pt", 2),
    "a directory": (["--snapshot-path", "."], "cannot continue from . (IsADirectoryError", 1),
}
