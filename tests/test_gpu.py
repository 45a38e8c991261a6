"""What only a GPU can show: pytest -m gpu. On one GPU some, on two or more all.

The tests start the scripts as a reader does, with the GPUs visible (all other tests hide them).
What they measure goes to docs/transcripts/gpu.json.
"""

import datetime
import json
import os
import re
import signal
import time

import pytest
from conftest import VISIBLE, machine_with_gpus
from digits import digest
from started import PYTHON, ROOT, TORCHRUN, family, read_until, run, running, wait_until

pytestmark = pytest.mark.gpu

ONE, ELASTIC, MULTINODE, COLLECTIVES, _, PARALLEL, *_ = sorted(
    path.name for path in ROOT.glob("0*_*.py")
)
JOB = (*TORCHRUN, "--standalone", "--nproc-per-node=gpu")
SEES_GPUS = {"CUDA_VISIBLE_DEVICES": VISIBLE}  # the environment in which a command sees them


@pytest.fixture(scope="module")
def gpus():
    return machine_with_gpus()


@pytest.fixture(scope="module")
def two_gpus(gpus):
    if gpus["gpus"] < 2:
        pytest.skip("needs two GPUs, and there is one")


@pytest.fixture(scope="module")
def figures(gpus):
    """What the tests measure; written down at the end."""
    measured = {}
    yield measured
    content = {"date": datetime.date.today().isoformat(), "machine": gpus, "figures": measured}
    (ROOT / "docs/transcripts/gpu.json").write_text(json.dumps(content, indent=2) + "\n")


@pytest.fixture
def torchrun(tmp_path):
    """A function: run a script, or a path, under torchrun on the GPUs; return the result."""

    def launch(script, *arguments, processes="gpu", restarts=0):
        command = (
            *TORCHRUN,
            "--standalone",
            f"--nproc-per-node={processes}",
            f"--max-restarts={restarts}",
            ROOT / script,
            *arguments,
        )
        return run(*command, cwd=tmp_path, env=SEES_GPUS, timeout=300).ok()

    return launch


def test_crash_and_resume(torchrun, tmp_path, figures):
    """Whether the bits are the same on a GPU is not promised: it is measured."""
    digests = {}
    for name, crash in (("uninterrupted", ()), ("again", ()), ("crash", ("--crash-epoch", 3))):
        result = torchrun(ELASTIC, 6, 1, *crash, restarts=3)
        assert crash or not re.search("Warning|deprecated", result.output), result.output
        digests[name] = digest(result)
        (tmp_path / "snapshot.pt").unlink()
    assert "resumed from snapshot.pt at epoch 3" in result.output
    assert result.epochs()[6][1] > 0.95
    figures["02: sha256"] = digests
    figures["02: equal to the last bit"] = len(set(digests.values())) == 1


def test_mp_spawn(tmp_path, gpus, figures):
    result = run(PYTHON, ROOT / ONE, 3, 1, cwd=tmp_path, env=SEES_GPUS, timeout=300)
    assert result.status == 0 and "Warning" not in result.output, result.output
    proof = re.search(r"leaves on each rank: .* by (\S+)$", result.output, re.MULTILINE)
    figures["01: gradient off by"] = float(proof[1])
    assert float(proof[1]) < 1e-5 and result.epochs()[3][1] > 0.95


def test_torchrun_killed_leaves_no_worker_and_no_memory(tmp_path):
    def memory_in_use():
        """Bytes on GPU 0, by whomever."""
        code = "import torch; free, total = torch.cuda.mem_get_info(0); print(total - free)"
        return int(run(PYTHON, "-c", code, cwd=tmp_path, env=SEES_GPUS).output.split()[-1])

    limit = memory_in_use() + 50 * 2**20  # of what the driver itself keeps
    with running(
        *JOB, ROOT / "template/train.py", 10_000, 10_000, cwd=tmp_path, env=SEES_GPUS
    ) as process:
        read_until(process, "step +20/10000")
        process.kill()
        wait_until(lambda: not family(process), "workers live on", timeout=30)
    wait_until(lambda: memory_in_use() < limit, "memory still in use", timeout=60, pause=1)


def test_all_collectives(two_gpus, torchrun):
    result = torchrun(COLLECTIVES)
    assert re.search(r"18 sections passed their checks on \d+ ranks, by nccl", result.output)


def test_a_model_on_two_gpus(two_gpus, torchrun, gpus):
    count = 2 ** (gpus["gpus"].bit_length() - 1)  # a power of two, which divides the batch
    for mode, processes, trainings in (("devices", count // 2, 1), ("pipeline", count, 2)):
        result = torchrun(PARALLEL, "--mode", mode, processes=processes)
        found = re.findall(r"weights off by (\S+) of", result.output)
        assert len(found) == trainings and all(float(off) < 1e-5 for off in found)


def test_a_rank_that_stops(two_gpus, tmp_path, figures):
    """What the others print, and how long it takes, is written down: it differs by version."""
    with running(
        *JOB, ROOT / MULTINODE, 1000, 1000, "--timeout", 20, cwd=tmp_path, env=SEES_GPUS
    ) as process:
        output = read_until(process, "epoch +1/1000")
        os.kill(int(re.search(r"cuda:1 +(\d+)$", output, re.MULTILINE)[1]), signal.SIGSTOP)
        begin = time.monotonic()
        output, _ = process.communicate(timeout=300)
        assert process.returncode != 0 and not family(process)
    figures["03, a rank stops: seconds to the end, timeout 20 s"] = time.monotonic() - begin
    figures["03, a rank stops: what is printed"] = output.splitlines()[:60]
