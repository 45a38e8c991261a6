"""What 02 and 03 must refuse: snapshots that cannot be continued, and bad calls."""

import os
import pickle

import torch

# ---- Snapshots: each function spoils the good one at path, whose content is given, too ----


class Bomb:
    """A pickle that creates a file when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def truncated(path, good):
    path.write_bytes(good[: len(good) // 2])


def empty(path, good):
    path.write_bytes(b"")


def plain_pickle(path, good):
    path.write_bytes(pickle.dumps(Bomb()))


def pickle_in_an_archive(path, good):
    torch.save({"format": 1, "model": Bomb()}, path)


def flipped_byte(path, good):
    data = bytearray(good)
    tensor = torch.load(path, weights_only=True)["model"]["layers.5.weight"].numpy().tobytes()
    data[good.index(tensor) + 100] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)  # torch does not notice


def other_model(path, good):
    snapshot = torch.load(path, weights_only=True)
    snapshot["model"]["layers.5.weight"] = torch.zeros(10, 400)
    torch.save(snapshot, path)


def later_format(path, good):
    torch.save({**torch.load(path, weights_only=True), "format": 2}, path)


def only_weights(path, good):
    torch.save(torch.load(path, weights_only=True)["model"], path)


BAD_SNAPSHOTS = {
    truncated: "or not a whole one",
    empty: "or not a whole one",
    plain_pickle: "is no file of torch.save",
    pickle_in_an_archive: "UnpicklingError",
    flipped_byte: "wrong checksum",
    other_model: "Error(s) in loading state_dict",
    later_format: "format 2, and this script reads format 1",
    only_weights: "KeyError: 'format'",
}


# ---- Calls: {name: (arguments, what the error says)} ----

BAD_CALLS = {
    "batch size 0": (["--batch-size", 0], "--batch-size: must be a whole number from 1 up"),
    "batch too small": (["--batch-size", 1], "--batch-size 1 is impossible: give a number from 2"),
    "batch too large": (["--batch-size", 1025], "to 1024 (the training set)"),
    "negative epochs": ([-3], "total_epochs: must be a whole number from 1 up, not '-3'"),
    "save every 0": ([3, 0], "save_every: must be a whole number from 1 up, not '0'"),
    "crash epoch 0": (["--crash-epoch", 0], "--crash-epoch: must be a whole number from 1 up"),
    "folder missing": (["--snapshot-path", "no/such.pt"], "cannot write in the folder no"),
    "folder not writable": (["--snapshot-path", "/proc/a.pt"], "cannot write in the folder /"),
    "a directory": (["--snapshot-path", "."], ". is a directory: give the path of a file"),
}
