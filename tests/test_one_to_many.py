"""The two loops of the front page's diff end with the same weights; each line of it is needed."""

import os
import re
import shutil
from functools import partial

import pytest
import shown
import torch
from forked import fork, fork_ranks, variant
from started import ACTIVE, ROOT, run

ONE, MANY = "docs/one_process.py", "docs/many_processes.py"
SAMPLER = {
    "DataLoader, DistributedSampler,": "DataLoader, RandomSampler,",
    "DistributedSampler(dataset)": "RandomSampler(dataset, generator=torch.Generator())",
    "sampler.set_epoch(epoch)": "sampler.generator.manual_seed(epoch)",
}
REDUCE = re.search(r"\n +dist\.all_reduce.*", (ROOT / MANY).read_text())[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the loop before prints, and the weights with which it ends."""
    folder = tmp_path_factory.mktemp("plain")
    return ended(fork(ONE, cwd=folder, before=partial(torch.set_num_threads, 1)), folder)


def ended(result, folder):
    """([loss of each epoch], weights) of a run; it prints a line for each epoch, and no other."""
    lines = result.ok().output.splitlines()
    found = [re.fullmatch(r"epoch (\d): loss (\d+\.\d{4})", line) for line in lines]
    assert all(found) and [int(match[1]) for match in found] == [*range(5)], result.output
    weights = torch.load(folder / "model.pt", weights_only=True)
    return [float(match[2]) for match in found], weights


def apart(one, other):
    """(largest difference of the losses, of the weights) of two runs."""
    (losses, weights), (other_losses, other_weights) = one, other
    assert weights.keys() == other_weights.keys() and len(weights) == 4
    return (
        max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)),
        max((weights[name] - other_weights[name]).abs().max().item() for name in weights),
    )


def assert_same(one, other):
    losses, weights = apart(one, other)
    assert losses < 1.5e-4 and weights < 1e-5  # losses are printed with four digits


@pytest.mark.parametrize(("sign", "script"), [("+", ONE), ("-", MANY)])
def test_the_diff_is_that_of_the_two_files(sign, script):
    diff = shown.block("from one process to many").splitlines()
    lines = [line[1:] for line in diff if line[:1] != sign]
    assert lines == (ROOT / script).read_text().splitlines()


def test_the_loop_before_prints_what_the_page_says(plain):
    found = re.findall(r"`epoch ([04]): loss (\S+)`", shown.README.read_text())
    assert [round(plain[0][int(number)] - float(loss), 3) for number, loss in found] == [0, 0]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_loop_after_ends_with_the_same_weights(tmp_path, plain, world_size):
    assert_same(ended(fork_ranks(MANY, cwd=tmp_path, world_size=world_size), tmp_path), plain)
    assert sorted(os.listdir(tmp_path)) == ["model.pt"]


@pytest.mark.parametrize(
    "changes",
    [
        {"    model = DDP(model)\n": "", "model.module": "model"},
        SAMPLER,
        {"64 // dist.get_world_size()": "64"},
        {"        sampler.set_epoch(epoch)  # another order in each epoch\n": ""},
    ],
    ids=["DDP", "DistributedSampler", "a share of the batch", "set_epoch"],
)
def test_without_a_line_the_weights_differ(tmp_path, plain, changes):
    result = fork_ranks(variant(tmp_path, MANY, changes), cwd=tmp_path)
    _, weights = apart(ended(result, tmp_path), plain)
    assert weights > 1e-3


def test_without_three_other_lines(tmp_path, plain):
    """Each rank prints a loss of its own, and the plain model would not load what is saved."""
    changes = {
        "range(5)": "range(1)",
        REDUCE: "",
        "dist.get_rank() == 0": "True",
        "model.module": "model",
    }
    result = fork_ranks(variant(tmp_path, MANY, changes), cwd=tmp_path)
    losses = re.findall(r"epoch 0: loss (\d\.\d{4})", result.output)
    assert len(losses) == 2 and all(abs(float(loss) - plain[0][0]) > 1e-2 for loss in losses)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(weights) == [f"module.{name}" for name in plain[1]]


@pytest.mark.long
def test_both_loops_as_a_reader_starts_them(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    # With this variable set, torchrun does not say that it sets it.
    result = run(
        "sh", "-euc", shown.block("both loops"), cwd=tmp_path, env=ACTIVE | {"OMP_NUM_THREADS": "1"}
    )
    lines = re.findall(r"^epoch \d: loss \S+$", result.output, re.MULTILINE)
    assert result.status == 0 and len(lines) == 10 and lines[:5] == lines[5:], result.output
