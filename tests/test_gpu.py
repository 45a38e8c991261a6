"""What only a GPU can show: pytest -m gpu. On one GPU some, on two or more all.

The tests start the scripts as a reader does, with the GPUs visible (all other tests hide them).
What they measure goes to docs/transcripts/gpu.json.
"""

import datetime
import json
import os
import re
import signal
import statistics
import time

import pytest
from conftest import VISIBLE, machine_with_gpus
from support import PYTHON, ROOT, TORCHRUN, end, family, read_until, run, start, variant, wait_until

if "GPU_TESTS" in os.environ and not machine_with_gpus()["gpus"]:
    pytest.skip("torch sees no GPU here", allow_module_level=True)
pytestmark = pytest.mark.gpu

ONE, ELASTIC, MULTINODE = (
    "01_single_node_multi_gpu.py", "02_torchrun_elastic.py", "03_multinode.py")  # fmt: skip
COLLECTIVES, PARALLEL = "04_collectives.py", "06_model_parallel_ddp.py"
OLD = {"TORCH_DIST_USE_NCCL2": "0"}


@pytest.fixture(scope="module")
def gpus():
    return machine_with_gpus()


@pytest.fixture(scope="module")
def two_gpus(gpus):
    if gpus["gpus"] < 2:
        pytest.skip("needs two GPUs, and there is one")


@pytest.fixture(scope="module")
def visible():
    """The environment in which a command sees the GPUs."""
    return {"CUDA_VISIBLE_DEVICES": VISIBLE}


@pytest.fixture(scope="module")
def figures(gpus):
    """What the tests measure; written down at the end."""
    measured = {}
    yield measured
    content = {"date": datetime.date.today().isoformat(), "machine": gpus, "figures": measured}
    (ROOT / "docs/transcripts/gpu.json").write_text(json.dumps(content, indent=2) + "\n")


@pytest.fixture
def torchrun(tmp_path, visible):
    """A function: run a script, or a path, under torchrun on the GPUs; return the result."""
    def launch(script, *arguments, processes="gpu", options=(), env=None, timeout=300):
        return run(*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", *options,
                   ROOT / script, *arguments, cwd=tmp_path, env=visible | (env or {}),
                   timeout=timeout)  # fmt: skip
    return launch


def speeds(result):
    return [int(n) for n in re.findall(r"\| +(\d+) images/s", result.output)]


def own_warnings(output):
    """Warnings that a script causes, without those of torchrun about OMP_NUM_THREADS."""
    return [line for line in output.splitlines() if "Warning" in line or "deprecated" in line]


# ---- One GPU or more ----


def test_the_bare_command(torchrun, gpus, figures):
    result = torchrun(ELASTIC, 50, 10)
    assert result.status == 0, result.output
    for rank in range(gpus["gpus"]):
        [line] = [line for line in result.lines(rank) if "attempt 0" in line]
        assert line.endswith(f", cuda:{rank}, nccl")
    assert not own_warnings(result.output), own_warnings(result.output)
    assert result.epochs()[50][1] > 0.97 and result.saved() == [10, 20, 30, 40, 50]
    figures["02, 50 10: images/s, median of the epochs"] = statistics.median(speeds(result))


def test_crash_and_resume(torchrun, tmp_path, figures):
    """Whether the bits are the same on a GPU is not promised: it is measured."""
    digests = {}
    for name, crash in (("uninterrupted", ()), ("again", ()), ("crash", ("--crash-epoch", 3))):
        result = torchrun(ELASTIC, 6, 1, *crash, options=["--max-restarts=3"])
        assert result.status == 0, result.output
        digests[name] = re.search(r"sha256 (\w{12})$", result.output, re.MULTILINE)[1]
        (tmp_path / "snapshot.pt").unlink()
    assert "resumed from snapshot.pt at epoch 3" in result.output
    assert result.epochs()[6][1] > 0.95
    figures["02: sha256"] = digests
    figures["02: equal to the last bit"] = len(set(digests.values())) == 1
    print(f"equal to the last bit: {len(set(digests.values())) == 1}, {digests}")


def test_mp_spawn(tmp_path, visible, gpus, figures):
    result = run(PYTHON, ROOT / ONE, 3, 1, cwd=tmp_path, env=visible, timeout=300)
    assert result.status == 0, result.output
    for rank in range(gpus["gpus"]):
        [line] = [line for line in result.lines(rank) if line.startswith("pid ")]
        assert line.endswith(f", cuda:{rank}, nccl")
    proof = re.search(r"DDP leaves on each rank: (\S+)$", result.output, re.MULTILINE)
    figures["01: gradient off by"] = float(proof[1])
    assert float(proof[1]) < 1e-5
    assert result.epochs()[3][1] > 0.95 and not own_warnings(result.output)


@pytest.mark.parametrize("script", [ELASTIC, MULTINODE, COLLECTIVES, PARALLEL])
def test_more_processes_than_gpus_are_refused(torchrun, gpus, script):
    mode = ("--mode", "pipeline") if script == PARALLEL else ()
    result = torchrun(script, *mode, processes=gpus["gpus"] + 1)
    assert result.status == 1 and "Traceback (most recent call last)" not in result.output
    assert "CUDA_VISIBLE_DEVICES= in front" in result.error()


def test_more_processes_than_gpus_are_refused_by_01(tmp_path, visible, gpus):
    result = run(PYTHON, ROOT / ONE, "--nprocs", gpus["gpus"] + 1, cwd=tmp_path, env=visible)
    assert result.status == 2
    assert f"there are {gpus['gpus']}: use --nprocs {gpus['gpus']}" in result.error()


def test_03_resumes(torchrun):
    assert torchrun(MULTINODE, 2, 1).status == 0
    result = torchrun(MULTINODE, 4, 1)
    assert result.status == 0 and list(result.epochs()) == [3, 4], result.output
    assert re.search(r"resumed from snapshot.pt of \S+ at epoch 3", result.output)


def test_one_gpu_is_too_few_for_04_and_06(torchrun, gpus):
    one = {"CUDA_VISIBLE_DEVICES": (VISIBLE or "0").split(",")[0]}
    for script, arguments, message in (
        (COLLECTIVES, (), "one rank has nobody to talk to"),
        (PARALLEL, ("--mode", "devices"), "two GPUs a process, not 1 for 1"),
        (PARALLEL, ("--mode", "pipeline"), "make no grid of 2 stages"),
    ):
        result = torchrun(script, *arguments, processes=1, env=one)
        assert result.status == 1 and message in result.error(), result.output


def memory_in_use(visible, folder):
    """Bytes in use on GPU 0, by whomever."""
    code = "import torch; free, total = torch.cuda.mem_get_info(0); print(total - free)"
    return int(run(PYTHON, "-c", code, cwd=folder, env=visible).output.split()[-1])


def test_torchrun_killed_leaves_no_worker_and_no_memory(tmp_path, visible):
    before = memory_in_use(visible, tmp_path)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=gpu", ROOT / ELASTIC, 1000, 1000]
    process = start(*command, cwd=tmp_path, env=visible)
    try:
        read_until(process, "epoch  2/1000")
        process.kill()
        wait_until(lambda: not family(process), "workers live on", timeout=30)
        tolerance = 50 * 2**20  # of what the driver itself keeps
        wait_until(lambda: memory_in_use(visible, tmp_path) < before + tolerance,
                   "GPU memory is still in use", timeout=60, pause=1)  # fmt: skip
    finally:
        end(process)


@pytest.mark.parametrize(("name", "arguments"), [
    ("throughput", ("--rounds", 2, "--images", 4096, "--batch-sizes", 64)),
    ("startup", ("--rounds", 1)),
    ("recovery", ("--rounds", 1, "--megabytes", 10)),
    ("scaling", ("--rounds", 1, "--steps", 5)),
    ("ddp_anatomy", ("--rounds", 1)),
])  # fmt: skip
def test_a_benchmark(tmp_path, visible, figures, name, arguments):
    """Each at its smallest. throughput replays a step as a CUDA graph."""
    command = [PYTHON, ROOT / f"benchmarks/{name}.py", *arguments, "--results-dir", tmp_path]
    result = run(*command, cwd=tmp_path, env=visible, timeout=600)
    assert result.status == 0, result.output
    if name == "throughput":
        assert "limit: no input" in result.output and "02, no input" in result.output
    figures[f"benchmarks/{name}.py"] = result.output.splitlines()


def test_other_tests_see_no_gpu(tmp_path, visible):
    command = [PYTHON, "-m", "pytest", "-q", ROOT / "tests/test_support.py"]
    result = run(*command, "-k", "gpus_are_hidden", cwd=ROOT, env=visible | {"GPU_TESTS": None})
    assert result.status == 0 and "1 passed" in result.output, result.output


# ---- Two GPUs or more ----


@pytest.mark.usefixtures("two_gpus")
def test_all_collectives(torchrun, figures):
    result = torchrun(COLLECTIVES)
    assert result.status == 0, result.output
    assert re.search(r"18 of 18 sections passed their checks", result.output)
    result = torchrun(COLLECTIVES, "--bench")
    assert result.status == 0, result.output
    figures["04 --bench"] = result.lines(0)


@pytest.mark.usefixtures("two_gpus")
def test_a_model_on_two_gpus(torchrun, figures, gpus):
    for mode, processes in (("devices", gpus["gpus"] // 2), ("pipeline", 2 * (gpus["gpus"] // 2))):
        result = torchrun(PARALLEL, "--mode", mode, processes=processes)
        assert result.status == 0, result.output
        found = re.findall(r"gradients off by (\S+), loss by (\S+)$", result.output, re.MULTILINE)
        assert len(found) == 2 and all(float(x) < 1e-5 for pair in found for x in pair)
        figures[f"06 --mode {mode}"] = result.lines(0)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("backend", [{}, OLD], ids=["nccl", "old nccl"])
def test_both_backends(torchrun, gpus, backend, figures):
    if backend and not gpus["two backends"]:
        pytest.skip(f"torch {gpus['torch']} has one NCCL backend only")
    for batch_size in (64, 4096):
        result = torchrun(ELASTIC, 10, 10, "--batch-size", batch_size, "--snapshot-path",
                          f"{batch_size}.pt", env=backend)  # fmt: skip
        assert result.status == 0, result.output
        key = f"02, batch size {batch_size}{', old NCCL' if backend else ''}: images/s"
        figures[key] = statistics.median(speeds(result)[1:])


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_stops(tmp_path, visible, figures):
    """What the others print, and how long it takes, is written down: it differs by version."""
    script = variant(tmp_path, ELASTIC, {"timedelta(minutes=10)": "timedelta(seconds=20)"})
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", script, 1000, 1000]
    process = start(*command, cwd=tmp_path, env=visible)
    try:
        output = read_until(process, "epoch  2/1000")
        stopped = int(re.search(r"\[rank 1/2\] attempt 0, pid (\d+)", output)[1])
        os.kill(stopped, signal.SIGSTOP)
        begin = time.monotonic()
        output, _ = process.communicate(timeout=300)
        assert process.returncode != 0 and not family(process)
        figures["02, a rank stops: seconds to the end, timeout 20 s"] = time.monotonic() - begin
        figures["02, a rank stops: what is printed"] = output.splitlines()[:60]
    finally:
        end(process)


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_that_never_comes_is_named(tmp_path, torchrun):
    line = "roll_call(store, rank, world_size)  #"
    script = variant(tmp_path, ELASTIC, {
        "timedelta(minutes=10)": "timedelta(seconds=5)",
        line: f"rank == world_size - 1 and time.sleep(3600); {line}"})  # fmt: skip
    result = torchrun(script, processes=2)
    assert result.status == 1 and "rank 1 did not come within 5 s" in result.error()


@pytest.mark.usefixtures("two_gpus")
def test_a_killed_worker_costs_one_restart(tmp_path, visible, figures):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=gpu", "--max-restarts=3"]
    process = start(*command, ROOT / ELASTIC, 1000, 1, cwd=tmp_path, env=visible)
    try:
        output = read_until(process, "epoch  3/1000")
        os.kill(int(re.search(r"\[rank 1/\d+\] attempt 0, pid (\d+)", output)[1]), signal.SIGKILL)
        begin = time.monotonic()
        output = read_until(process, r"attempt \d+: resumed from")
        output += read_until(process, r"\| epoch|epoch +\d+/1000")
        figures["02: seconds from SIGKILL to the end of the next epoch"] = time.monotonic() - begin
        assert "attempt 1: resumed" in output, output
    finally:
        end(process)
