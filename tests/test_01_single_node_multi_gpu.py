"""01: two ranks train and prove it; each proof can fail; whatever goes wrong ends in one line."""

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
    run,
    start,
    variant,
)

SCRIPT = "01_single_node_multi_gpu.py"


def test_two_ranks_train_and_prove_it(tmp_path, mnist_dir):
    """Started by mp.spawn, as always."""
    data = ("--data-dir", mnist_dir, "--batch-size", 16)
    result = fork(SCRIPT, 3, 2, *data, cwd=tmp_path, timeout=120)
    assert result.status == 0, result.output
    for rank in (0, 1):
        assert [line for line in result.lines(rank) if line.startswith("pid ")], result.output
    proof = re.search(r"gradient of a rank on its own images: (\S+) of", result.output)
    assert float(proof[1]) > 0.01, "the ranks' own gradients must differ: it is the point"
    proof = re.search(r"DDP leaves on each rank: (\S+)$", result.output, re.MULTILINE)
    assert float(proof[1]) < 1e-5
    epochs = result.epochs()
    assert list(epochs) == [1, 2, 3]
    assert epochs[3][0] < epochs[1][0] / 3 and epochs[3][1] > 0.95
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


@pytest.mark.parametrize(("world_size", "batch", "end"), [
    (1, "64: 1 ranks x 64 images", r"one replica, sha256 \w{12}"),
    (3, "63: 3 ranks x 21 images", r"3 replicas are identical, sha256 \w{12}"),
])  # fmt: skip
def test_other_numbers_of_ranks(tmp_path, mnist_dir, world_size, batch, end):
    result = fork_job(tmp_path, mnist_dir, world_size=world_size)
    assert result.status == 0, result.output
    assert f"batch size {batch}" in result.lines(0)
    assert re.fullmatch(end, result.lines(0)[-1])


CHECK = "    check_replicas(model.module)"


@pytest.mark.parametrize(("old", "new", "message"), [
    ("gradient(model, images, l", "gradient(model.module, images, l", "DDP's gradient is off by"),
    (CHECK, f"    model.module.layers[0].bias.data[0] += rank\n{CHECK}", "the replicas differ"),
])  # fmt: skip
def test_the_proofs_can_fail(tmp_path, mnist_dir, old, new, message):
    wrong = variant(tmp_path, SCRIPT, {old: new})
    result = fork_job(tmp_path, mnist_dir, script=wrong)
    assert result.status == 1 and f"RuntimeError: {message}" in result.output, result.output


@pytest.mark.long
def test_a_failing_child_ends_the_job_with_its_traceback(tmp_path, mnist_dir):
    line = "        accuracy = evaluate("
    fails = variant(tmp_path, SCRIPT, {line: "        rank == 1 and 1 / 0\n" + line})
    result = run(PYTHON, fails, 3, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 1
    assert "ZeroDivisionError: division by zero" in result.output
    assert "in train\n" in result.output
    assert result.epochs() == {}


@pytest.mark.long
@pytest.mark.parametrize(("to_rank_1", "number", "status", "message"), [
    (True, signal.SIGKILL, 1, "error: process 1 terminated with signal SIGKILL"),
    (False, signal.SIGINT, 130, "error: interrupted"),
])  # fmt: skip
def test_when_one_process_ends_all_do(tmp_path, mnist_dir, to_rank_1, number, status, message):
    process = start(PYTHON, ROOT / SCRIPT, 1000, "--data-dir", mnist_dir, cwd=tmp_path)
    try:
        output = read_until(process, r"^\[rank 0/2\] epoch  1/")
        rank_1 = int(re.search(r"^\[rank 1/2\] pid (\d+)", output, re.MULTILINE)[1])
        os.kill(rank_1 if to_rank_1 else process.pid, number)
        output, _ = process.communicate(timeout=60)
        assert_nothing_left(process)
        assert process.returncode == status and message in output, output
        assert to_rank_1 or "Traceback" not in output
    finally:
        end(process)


def test_a_full_disk_ends_the_job_and_keeps_the_old_file(tmp_path, mnist_dir):
    old = tmp_path / "checkpoint.pt"
    torch.save({"epoch": 1}, old)
    before = old.read_bytes()
    result = fork_job(tmp_path, mnist_dir, world_size=1, before=limit_file_size)
    assert result.status == 1
    assert result.error().startswith("cannot write checkpoint.pt, which stays as it was; is the")
    assert files(tmp_path) == ["checkpoint.pt"] and old.read_bytes() == before


ONE_OR_MORE = "TOTAL_EPOCHS, SAVE_EVERY and --nprocs must be 1 or more"
ONE_GPU, TORCHRUN = {"before": pretend_one_gpu}, {"env": {"LOCAL_RANK": "0"}}


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (["--batch-size", "many"], {}, "--batch-size: invalid int value: 'many'"),
    ([-3], {}, ONE_OR_MORE),
    ([3, 0], {}, ONE_OR_MORE),
    (["--nprocs", 0], {}, ONE_OR_MORE),
    (["--epochs", 3], {}, "unrecognized arguments: --epochs"),
    (["--nprocs", 2], ONE_GPU, "2 processes need a GPU each, and there are 1: use --nprocs 1"),
    ([], TORCHRUN, "run it with python, not with torchrun"),
])  # fmt: skip
def test_bad_calls_end_in_one_line(tmp_path, arguments, options, message):
    result = fork(SCRIPT, *arguments, cwd=tmp_path, **options)
    assert result.status == 2, result.output
    assert message in result.error()
    assert len(result.output.splitlines()) == 1, result.output
    assert files(tmp_path) == []


BATCH_SIZE = "--batch-size must be from 2 (an image for each rank) to 1024"


@pytest.mark.parametrize(("settings", "status", "message"), [
    ({"batch_size": 0}, 2, BATCH_SIZE),
    ({"batch_size": 1}, 2, BATCH_SIZE),
    ({"batch_size": 1026}, 2, BATCH_SIZE),
    # One rank: a second one may show how it lost the first, before it is ended.
    ({"world_size": 1, "checkpoint_path": "no/such.pt"}, 1, "cannot write no/such.pt, which stays"),
    ({"world_size": 1, "checkpoint_path": "."}, 1, "cannot write ., which stays as it was"),
])  # fmt: skip
def test_bad_settings_end_in_one_line(tmp_path, mnist_dir, settings, status, message):
    result = fork_job(tmp_path, mnist_dir, **settings)
    assert result.status == status and message in result.error(), result.output
    assert "Traceback" not in result.output and files(tmp_path) == []


@pytest.mark.long
def test_the_parent_adds_nothing_to_what_a_child_has_said(tmp_path, mnist_dir):
    """With real processes: one line of error, and the child's status."""
    command = (PYTHON, ROOT / SCRIPT, "--data-dir", mnist_dir, "--batch-size", 1)
    result = run(*command, cwd=tmp_path)
    assert result.status == 2 and result.error() == BATCH_SIZE, result.output
    assert "Traceback" not in result.output


def test_a_damaged_data_set(tmp_path, own_mnist_dir):
    file = own_mnist_dir / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])
    result = fork_job(tmp_path, own_mnist_dir)
    assert result.status == 1
    assert f"python download_mnist.py --data-dir {own_mnist_dir}" in result.error()
    assert file.exists()
