"""01_single_node_multi_gpu.py: real launches, and bad calls, which end before any child starts."""

import os
import re
import signal

import pytest
import torch
from support import (
    PYTHON,
    ROOT,
    assert_nothing_left,
    end,
    files,
    fork,
    fork_workers,
    limit_file_size,
    pretend_one_gpu,
    read_until,
    record_draws,
    run,
    start,
    variant,
)

SCRIPT = "01_single_node_multi_gpu.py"


def test_two_ranks_train_and_prove_it(tmp_path):
    result = run(PYTHON, ROOT / SCRIPT, 3, 2, cwd=tmp_path)
    assert result.status == 0, result.output
    for rank in (0, 1):
        assert [line for line in result.lines(rank) if line.startswith("pid ")], result.output
    proof = re.search(r"gradient of a rank on its own images: (\S+) of", result.output)
    assert float(proof[1]) > 0.01, "the ranks' own gradients must differ: it is the point"
    proof = re.search(r"DDP leaves on each rank: (\S+)$", result.output, re.MULTILINE)
    assert float(proof[1]) < 1e-5
    epochs = result.epochs()
    assert list(epochs) == [1, 2, 3]
    assert epochs[3][0] < epochs[1][0] / 10 and epochs[3][1] > 0.95
    assert result.saved() == [2, 3]
    assert re.fullmatch(r"2 replicas are identical, sha256 \w{12}", result.lines(0)[-1])
    assert files(tmp_path) == ["checkpoint.pt"]
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["epoch"] == 3 and len(checkpoint["model"]) == 6


def fork_job(tmp_path, mnist_dir, script=SCRIPT, world_size=2, before=None, epochs=1, **changes):
    """Some epochs on the small set, in processes that have torch loaded already."""
    settings = {"total_epochs": epochs, "save_every": 1, "batch_size": 64}
    settings |= {"data_dir": str(mnist_dir), "checkpoint_path": "checkpoint.pt", **changes}
    return fork_workers(script, tmp_path, world_size, before=before, **settings)


def test_every_epoch_and_rank_draws_its_own_images(tmp_path, mnist_dir):
    result = fork_job(tmp_path, mnist_dir, before=record_draws, epochs=2)
    draws = {key: items for key, items in result.draws().items() if key[1] > 0}  # 0: the proof's
    assert sorted(draws) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert len({tuple(items) for items in draws.values()}) == 4, "a shuffle was repeated"
    for epoch in (1, 2):
        assert sorted(draws[0, epoch] + draws[1, epoch]) == list(range(1024)), "not all images"


def test_one_rank_says_that_there_is_nothing_to_compare(tmp_path, mnist_dir):
    result = fork_job(tmp_path, mnist_dir, world_size=1)
    assert result.status == 0, result.output
    assert re.fullmatch(r"one replica, sha256 \w{12}", result.lines(0)[-1])


def test_a_batch_that_three_ranks_do_not_divide(tmp_path, mnist_dir):
    result = fork_job(tmp_path, mnist_dir, world_size=3)
    assert result.status == 0, result.output
    assert "data: 1024 + 256 images of MNIST" in result.lines(0)
    assert "batch size 63: 3 ranks x 21 images" in result.lines(0)
    assert result.lines(0)[-1].startswith("3 replicas are identical, sha256 ")


def test_the_gradient_proof_can_fail(tmp_path, mnist_dir):
    line = "gradient(alone, images, labels), gradient(model, images"
    wrong = variant(tmp_path, SCRIPT, {line: line.replace("(model,", "(model.module,")})
    result = fork_job(tmp_path, mnist_dir, script=wrong)
    assert result.status == 1 and "RuntimeError: DDP's gradient is off by" in result.output


def test_the_replica_proof_can_fail(tmp_path, mnist_dir):
    line = "    check_replicas(model)\n"
    spoil = "    model.module.layers[0].bias.data[0] += rank\n"
    wrong = variant(tmp_path, SCRIPT, {line: spoil + line})
    result = fork_job(tmp_path, mnist_dir, script=wrong)
    assert result.status == 1 and "RuntimeError: the replicas differ" in result.output


@pytest.mark.long
def test_a_failing_child_ends_the_job_with_its_traceback(tmp_path, mnist_dir):
    line = "        accuracy = evaluate("
    fails = variant(tmp_path, SCRIPT, {line: "        rank == 1 and 1 / 0\n" + line})
    result = run(PYTHON, fails, 3, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 1
    assert "ZeroDivisionError: division by zero" in result.output
    assert "in train\n" in result.output
    assert result.epochs() == {}


def signal_in_training(tmp_path, mnist_dir, number, to_rank=None):
    """Start a long job, send a signal to one rank or to the parent; return (status, output)."""
    process = start(PYTHON, ROOT / SCRIPT, 1000, "--data-dir", mnist_dir, cwd=tmp_path)
    try:
        output = read_until(process, r"^\[rank 0/2\] epoch  1/")
        pids = dict(re.findall(r"^\[rank (\d)/2\] pid (\d+)", output, re.MULTILINE))
        os.kill(process.pid if to_rank is None else int(pids[str(to_rank)]), number)
        output, _ = process.communicate(timeout=60)
        assert_nothing_left(process)
        return process.returncode, output
    finally:
        end(process)


@pytest.mark.long
def test_a_killed_child_ends_the_job_with_one_line(tmp_path, mnist_dir):
    status, output = signal_in_training(tmp_path, mnist_dir, signal.SIGKILL, to_rank=1)
    assert status == 1
    assert "error: process 1 terminated with signal SIGKILL" in output


@pytest.mark.long
def test_an_interrupted_parent_takes_its_children_along(tmp_path, mnist_dir):
    status, output = signal_in_training(tmp_path, mnist_dir, signal.SIGINT)
    assert status == 130 and "error: interrupted" in output
    assert "Traceback" not in output


def test_a_full_disk_ends_the_job_and_keeps_the_old_file(tmp_path, mnist_dir):
    old = tmp_path / "checkpoint.pt"
    torch.save({"epoch": 1}, old)
    before = old.read_bytes()
    result = fork_job(tmp_path, mnist_dir, world_size=1, before=limit_file_size)
    assert result.status == 1
    assert result.error().startswith("cannot write checkpoint.pt, which stays as it was; is the")
    assert files(tmp_path) == ["checkpoint.pt"] and old.read_bytes() == before


BAD_CALLS = {
    "batch size in words": (["--batch-size", "many"], "--batch-size: invalid int value: 'many'"),
    "negative epochs": ([-3], "TOTAL_EPOCHS, SAVE_EVERY and --nprocs must be 1 or more"),
    "save every 0": ([3, 0], "TOTAL_EPOCHS, SAVE_EVERY and --nprocs must be 1 or more"),
    "no processes": (["--nprocs", 0], "TOTAL_EPOCHS, SAVE_EVERY and --nprocs must be 1 or more"),
    "unknown option": (["--epochs", 3], "unrecognized arguments: --epochs"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_end_in_one_line(tmp_path, name):
    arguments, message = BAD_CALLS[name]
    result = fork(SCRIPT, *arguments, cwd=tmp_path)
    assert result.status == 2, result.output
    assert message in result.error()
    assert len(result.output.splitlines()) == 1, result.output
    assert files(tmp_path) == []


@pytest.mark.parametrize("batch_size", [-5, 0, 1, 1026])
def test_a_batch_size_that_cannot_be_ends_in_one_line(tmp_path, mnist_dir, batch_size):
    result = fork_job(tmp_path, mnist_dir, batch_size=batch_size)
    assert result.status == 2, result.output
    assert result.error() == "--batch-size must be from 2 (an image for each rank) to 1024"
    assert "Traceback" not in result.output and files(tmp_path) == []


@pytest.mark.parametrize("path", ["no/such.pt", "/proc/a.pt", "."])
def test_a_path_that_cannot_be_written_ends_in_one_line(tmp_path, mnist_dir, path):
    # One rank: a second one may show how it lost the first, before it is ended.
    result = fork_job(tmp_path, mnist_dir, world_size=1, checkpoint_path=path)
    assert result.status == 1, result.output
    assert result.error().startswith(f"cannot write {path}, which stays as it was")
    assert "Traceback" not in result.output and files(tmp_path) == []


@pytest.mark.long
def test_the_parent_adds_nothing_to_what_a_child_has_said(tmp_path, mnist_dir):
    """With real processes: one line of error, and the child's status."""
    command = (PYTHON, ROOT / SCRIPT, "--data-dir", mnist_dir, "--batch-size", 1)
    result = run(*command, cwd=tmp_path)
    assert result.status == 2, result.output
    assert result.error() == "--batch-size must be from 2 (an image for each rank) to 1024"
    assert "Traceback" not in result.output


def test_more_processes_than_gpus(tmp_path):
    result = fork(SCRIPT, "--nprocs", 2, cwd=tmp_path, before=pretend_one_gpu)
    assert result.status == 2
    assert result.error().startswith("2 processes need a GPU each, and there are 1: use --nprocs 1")


def test_started_with_torchrun(tmp_path):
    result = fork(SCRIPT, cwd=tmp_path, env={"LOCAL_RANK": "0"})
    assert result.status == 2
    assert "run it with python, not with torchrun" in result.error()


def test_a_diverged_run_does_not_pass_for_identical_replicas(tmp_path, mnist_dir):
    line = "    check_replicas(model)\n"
    spoil = "    model.module.layers[0].bias.data[0] = torch.nan if rank == 1 else 0\n"
    wrong = variant(tmp_path, SCRIPT, {line: spoil + line})
    result = fork_job(tmp_path, mnist_dir, script=wrong)
    assert result.status == 1 and "RuntimeError: the replicas differ" in result.output


def test_a_damaged_data_set(tmp_path, own_mnist_dir):
    file = own_mnist_dir / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])
    result = fork_job(tmp_path, own_mnist_dir)
    assert result.status == 1
    assert f"python download_mnist.py --data-dir {own_mnist_dir}" in result.error()
    assert file.exists()
