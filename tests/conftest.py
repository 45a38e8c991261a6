import gzip
import hashlib
import struct

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--rounds", type=int, default=10, help="repetitions of the launch tests")
    parser.addoption("--write-transcripts", action="store_true", help="write transcripts/ anew")


@pytest.fixture
def rounds(request):
    return request.config.getoption("--rounds")


def idx(tensor):
    """A uint8 tensor in the IDX format of the MNIST files: magic, sizes, big-endian, then bytes."""
    header = struct.pack(f">{1 + tensor.dim()}i", 0x0800 + tensor.dim(), *tensor.shape)
    return header + tensor.to(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="session")
def idx_files():
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


@pytest.fixture(scope="session")
def archives(idx_files):
    """{name.gz: (content, md5)}: the same set as a mirror of MNIST has it."""
    packed = {f"{name}.gz": gzip.compress(data, 1, mtime=0) for name, data in idx_files.items()}
    return {name: (data, hashlib.md5(data).hexdigest()) for name, data in packed.items()}


def write_set(root, idx_files):
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, data in idx_files.items():
        (raw / name).write_bytes(data)
    return root


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory, idx_files):
    """A folder for --data-dir that holds the small set; not to be written to."""
    return write_set(tmp_path_factory.mktemp("digits"), idx_files)


@pytest.fixture
def own_mnist_dir(tmp_path, idx_files):
    """The same set in a folder of the test's own, to damage."""
    return write_set(tmp_path / "digits", idx_files)
