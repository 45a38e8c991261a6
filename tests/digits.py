"""A small set of digits to train on, and the snapshots of a training: read, compared, spoiled."""

import os
import pickle
import re
import struct

import torch


def make_digits():
    """{file name: content} of a small set in MNIST's layout: 1,024 + 256 images, easy to learn."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(0, 200, (10, 28, 28), generator=generator)
    files = {}
    for split, count in (("train", 1024), ("t10k", 256)):
        labels = torch.randint(10, (count,), generator=generator)
        images = patterns[labels] + torch.randint(0, 56, (count, 28, 28), generator=generator)
        files[f"{split}-images-idx3-ubyte"] = idx(images)
        files[f"{split}-labels-idx1-ubyte"] = idx(labels)
    return files


def write_digits(root):
    """Write the small set below root, for --data-dir; return root."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, data in make_digits().items():
        (raw / name).write_bytes(data)
    return root


def idx(tensor):
    """A uint8 tensor in the IDX format of the MNIST files: magic, sizes, big-endian, then bytes."""
    header = struct.pack(f">{1 + tensor.dim()}i", 0x0800 + tensor.dim(), *tensor.shape)
    return header + tensor.to(torch.uint8).numpy().tobytes()


def load(folder):
    """The snapshot in a folder."""
    return torch.load(folder / "snapshot.pt", weights_only=True)


def tensors(tree):
    """All tensors in a snapshot, in order."""
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def difference(one, other):
    """The largest |difference| between two snapshots' tensors, the optimizer's included."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) == 12  # six parameters, each with its momentum
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def digest(result):
    """The checksum of the weights with which a run ended, as it printed it."""
    return re.search(r"sha256 (\w{12})$", result.output, re.MULTILINE)[1]


# ---- Each spoils the good snapshot at path, whose content is given, too ----


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
