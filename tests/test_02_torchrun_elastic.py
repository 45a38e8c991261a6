"""02: killed and resumed to the bit; bad snapshots and bad calls end in one line and do no harm."""

import os
import re
import shutil
import time

import pytest
import torch
from snapshots import BAD_CALLS, BAD_SNAPSHOTS
from support import (
    ROOT,
    TORCHRUN,
    come_late,
    difference,
    digest,
    files,
    fork,
    fork_ranks,
    limit_file_size,
    load,
    pretend_one_gpu,
    run,
    variant,
)

SCRIPT = "02_torchrun_elastic.py"


def train(folder, *arguments, **options):
    folder.mkdir(exist_ok=True)
    return fork_ranks(SCRIPT, *arguments, cwd=folder, **options)


def weights(snapshot):
    return torch.cat([tensor.flatten() for tensor in snapshot["model"].values()])


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
    assert digest(killed) == digest(whole)


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
    data, folders = ("--data-dir", mnist_dir, "--batch-size", 16), {}
    for world_size in (1, 2, 4):
        folders[world_size] = tmp_path / str(world_size)
    for epochs in (1, 3):
        found = {}
        for world_size, folder in folders.items():
            result = train(folder, epochs, 1, *data, world_size=world_size)
            found[world_size] = weights(load(folder)), result.epochs()[epochs][1]
        for other, accuracy in (found[2], found[4]):
            assert 0 < (other - found[1][0]).abs().max() < 1e-4
            assert abs(accuracy - found[1][1]) <= 0.01
    assert found[1][1] > 0.95


def test_another_world_size_goes_on_from_the_snapshot(tmp_path, mnist_dir):
    train(tmp_path, 1, 1, "--data-dir", mnist_dir, world_size=2)
    result = train(tmp_path, 2, 1, "--data-dir", mnist_dir, world_size=3)
    assert result.status == 0 and list(result.epochs()) == [2], result.output
    assert "batch size 63: 3 ranks x 21 images" in result.lines(0)


# ---- Snapshots that cannot be continued: refused, and left as they are ----


@pytest.fixture(scope="module")
def good_snapshot(tmp_path_factory, mnist_dir):
    folder = tmp_path_factory.mktemp("good")
    train(folder, 1, 1, "--data-dir", mnist_dir, world_size=1)
    return folder / "snapshot.pt"


@pytest.mark.parametrize("spoil", BAD_SNAPSHOTS, ids=lambda function: function.__name__)
def test_a_snapshot_that_cannot_be_continued_is_refused(tmp_path, mnist_dir, good_snapshot, spoil):
    path = tmp_path / "snapshot.pt"
    shutil.copy(good_snapshot, path)
    spoil(path, path.read_bytes())
    before = path.read_bytes()
    result = train(tmp_path, 2, 1, "--data-dir", mnist_dir)
    assert result.status == 1, result.output
    assert "snapshot.pt" in result.error() and BAD_SNAPSHOTS[spoil] in result.error()
    assert "move it" in result.error()
    assert "Traceback" not in result.output
    assert path.read_bytes() == before
    assert files(tmp_path) == ["snapshot.pt"], "code in the pickle was executed"


# ---- Bad calls ----

@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_end_in_one_line(tmp_path, mnist_dir, name):
    arguments, message, status = BAD_CALLS[name]
    result = train(tmp_path, *arguments, "--data-dir", mnist_dir)
    assert result.status == status, result.output
    assert message in result.error()
    assert "Traceback" not in result.output
    assert files(tmp_path) == []


def stay_away():
    """Called in a child: rank 1 does not come."""
    if os.environ["RANK"] == "1":
        time.sleep(60)


def test_a_rank_that_never_comes_is_named(tmp_path):
    script = variant(tmp_path, SCRIPT, {"timedelta(minutes=10)": "timedelta(seconds=2)"})
    result = fork_ranks(script, cwd=tmp_path, before=stay_away)
    assert result.status == 1 and "rank 1 did not come within 2 s" in result.error()


@pytest.mark.long
def test_a_fault_of_one_rank_alone_is_told(tmp_path, mnist_dir):
    """Local rank 0 is well and waits for rank 1, whose message must not be lost."""
    line = "    roll_call(store, rank, world_size)"
    script = variant(tmp_path, SCRIPT, {line: "    rank and stop('rank 1')\n" + line})
    result = fork_ranks(script, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 2 and result.error() == "rank 1"


ON_TWO_MACHINES = {
    "TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip


@pytest.mark.parametrize(("environment", "message"), [
    ({}, "torchrun --standalone --nproc-per-node=2 .*02_torchrun_elastic.py 5 1$"),
    (ON_TWO_MACHINES, "for one machine: use 03_multinode.py"),
])  # fmt: skip
def test_started_in_another_way(tmp_path, environment, message):
    result = fork(SCRIPT, cwd=tmp_path, env=environment)
    assert result.status == 2 and re.search(message, result.error()), result.output


def test_more_processes_than_gpus(tmp_path):
    result = train(tmp_path, before=pretend_one_gpu)
    assert result.status == 2
    assert "each process needs a GPU, and there are 1: use --nproc-per-node=1" in result.error()


def test_a_full_disk_keeps_the_last_snapshot(tmp_path, mnist_dir, good_snapshot):
    path = tmp_path / "snapshot.pt"
    shutil.copy(good_snapshot, path)
    arguments = (2, 1, "--data-dir", mnist_dir)
    result = train(tmp_path, *arguments, world_size=1, before=limit_file_size)
    assert result.status == 1
    assert "cannot write snapshot.pt, which stays as it was" in result.error()
    assert path.read_bytes() == good_snapshot.read_bytes()
    assert files(tmp_path) == ["snapshot.pt"]


# ---- Real launches ----


@pytest.mark.long
def test_torchrun_restarts_a_killed_rank(tmp_path):
    arguments = (ROOT / SCRIPT, 3, 1, "--crash-epoch", 2)
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    result = run(*torchrun, *arguments, cwd=tmp_path)
    assert result.status == 0, result.output
    assert "attempt 1: resumed from snapshot.pt at epoch 2" in result.lines(0)
    assert "attempt 2" not in result.output
    assert list(result.epochs()) == [1, 2, 3] and result.epochs()[3][1] > 0.95
    assert result.lines(0)[-1].startswith("2 replicas are identical, sha256 ")
    assert files(tmp_path) == ["snapshot.pt"]
    whole = train(tmp_path / "whole", 3, 1)
    assert difference(load(tmp_path), load(tmp_path / "whole")) == 0
    assert digest(result) == digest(whole)


@pytest.mark.long
def test_without_restarts_torchrun_ends_and_the_next_call_resumes(tmp_path, mnist_dir):
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / SCRIPT, 3, 1)
    crash = run(*torchrun, "--data-dir", mnist_dir, "--crash-epoch", 2, cwd=tmp_path)
    assert crash.status == 1 and "Signal 9 (SIGKILL)" in crash.output
    result = run(*torchrun, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 0 and list(result.epochs()) == [2, 3]


@pytest.mark.long
def test_the_workers_own_traceback_is_reported(tmp_path, mnist_dir):
    line = "        accuracy = evaluate("
    variant(tmp_path, SCRIPT, {line: "        rank == 1 and 1 / 0\n" + line})
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
    result = run(*torchrun, SCRIPT, 1, 1, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 1
    report = result.output.partition("Root Cause")[2]
    assert "ZeroDivisionError: division by zero" in report and ", in train" in report
