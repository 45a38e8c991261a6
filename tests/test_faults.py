"""What befalls a job: kills at any moment, bad disks, hangs, a second job, whoever connects."""

import contextlib
import fcntl
import multiprocessing
import os
import re
import runpy
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_campaign import DESIGN, play
from forked import fork, fork_ranks
from lab import Lab
from started import PYTHON, ROOT, TORCHRUN, family, listening, run, wait_until

ONE, SCRIPT = "01_single_node_multi_gpu.py", "02_torchrun_elastic.py"
TEMPLATE, SURVIVE = "template/train.py", "template/survive.py"
FORK = multiprocessing.get_context("fork")

# ---- Killed anywhere (python tests/fault_campaign.py --rounds 100 for more) ----


@pytest.mark.long
@pytest.mark.parametrize("plan", DESIGN, ids=str)
def test_kills_at_every_moment_lose_nothing(mnist_dir, plan):
    play(plan, mnist_dir)


def orphan(first_call, pipe):
    """A rank that is killed in the first moments of its worker, which then calls what is given."""
    rank = os.getpid()  # a worker that asked for its parent could be an orphan by then

    def worker():
        wait_until(lambda: os.getppid() != rank, "the rank ends")
        pipe.send(os.getpid())
        first_call(0)
        signal.pause()

    FORK.Process(target=worker).start()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_does_not_outlive_its_rank():
    """Nor when the rank is killed before PyTorch's own worker has looked for it."""
    ours, its = FORK.Pipe()
    call = runpy.run_path(str(ROOT / SURVIVE))["obey_rank"]
    rank = FORK.Process(target=orphan, args=(call, its))
    rank.start()
    its.close()
    worker = ours.recv()
    try:
        assert ours.poll(30), "the worker, which holds the pipe's other end, lives on"
    finally:
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
asked_to_leave = runpy.run_path(sys.argv[1])["leave_on_sigterm"](60)
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


@pytest.mark.parametrize(("where", "status"), [(IN_PYTHON, 0), (IN_TORCH, 128 + signal.SIGTERM)])
def test_a_rank_that_waits_for_a_dead_one_leaves_by_itself(tmp_path, where, status):
    """SIGTERM comes while the main thread waits in torch's C++, where no handler of Python runs."""
    (tmp_path / "wait.py").write_text(WAIT + where)
    result = fork(tmp_path / "wait.py", ROOT / SURVIVE, cwd=tmp_path)
    assert result.status == status, result.output


# ---- Two jobs ----


@pytest.mark.parametrize(("script", "lock"), [
    (TEMPLATE, f"snapshot.pt.{socket.gethostname()}.lock"),
])
def test_a_second_job_with_the_same_snapshot_is_refused(tmp_path, script, lock):
    with open(tmp_path / lock, "w") as file:  # the first one's
        fcntl.lockf(file, fcntl.LOCK_EX)
        result = fork_ranks(script, "--snapshot-path", "snapshot.pt", cwd=tmp_path, world_size=1)
    assert result.status == 1 and not (tmp_path / "snapshot.pt").exists()
    assert re.match(r"(.*: )?another job is running with snapshot\.pt", result.error())


@pytest.mark.long
def test_two_jobs_in_one_folder_do_not_meet(tmp_path, mnist_dir):
    """Both with torchrun --standalone, or with mp.spawn, at the same time: ports never clash."""
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / SCRIPT, "--snapshot-path")
    spawn = (PYTHON, ROOT / ONE, "--nprocs", 2, "--checkpoint-path")
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(run, *command, f"{number}.pt", 2, "--data-dir", mnist_dir, cwd=tmp_path)
                for number, command in enumerate([torchrun, torchrun, spawn, spawn])]
    for result in [job.result() for job in jobs]:
        assert result.status == 0, result.output
        assert "2 replicas are identical, sha256 " in result.output


# ---- Trust ----

@pytest.mark.long
@pytest.mark.parametrize(("number", "arguments"), [
    ("01", [1]), ("02", [1]), ("04", ["--only", "groups"]), ("05", []), ("06", [1]),
    ("template/train", [2, 1])])
def test_scripts_for_one_machine_listen_on_loopback_alone(tmp_path, number, arguments):
    """Where Gloo would listen at the address in the network, and a store at all of them.

    All but torchrun itself, which listens everywhere: launch/README.md says so.
    """
    [script] = ROOT.glob(f"{number}*.py")
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2")
    launcher = ("python",) if number in ("01", "05") else torchrun
    listeners, deadline = set(), time.monotonic() + 300
    with Lab(tmp_path, 1) as lab:
        # The ranks use torchrun's store, as elsewhere: launch/lab would give them one of their own.
        job = lab.start("node1", *launcher, script, *arguments,
                        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")  # fmt: skip
        while job.process.poll() is None:
            assert time.monotonic() < deadline, job.output()
            for pid, command in family(job.process, itself=True).items():
                if "torchrun" not in [os.path.basename(word) for word in command.split()]:
                    with contextlib.suppress(OSError):  # it has just ended
                        listeners |= {(pid, address) for address, _ in listening(pid)}
            time.sleep(0.02)
        assert job.result().status == 0, job.output()
    assert {address for _, address in listeners} == {"127.0.0.1"} and len(listeners) >= 2
