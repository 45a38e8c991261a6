"""02: killed and resumed to the bit; a bad call or start ends in one line and does no harm.

Bad snapshots: test_faults.py. Real launches: test_repository.py, test_reliability.py.
"""

import re

import pytest
import torch
from snapshots import BAD_CALLS
from support import come_late, difference, files, fork, fork_ranks, load, pretend_one_gpu, variant

SCRIPT = "02_torchrun_elastic.py"


def train(folder, *arguments, **options):
    folder.mkdir(exist_ok=True)
    return fork_ranks(SCRIPT, *arguments, cwd=folder, **options)


OTHERS = [pytest.param(world_size, marks=pytest.mark.long) for world_size in (1, 2, 4)]


@pytest.mark.parametrize("world_size", [3, *OTHERS])
def test_killed_and_resumed_is_bit_for_bit_uninterrupted(tmp_path, mnist_dir, world_size):
    arguments, job = (3, 1, "--data-dir", mnist_dir), {"world_size": world_size}
    whole = train(tmp_path / "whole", *arguments, **job)
    assert whole.status == 0, whole.output
    killed = train(tmp_path / "killed", *arguments, "--crash-epoch", 2, max_restarts=3, **job)
    assert killed.status == 0 and killed.attempts == 2, killed.output
    assert "crash on purpose: SIGKILL in the middle of the epoch" in killed.lines(world_size - 1)
    assert "attempt 1: resumed from snapshot.pt at epoch 2" in killed.lines(0)
    assert killed.epochs() == whole.epochs() and len(whole.epochs()) == 3
    assert difference(load(tmp_path / "whole"), load(tmp_path / "killed")) == 0
    assert killed.lines(0)[-1] == whole.lines(0)[-1]  # with the sha256


def test_a_crash_loses_the_epochs_since_the_last_snapshot_only(tmp_path, mnist_dir):
    """And one restart is enough: no rank looks for those of the attempt before."""
    arguments = (4, 2, "--data-dir", mnist_dir, "--crash-epoch", 2)
    result = train(tmp_path, *arguments, max_restarts=1, before=come_late)
    assert result.status == 0, result.output
    epochs = re.findall(r"^\[rank 0/2\] epoch +(\d)/4", result.output, re.MULTILINE)
    assert epochs == ["1", "1", "2", "3", "4"]
    assert "attempt 1: there is no snapshot.pt yet, so begin with epoch 1" in result.lines(0)
    assert files(tmp_path) == ["snapshot.pt"] and load(tmp_path)["next_epoch"] == 5


@pytest.mark.long
def test_world_sizes_agree(tmp_path, mnist_dir):
    """1, 2 and 4 ranks take the same steps up to rounding, and this model does not amplify it."""
    found = {}
    for ranks in (1, 2, 4):
        folder, arguments = tmp_path / str(ranks), ("--data-dir", mnist_dir, "--batch-size", 16)
        accuracy = train(folder, 3, *arguments, world_size=ranks).epochs()[3][1]
        weights = torch.cat([tensor.flatten() for tensor in load(folder)["model"].values()])
        found[ranks] = weights, accuracy
    for weights, accuracy in (found[2], found[4]):
        assert 0 < (weights - found[1][0]).abs().max() < 1e-4
        assert accuracy > 0.95 and abs(accuracy - found[1][1]) <= 0.01


def test_another_world_size_goes_on_from_the_snapshot(tmp_path, mnist_dir):
    train(tmp_path, 1, 1, "--data-dir", mnist_dir, world_size=2)
    result = train(tmp_path, 2, 1, "--data-dir", mnist_dir, world_size=3)
    assert result.status == 0 and list(result.epochs()) == [2], result.output
    assert "batch size 63: 3 ranks x 21 images" in result.lines(0)


# ---- Bad calls and starts ----


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_end_in_one_line(tmp_path, mnist_dir, name):
    arguments, message, status = BAD_CALLS[name]
    result = train(tmp_path, *arguments, "--data-dir", mnist_dir)
    assert result.status == status, result.output
    assert message in result.error() and "Traceback" not in result.output
    assert files(tmp_path) == []


def test_bad_starts_end_in_one_line(tmp_path):
    on_two_machines = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for result, message in (
        (fork(SCRIPT, cwd=tmp_path), r"torchrun --standalone --nproc-per-node=2 .*/02_\w+.py 5 1$"),
        (fork(SCRIPT, cwd=tmp_path, env=on_two_machines), "one machine: use 03_multinode.py"),
        (train(tmp_path, before=pretend_one_gpu), "needs a GPU, and there are 1: use --nproc-per"),
    ):
        assert result.status == 2 and re.search(message, result.error()), result.output


def test_a_rank_that_never_comes_is_named(tmp_path):
    ask = "    store = dist.PrefixStore("
    script = variant(tmp_path, SCRIPT, {ask: f"    rank and time.sleep(60)\n{ask}",
                                        "timedelta(minutes=10)": "timedelta(seconds=2)"})
    result = fork_ranks(script, cwd=tmp_path)
    assert result.status == 1
    assert "rank 1 did not come within 2 s: look for an error above" in result.error()
