"""01: two ranks train and prove it; each proof can fail; a wrong call ends in words."""

import os
import re
import signal

import pytest
import torch
from forked import fork, fork_workers, variant
from started import PYTHON, ROOT, assert_nothing_left, end, family, files, read_until, run, start

SCRIPT = "01_single_node_multi_gpu.py"


def test_two_ranks_train_and_prove_it(tmp_path, mnist_dir):
    """Started by mp.spawn, as always."""
    data = ("--data-dir", mnist_dir, "--batch-size", 16)
    result = fork(SCRIPT, 3, 2, *data, cwd=tmp_path, timeout=120)
    assert result.status == 0, result.output
    search = result.output, re.MULTILINE
    proof = re.search(r"on its own images: differs from the whole batch's by (\S+)$", *search)
    assert float(proof[1]) > 0.01, "the ranks' own gradients must differ: it is the point"
    proof = re.search(r"leaves on each rank: differs from the whole batch's by (\S+)$", *search)
    assert float(proof[1]) < 1e-5
    epochs = result.epochs()
    assert list(epochs) == [1, 2, 3]
    assert epochs[3][0] < epochs[1][0] / 3 and epochs[3][1] > 0.95
    assert result.saved() == [2, 3] and files(tmp_path) == ["checkpoint.pt"]
    assert re.fullmatch(r"2 replicas are identical, sha256 \w{12}", result.lines(0)[-1])
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["epoch"] == 3 and len(checkpoint["model"]) == 6


def fork_job(tmp_path, mnist_dir, script=SCRIPT, world_size=2, before=None, epochs=1, **changes):
    """Some epochs on the small set, in processes that have torch loaded already."""
    settings = {"total_epochs": epochs, "save_every": 1, "batch_size": 64}
    settings |= {"data_dir": str(mnist_dir), "checkpoint_path": "checkpoint.pt", **changes}
    return fork_workers(script, tmp_path, world_size, before=before, **settings)


@pytest.mark.parametrize(("world_size", "batch", "shown"), [
    (1, 64, "1 ranks x 64 images"), (3, 64, "3 ranks x 21 images"),
    (2, 5000, "2 ranks x 512 images"),  # more than there are
])  # fmt: skip
def test_other_numbers_of_ranks_and_images(tmp_path, mnist_dir, world_size, batch, shown):
    result = fork_job(tmp_path, mnist_dir, world_size=world_size, batch_size=batch)
    assert result.status == 0, result.output
    assert result.lines(0)[0].endswith(f"batch {shown}")
    assert re.fullmatch(rf"{world_size} replicas are .*, sha256 \w{{12}}", result.lines(0)[-1])


REPLICAS = "        check_replicas(model)"


@pytest.mark.parametrize(("old", "new", "message"), [
    ("gradient(model, images, l", "gradient(alone, images, l", "DDP's gradient is not that"),
    (REPLICAS, f"        model.module.layers[0].bias.data[0] += rank\n{REPLICAS}",
     "the replicas differ"),
])  # fmt: skip
def test_the_proofs_can_fail(tmp_path, mnist_dir, old, new, message):
    wrong = variant(tmp_path, SCRIPT, {old: new})
    result = fork_job(tmp_path, mnist_dir, script=wrong)
    assert result.status == 1 and f"RuntimeError: {message}" in result.output, result.output
    assert not (tmp_path / "checkpoint.pt").exists()


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
def test_when_one_process_is_killed_all_end(tmp_path, mnist_dir):
    process = start(PYTHON, ROOT / SCRIPT, 1000, "--data-dir", mnist_dir, cwd=tmp_path)
    try:
        read_until(process, r"^\[rank 0/2\] epoch  1/")
        os.kill(max(pid for pid, line in family(process).items() if "spawn_main" in line),
                signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert_nothing_left(process)
        assert process.returncode == 1 and "terminated with signal SIGKILL" in output, output
    finally:
        end(process)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--batch-size", "many"], "--batch-size: invalid int value: 'many'"),
    (["--batch-size", 1], "must be 1 or more"),
    ([-3], "must be 1 or more"),
    ([3, 0], "must be 1 or more"),
    (["--nprocs", 0], "must be 1 or more"),
    (["--checkpoint-path", "no/such.pt"], "cannot write into the folder of no/such.pt"),
])  # fmt: skip
def test_a_wrong_call_ends_in_words(tmp_path, arguments, message):
    result = fork(SCRIPT, *arguments, cwd=tmp_path)
    assert result.status == 2 and message in result.error(), result.output
    assert files(tmp_path) == []
