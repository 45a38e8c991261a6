"""01: mp.spawn's ranks train and prove it; the proof can fail; one that dies takes all along.

More of it: test_jobs.py, test_swap.py.
"""

import os
import re
import signal

import pytest
from forked import fork, fork_workers, variant
from started import PYTHON, ROOT, end, family, files, read_until, start, wait_until

SCRIPT = "01_single_node_multi_gpu.py"


def test_two_ranks_train_and_prove_it(tmp_path, mnist_dir):
    """Started by mp.spawn, as always."""
    data = ("--data-dir", mnist_dir, "--batch-size", 16)
    result = fork(SCRIPT, 2, *data, cwd=tmp_path, timeout=300)
    assert result.status == 0, result.output
    alone, by_ddp = re.findall(r"gradient .* differs from the whole batch's by (\S+)$",
                               result.output, re.MULTILINE)
    assert float(alone) > 0.01, "the ranks' own gradients must differ: it is the point"
    assert float(by_ddp) < 1e-5
    epochs = result.epochs()
    assert list(epochs) == [1, 2] and epochs[2][0] < epochs[1][0] / 2 and epochs[2][1] > 0.95
    assert result.saved() == [1, 2] and files(tmp_path) == ["checkpoint.pt"]
    assert re.fullmatch(r"2 replicas are identical, sha256 \w{12}", result.lines(0)[-1])


def fork_job(folder, mnist_dir, script=SCRIPT, **changes):
    """An epoch on the small set, in processes that have torch loaded already."""
    settings = {"total_epochs": 1, "save_every": 1, "batch_size": 64}
    settings |= {"data_dir": str(mnist_dir), "checkpoint_path": "checkpoint.pt", **changes}
    return fork_workers(script, folder, **settings)


def test_three_ranks_and_a_batch_of_more_images_than_there_are(tmp_path, mnist_dir):
    result = fork_job(tmp_path, mnist_dir, world_size=3, batch_size=5000)
    assert result.status == 0, result.output
    assert result.lines(0)[0].endswith("batch 3 ranks x 341 images")
    assert result.lines(0)[-1].startswith("3 replicas are identical, sha256 ")


# A model that nobody averages.
NO_DDP = """
class DDP(nn.Module):
    def __init__(self, module, **_):
        super().__init__()
        self.module = module

    def forward(self, images):
        return self.module(images)
"""


def test_the_proof_can_fail(tmp_path, mnist_dir):
    """(That replicas differ: test_jobs.py.)"""
    result = fork_job(tmp_path, mnist_dir, script=variant(tmp_path, SCRIPT, NO_DDP))
    assert result.status == 1 and "RuntimeError: DDP's gradient is not that" in result.output
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.long
def test_when_one_process_is_killed_all_end(tmp_path, mnist_dir):
    process = start(PYTHON, ROOT / SCRIPT, 1000, "--data-dir", mnist_dir, cwd=tmp_path)
    try:
        read_until(process, r"^\[rank 0/2\] epoch  1/")
        os.kill(max(pid for pid, line in family(process).items() if "spawn_main" in line),
                signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        wait_until(lambda: not family(process), "all have ended", timeout=10)
        assert process.returncode == 1 and "terminated with signal SIGKILL" in output, output
    finally:
        end(process)
