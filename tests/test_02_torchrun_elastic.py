"""02_torchrun_elastic.py: resumed to the bit, snapshots that cannot be used, bad calls."""

import os
import re
import runpy
import shutil
import signal

import pytest
import torch
from snapshots import BAD_CALLS, BAD_SNAPSHOTS
from support import (
    PYTHON,
    ROOT,
    TORCHRUN,
    difference,
    digest,
    files,
    fork,
    fork_ranks,
    forkserver,
    limit_file_size,
    load,
    pretend_one_gpu,
    record_draws,
    run,
    variant,
)
from torchvision.datasets import MNIST

SCRIPT = "02_torchrun_elastic.py"


def train(folder, *arguments, **options):
    folder.mkdir(exist_ok=True)
    return fork_ranks(SCRIPT, *arguments, cwd=folder, **options)


def weights(snapshot):
    return torch.cat([tensor.flatten() for tensor in snapshot["model"].values()])


ONE_AND_FOUR = [pytest.param(world_size, marks=pytest.mark.long) for world_size in (1, 4)]


@pytest.mark.parametrize("world_size", [2, 3, *ONE_AND_FOUR])
def test_killed_and_resumed_is_bit_for_bit_uninterrupted(tmp_path, mnist_dir, world_size):
    arguments, job = (4, 1, "--data-dir", mnist_dir), {"world_size": world_size}
    whole = train(tmp_path / "whole", *arguments, **job)
    assert whole.status == 0, whole.output
    killed = train(tmp_path / "killed", *arguments, "--crash-epoch", 3, max_restarts=3, **job)
    assert killed.status == 0 and killed.attempts == 2, killed.output
    assert "crash on purpose: SIGKILL in the middle of the epoch" in killed.lines(world_size - 1)
    assert "attempt 1: resumed from snapshot.pt at epoch 3" in killed.lines(0)
    assert killed.epochs() == whole.epochs() and len(whole.epochs()) == 4
    assert difference(load(tmp_path / "whole"), load(tmp_path / "killed")) == 0
    assert digest(killed) == digest(whole)


def test_snapshots_every_so_many_epochs_and_at_the_end(tmp_path, mnist_dir):
    result = train(tmp_path, 5, 2, "--data-dir", mnist_dir)
    assert result.saved() == [2, 4, 5]
    assert load(tmp_path)["next_epoch"] == 6
    assert files(tmp_path) == ["snapshot.pt"]


def test_without_restarts_the_next_call_resumes(tmp_path, mnist_dir):
    whole = train(tmp_path / "whole", 4, 1, "--data-dir", mnist_dir)
    crash = train(tmp_path / "twice", 4, 1, "--data-dir", mnist_dir, "--crash-epoch", 3)
    assert crash.status == -signal.SIGKILL
    result = train(tmp_path / "twice", 4, 1, "--data-dir", mnist_dir)
    assert list(result.epochs()) == [3, 4]
    assert difference(load(tmp_path / "whole"), load(tmp_path / "twice")) == 0
    assert digest(result) == digest(whole)


def test_a_crash_loses_the_epochs_since_the_last_snapshot_only(tmp_path, mnist_dir):
    arguments = (4, 2, "--data-dir", mnist_dir, "--crash-epoch", 4)
    result = train(tmp_path, *arguments, max_restarts=1)
    assert result.status == 0, result.output
    epochs = re.findall(r"^\[rank 0/2\] epoch +(\d)/4", result.output, re.MULTILINE)
    assert epochs == ["1", "2", "3", "3", "4"]


def test_a_finished_run_trains_nothing_again(tmp_path, mnist_dir):
    first = train(tmp_path, 2, 1, "--data-dir", mnist_dir)
    before = (tmp_path / "snapshot.pt").read_bytes()
    for total in (2, 1):
        result = train(tmp_path, total, 1, "--data-dir", mnist_dir)
        assert result.status == 0, result.output
        assert result.epochs() == {}
        assert any(line.startswith("nothing left to train") for line in result.lines(0))
        assert digest(result) == digest(first)
        assert (tmp_path / "snapshot.pt").read_bytes() == before


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


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_accuracy_counts_every_test_image_once(tmp_path, mnist_dir, world_size):
    """Against one process that sees all 256 images; three ranks cannot share them evenly."""
    arguments = (1, 1, "--data-dir", mnist_dir, "--batch-size", 300)
    reported = train(tmp_path, *arguments, world_size=world_size).epochs()[1][1]
    model = runpy.run_path(str(ROOT / SCRIPT))["Net"]()
    model.load_state_dict(load(tmp_path)["model"])
    split = MNIST(mnist_dir, train=False)
    correct = (model(split.data).argmax(dim=1) == split.targets).double().mean().item()
    assert reported == round(correct, 4) and 0.05 < correct < 0.95


def test_every_epoch_and_rank_draws_its_own_images(tmp_path, mnist_dir):
    result = train(tmp_path, 3, 3, "--data-dir", mnist_dir, before=record_draws)
    draws = {key: items for key, items in result.draws().items() if key[1] > 0}  # 0: settling
    assert sorted(draws) == [(rank, epoch) for rank in (0, 1) for epoch in (1, 2, 3)]
    assert {len(set(items)) for items in draws.values()} == {512}
    assert len({tuple(items) for items in draws.values()}) == 6, "a shuffle was repeated"
    for epoch in (1, 2, 3):
        assert sorted(draws[0, epoch] + draws[1, epoch]) == list(range(1024)), "not all images"


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


@pytest.mark.long
def test_a_fault_of_one_rank_alone_is_told(tmp_path, mnist_dir):
    """Local rank 0 is well and waits for rank 1, whose message must not be lost."""
    line = "    roll_call(store, rank, world_size)"
    script = variant(tmp_path, SCRIPT, {line: "    rank and stop('rank 1')\n" + line})
    result = fork_ranks(script, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 2 and result.error() == "rank 1"


def test_started_without_torchrun(tmp_path):
    result = fork(SCRIPT, cwd=tmp_path)
    assert result.status == 2
    assert "torchrun --standalone --nproc-per-node=2" in result.error()
    assert result.error().endswith("02_torchrun_elastic.py 5 1")


def test_on_several_machines(tmp_path):
    # One of the two: each speaks for its machine, so both may be heard.
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    result = fork(SCRIPT, cwd=tmp_path, env={"TORCHELASTIC_RUN_ID": "test", **job})
    assert result.status == 2 and "for one machine: use 03_multinode.py" in result.error()


def test_more_processes_than_gpus(tmp_path):
    result = train(tmp_path, before=pretend_one_gpu)
    assert result.status == 2
    assert "each process needs a GPU, and there are 1: use --nproc-per-node=gpu" in result.error()


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
def test_torch_distributed_launch_works_too(tmp_path, mnist_dir):
    launch = (PYTHON, "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node=2")
    result = run(*launch, ROOT / SCRIPT, 1, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 0, result.output
    assert list(result.epochs()) == [1]


@pytest.mark.long
def test_the_workers_own_traceback_is_reported(tmp_path, mnist_dir):
    line = "        accuracy = evaluate("
    variant(tmp_path, SCRIPT, {line: "        rank == 1 and 1 / 0\n" + line})
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
    result = run(*torchrun, SCRIPT, 1, 1, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 1
    report = result.output.partition("Root Cause")[2]
    assert "ZeroDivisionError: division by zero" in report and ", in train" in report


def share_cores_in_a_child(forbidden):
    """In a forked process: share the cores of two, where the system allows batch jobs or not."""
    if forbidden:
        def sched_setscheduler(*_):
            raise PermissionError(1, "Operation not permitted")

        os.sched_setscheduler = sched_setscheduler
    runpy.run_path(str(ROOT / SCRIPT))["share_cores"](2)
    assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 2)
    assert os.sched_getscheduler(0) == (os.SCHED_OTHER if forbidden else os.SCHED_BATCH)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch scheduling")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asked for on the CPU alone")
@pytest.mark.parametrize("forbidden", [False, True])
def test_the_cores_are_shared_by_batch_jobs(forbidden):
    process = forkserver.Process(target=share_cores_in_a_child, args=(forbidden,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
