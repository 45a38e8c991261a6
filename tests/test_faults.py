"""What befalls a job: kills at any moment, bad disks, hangs, a second job, whoever connects."""

import contextlib
import fcntl
import functools
import multiprocessing
import os
import re
import runpy
import signal
import socket
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from digits import load, tensors
from forked import fork, fork_ranks, variant
from lab import Lab
from started import PYTHON, ROOT, TORCHRUN, family, files, listening, run, wait_until

ONE, SCRIPT = "01_single_node_multi_gpu.py", "02_torchrun_elastic.py"
LESSON = "03_multinode.py"
TEMPLATE, SURVIVE = "template/train.py", "template/survive.py"
FORK = multiprocessing.get_context("fork")

# ---- Killed anywhere (tools/kill_test.py kills at random) ----

# Epochs, or steps; and after how many a snapshot is saved. 13 windows: neither 2 nor 3 ranks, nor
# their two micro-batches, divide them.
ARGUMENTS = {SCRIPT: (4, 2), LESSON: (4, 2), TEMPLATE: (24, 8, "--batch-size", 13)}
# Last: at which time the moment comes. (A lesson's ranks outlive a torchrun killed by SIGKILL.)
KILLS = [
    (SCRIPT, 2, "rank starts", "SIGTERM", "launcher"),
    (SCRIPT, 2, "evaluation", "SIGINT", "job", 2),
    (SCRIPT, 2, "writing", "SIGKILL", "job", 2),
    (LESSON, 2, "resuming", "SIGKILL", "rank 1"),
    (LESSON, 3, "step", "SIGTERM", "rank 0", 50),
    (TEMPLATE, 2, "rank starts", "SIGTERM", "job"),
    (TEMPLATE, 3, "resuming", "SIGKILL", "rank 1"),
    (TEMPLATE, 2, "step", "SIGTERM", "launcher", 17),
    (TEMPLATE, 2, "writing", "SIGKILL", "rank 0", 2),
    (TEMPLATE, 2, "before the move", "SIGINT", "rank 0", 2),
    (TEMPLATE, 2, "after the move", "SIGKILL", "launcher"),
    (TEMPLATE, 2, "the end", "SIGKILL", "rank 1"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, mnist_dir):
    """A function: the folder of an uninterrupted run."""

    @functools.cache
    def run_whole(script, world_size):
        folder = tmp_path_factory.mktemp("whole")
        fork_ranks(script, *arguments(script, mnist_dir), cwd=folder, world_size=world_size).ok()
        return folder

    return run_whole


def arguments(script, mnist_dir):
    data = ("--data-dir", mnist_dir) if script != TEMPLATE else ()
    return *ARGUMENTS[script], "--snapshot-path", "snapshot.pt", *data


@pytest.mark.long
@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: " ".join(map(str, kill)))
def test_kills_at_every_moment_lose_nothing(tmp_path, mnist_dir, whole, kill):
    """It ends with the weights, the optimizer and the log of an uninterrupted run, bit for bit."""
    name, world_size, *plan = kill
    script = variant(
        tmp_path,
        name,
        (
            f"REPORT_EVERY = 1\nimport sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
            f"import fault_worker\nfault_worker.arm(*{plan})"
        ),
    )
    folder, other = tmp_path / "run", whole(name, world_size)
    folder.mkdir()
    torchrun = (*TORCHRUN, "--standalone", f"--nproc-per-node={world_size}", "--max-restarts=3")
    call, output, status = (script, *arguments(name, mnist_dir)), "", None
    while status != 0:
        assert output.count("== start") < 4, f"not done:\n{output}"
        if plan[2].startswith("rank"):  # 03 cannot tell attempts of one job apart by itself
            result = fork_ranks(
                *call, cwd=folder, world_size=world_size, max_restarts=3 * (name != LESSON)
            )
        else:
            # Importing takes a while on a busy machine.
            result = run(*torchrun, *call, cwd=folder, timeout=300, patience=60)
        output, status = f"{output}== start\n{result.output}", result.status
        # What was announced as saved must be there.
        announced = [int(n) for n in re.findall(r"(?:epoch|step) +(\d+)/.*\| saved in", output)]
        if announced or (folder / "snapshot.pt").exists():
            with zipfile.ZipFile(folder / "snapshot.pt") as archive:
                assert archive.testzip() is None
            saved = load(folder)
            done = saved["step"] if "step" in saved else saved["next_epoch"] - 1
            assert done >= max(announced, default=0), output
    assert (folder / "struck").exists(), f"the moment never came:\n{output}"
    left = {file for file in files(folder) if not re.match(r"struck|rank \d|.*\.tmp$", file)}
    assert left == {*files(other)}
    mine, its = load(folder), load(other)
    assert len(tensors(mine)) >= 12  # of a lesson: six parameters, each with its momentum
    assert all(torch.equal(*pair) for pair in zip(tensors(mine), tensors(its), strict=True)), output
    for key in ("scheduler", "best", "rows", "loss_sum"):
        assert mine.get(key) == its.get(key), output
    assert mine["optimizer"]["param_groups"] == its["optimizer"]["param_groups"], output
    if name == TEMPLATE:
        assert (folder / "snapshot.csv").read_text() == (other / "snapshot.csv").read_text()
    reported = re.findall(r"^\[rank 0/\d\] (?:epoch|step) +(\d+)/\d+ \| loss", output, re.MULTILINE)
    again = len(reported) - len({*reported})  # the work that the strike has cost
    assert reported and again <= ARGUMENTS[name][1], output


def orphan(obey_rank, pipe):
    """A rank that is killed: in the first moments of one worker, and later in those of another."""
    rank = os.getpid()  # a worker that asked for its parent could be an orphan by then

    def worker(late):
        if late:
            wait_until(lambda: os.getppid() != rank, "the rank ends")
        pipe.send(os.getpid())
        obey_rank(0)
        signal.pause()

    for late in True, False, False:
        (process := FORK.Process(target=worker, args=(late,))).start()
    time.sleep(1.5)  # longer than a worker waits between two looks
    process.terminate()  # the last one obeys its rank
    process.join(5)
    pipe.send(process.exitcode)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_does_not_outlive_its_rank():
    """Nor when the rank is killed before PyTorch's own worker has looked for it."""
    ours, its = FORK.Pipe()
    obey_rank = runpy.run_path(str(ROOT / SURVIVE))["obey_rank"]
    rank = FORK.Process(target=orphan, args=(obey_rank, its))
    rank.start()
    its.close()
    workers = [ours.recv() for _ in range(4)]
    exitcode = workers.pop(2)  # before the late one speaks
    try:
        assert exitcode == 0 and ours.poll(30), "a worker, which holds the other end, lives on"
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        rank.join()


# ---- A wait in vain ----

WAIT = """
import os, runpy, signal, sys, threading
from datetime import timedelta
import torch.distributed as dist
os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "11"  # seconds
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
asked_to_leave = runpy.run_path(sys.argv[1])["leave_on_sigterm"](ctrl_c=True)
assert not asked_to_leave()
"""
IN_PYTHON = """
# To end a process that was forked, as multiprocessing.Pool does, must not end this one.
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.write(writer, b"here")
    signal.pause()
    os._exit(0)
os.read(reader, 4)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
assert not asked_to_leave()
os.kill(os.getpid(), signal.SIGTERM)  # in Python the handler runs, and the process goes on
assert asked_to_leave()
threading.Event().wait(7)
"""
IN_TORCH = """
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
store.wait(["never"], timedelta(seconds=50))
"""


@pytest.mark.parametrize(
    ("where", "status"),
    [
        (IN_PYTHON, 0),
        (IN_TORCH, 143),
        pytest.param(
            IN_PYTHON.replace("getpid(), signal.SIGTERM", "getpid(), signal.SIGINT"),
            0,
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_waits_for_a_dead_one_leaves_by_itself(tmp_path, where, status):
    """SIGTERM comes while the main thread waits in torch's C++, where no handler of Python runs."""
    (tmp_path / "wait.py").write_text(WAIT + where)
    result = fork(tmp_path / "wait.py", ROOT / SURVIVE, cwd=tmp_path)
    assert result.status == status, result.output


def test_a_second_job_with_the_same_snapshot_is_refused(tmp_path):
    with open(tmp_path / f"snapshot.pt.{socket.gethostname()}.lock", "w") as file:  # the first's
        fcntl.lockf(file, fcntl.LOCK_EX)
        result = fork_ranks(TEMPLATE, "--snapshot-path", "snapshot.pt", cwd=tmp_path, world_size=1)
    assert result.status == 1 and not (tmp_path / "snapshot.pt").exists()
    assert re.match(r"(.*: )?another job is running with .*snapshot\.pt", result.error())


@pytest.mark.long
def test_two_jobs_in_one_folder_do_not_meet_and_end_well(tmp_path, mnist_dir, request):
    """Both with torchrun --standalone, or with mp.spawn, at the same time: ports never clash."""
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / SCRIPT, "--snapshot-path")
    spawn = (PYTHON, ROOT / ONE, "--nprocs", 2, "--checkpoint-path")
    commands = [torchrun, torchrun, spawn, spawn] * request.config.getoption("--rounds")
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(run, *command, f"{number}.pt", 2, "--data-dir", mnist_dir, cwd=tmp_path)
            for number, command in enumerate(commands)
        ]
    for result in [job.result() for job in jobs]:
        assert result.status == 0 and "terminate called" not in result.output, result.output
        assert "2 replicas are identical, sha256 " in result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        ("01", [1]),
        ("02", [1]),
        ("04", ["--only", "groups"]),
        ("05", []),
        ("06", [1]),
        ("template/train", [2, 1]),
    ],
)
def test_scripts_for_one_machine_listen_on_loopback_alone(tmp_path, number, arguments):
    """Where Gloo would listen at the address in the network, and a store at all of them.
    (torchrun itself listens everywhere: launch/README.md says so.)"""
    [script] = ROOT.glob(f"{number}*.py")
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2")
    launcher = ("python",) if number in ("01", "05") else torchrun
    listeners, deadline = set(), time.monotonic() + 300
    with Lab(tmp_path, 1) as lab:
        # The ranks use torchrun's store, as elsewhere: launch/lab would give them one of their own.
        job = lab.start(
            "node1", *launcher, script, *arguments, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0"
        )
        while job.process.poll() is None:
            assert time.monotonic() < deadline, job.output()
            for pid, command in family(job.process, itself=True).items():
                if "torchrun" not in [os.path.basename(word) for word in command.split()]:
                    with contextlib.suppress(OSError):  # it has just ended
                        listeners |= {(pid, address) for address, _ in listening(pid)}
            time.sleep(0.01)
        assert job.result().status == 0, job.output()
    assert {address for _, address in listeners} == {"127.0.0.1"}
    assert len(listeners) >= 2 or number == "05", "there, Gloo listens for a moment"
