"""What befalls a job: kills at any moment, bad disks, hangs, a second job, whoever connects."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import runpy
import shlex
import signal
import threading
import time
from functools import partial

import pytest
import torch
from fault_campaign import DESIGN, play
from lab import Lab
from support import (
    PYTHON,
    ROOT,
    TORCHRUN,
    assert_nothing_left,
    end,
    family,
    files,
    fork_ranks,
    listening,
    read_until,
    start,
    variant,
    wait_until,
)

ONE, SCRIPT, MULTINODE = (
    "01_single_node_multi_gpu.py", "02_torchrun_elastic.py", "03_multinode.py")  # fmt: skip
TORCHRUN_2 = (*TORCHRUN, "--standalone", "--nproc-per-node=2")

# ---- Killed anywhere (python tests/fault_campaign.py --rounds 100 for more) ----


@pytest.mark.long
@pytest.mark.parametrize("plan", DESIGN, ids=str)
def test_kills_at_every_moment_lose_nothing(mnist_dir, plan):
    play(plan, mnist_dir)


def imports_torch(pid):
    """Whether the process has begun to."""
    with contextlib.suppress(OSError):
        return "libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.long
@pytest.mark.parametrize("script", [SCRIPT, MULTINODE, "recipes/train_by_steps.py"])
def test_torchrun_killed_while_its_ranks_import_torch(tmp_path, script):
    """They must not train on, nor wait for ten minutes for a store that is gone."""
    job = start(*TORCHRUN_2, ROOT / script, 500, 500, cwd=tmp_path,
                env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # fmt: skip
    try:
        wait_until(lambda: sum(map(imports_torch, family(job))) == 2, "two ranks import torch")
        job.kill()
        job.wait()
        assert_nothing_left(job, patience=60)  # importing takes a while on a busy machine
    finally:
        end(job)


def orphan(first_call, pipe):
    """A rank that is killed in the first moments of its worker, which then calls what is given."""
    def worker():
        rank = os.getppid()
        wait_until(lambda: os.getppid() != rank, "the rank ends")
        pipe.send(os.getpid())
        first_call(0)
        signal.pause()

    multiprocessing.get_context("fork").Process(target=worker).start()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("script", "name"), [
    (SCRIPT, "exit_with_rank"), (MULTINODE, "ignore_sigterm")])
def test_a_worker_does_not_outlive_its_rank(script, name):
    """Nor when the rank is killed before PyTorch's own worker has looked for it."""
    ours, its = multiprocessing.Pipe()
    call = runpy.run_path(str(ROOT / script))[name]
    rank = multiprocessing.get_context("fork").Process(target=orphan, args=(call, its))
    rank.start()
    rank.join()
    its.close()
    assert ours.poll(60)
    pid = ours.recv()
    try:
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the worker ends", timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ---- Bad disks ----


def test_a_damaged_snapshot_is_refused_or_does_no_harm(tmp_path, monkeypatch, capsys):
    """Cut at any length, it is refused. A flipped byte may lie where nothing is held (padding)."""
    monkeypatch.chdir(tmp_path)
    script, path = runpy.run_path(str(ROOT / SCRIPT)), tmp_path / "snapshot.pt"

    def parts(seed):
        torch.manual_seed(seed)
        model = script["Net"]()
        return model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    model, optimizer = parts(seed=1)
    model(torch.ones(2, 28, 28)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "next_epoch": 2}
    script["save"](state, "snapshot.pt")
    content = path.read_bytes()

    def refused(damaged):
        path.write_bytes(damaged)
        others = parts(seed=2)
        try:
            assert script["resume"]("snapshot.pt", *others) == {"next_epoch": 2}
        except SystemExit as error:
            assert error.code == 1 and "move it away" in capsys.readouterr().err
            assert path.read_bytes() == damaged and files(tmp_path) == ["snapshot.pt"]
            return True
        for mine, its in zip((model, optimizer), others, strict=True):
            torch.testing.assert_close(its.state_dict(), mine.state_dict(), rtol=0, atol=0)
        return False

    lengths = [*range(0, len(content), len(content) // 15), *range(len(content) - 4, len(content))]
    assert all(refused(content[:length]) for length in lengths)
    positions = range(len(content) // 40, len(content), len(content) // 20)
    outcomes = [refused(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
                for place in positions]  # fmt: skip
    assert len(outcomes) == 20 and outcomes.count(True) >= 15
    assert not refused(content)


# ---- Hangs become errors ----


@pytest.mark.parametrize("script", [SCRIPT, MULTINODE])
def test_a_rank_that_never_arrives_is_named(tmp_path, mnist_dir, script):
    """The last one: rank 0 speaks at once. (Without rank 0, rank 1 waits ten seconds more.)"""
    line = "roll_call(store, rank, world_size)  #"
    changes = {line: f"rank == world_size - 1 and time.sleep(3600); {line}"}
    if script == SCRIPT:
        changes |= {"TIMEOUT = timedelta(minutes=10)": "TIMEOUT = timedelta(seconds=2)"}
    arguments = [] if script == SCRIPT else ["--timeout", 2]
    script = variant(tmp_path, script, changes)
    result = fork_ranks(script, 1, "--data-dir", mnist_dir, *arguments, cwd=tmp_path)
    assert result.status == 1, result.output
    assert "rank 1 did not come within 2 s: look for an error above" in result.error()
    assert files(tmp_path) == [script.name], result.output


@pytest.mark.long
@pytest.mark.parametrize(("line", "stop", "message"), [
    ("        loss.backward()  #",
     "        dist.get_rank() and os.kill(os.getpid(), signal.SIGSTOP)\n",
     "[rank 0/2] waited in vain for rank 1: it has stopped, or is slower than the timeout"),
    ("        accuracy = evaluate(",
     "        dist.get_rank() or dist.recv(torch.zeros(1), src=1)\n",
     "/2] waited in vain for others, which wait elsewhere: compare"),
], ids=["one stops", "they wait for each other"])  # fmt: skip
def test_a_wait_in_vain_is_explained(tmp_path, mnist_dir, line, stop, message):
    script = variant(tmp_path, MULTINODE, {line: stop + line})
    result = fork_ranks(script, 1, "--timeout", 3, "--data-dir", mnist_dir, cwd=tmp_path)
    assert result.status == 1 and message in result.output, result.output


@pytest.mark.long
def test_a_hang_ends_after_the_time_that_02_states(tmp_path, mnist_dir):
    """Under torchrun, which by default grants the stopped process another 30 s."""
    script = variant(tmp_path, SCRIPT, {"timedelta(minutes=10)": "timedelta(seconds=10)"})
    job = start(*TORCHRUN_2, script, 500, 500, "--data-dir", mnist_dir, cwd=tmp_path,
                env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"})  # fmt: skip
    try:
        output = read_until(job, "epoch +1/500")
        os.kill(int(re.search(r"rank 1/2\] attempt 0, pid (\d+)", output)[1]), signal.SIGSTOP)
        output += job.communicate(timeout=240)[0]
        assert job.returncode == 1 and "Timed out waiting 10000ms" in output, output
        assert_nothing_left(job)
    finally:
        end(job)


# ---- Two jobs ----


def wait_before_the_first_save(go):
    """Called in a child: before the first snapshot is in place, wait for the file go."""
    replace = os.replace

    def wait_and_replace(source, target):
        pathlib.Path("saving").touch()
        wait_until(lambda: os.path.exists(go), f"no file {go}")
        replace(source, target)

    os.replace = wait_and_replace


@pytest.mark.parametrize("script", [SCRIPT, pytest.param(MULTINODE, marks=pytest.mark.long)])
def test_a_second_job_with_the_same_snapshot_is_refused(tmp_path, mnist_dir, script):
    job, results = partial(fork_ranks, script, 1, cwd=tmp_path, world_size=1), []
    data = ("--data-dir", mnist_dir)
    before = partial(wait_before_the_first_save, "go")
    thread = threading.Thread(target=lambda: results.append(job(*data, before=before)))
    thread.start()
    try:
        wait_until(lambda: (tmp_path / "saving").exists() or results, "no save")
        assert not results, results
        second = job(*data)
        assert second.status == 1, second.output
        # 03 has a lock for each machine, with the machine's name behind that of the snapshot.
        message = r"another job is running with snapshot\.pt(\.[^:]+)?: end it, or choose"
        assert re.search(message, second.error())
        other = job(*data, "--snapshot-path", "other.pt")
        assert other.status == 0, other.output
    finally:
        (tmp_path / "go").touch()
        thread.join()
    assert results[0].status == 0 and results[0].saved() == [1], results[0].output
    assert files(tmp_path) == ["go", "other.pt", "saving", "snapshot.pt"]


@pytest.mark.long
def test_two_jobs_in_one_folder_do_not_meet(tmp_path, mnist_dir):
    """Both with torchrun --standalone, or with mp.spawn, at the same time: ports never clash."""
    torchrun = (*TORCHRUN_2, ROOT / SCRIPT, 2, 1, "--snapshot-path")
    spawn = (PYTHON, ROOT / ONE, 2, 1, "--nprocs", 2, "--checkpoint-path")
    jobs = [start(*command, f"{number}.pt", "--data-dir", mnist_dir, cwd=tmp_path)
            for number, command in enumerate([torchrun, torchrun, spawn, spawn])]  # fmt: skip
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=180)
            assert job.returncode == 0, output
            assert "2 replicas are identical, sha256 " in output
    finally:
        for job in jobs:
            end(job)


# ---- Trust ----

# On one machine the ranks use torchrun's store; in the lab, rank 0 would have one of its own.
STANDALONE = shlex.split(
    "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=0 torchrun --standalone --nproc-per-node=2")


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "number", "arguments"), [
    (["python"], "01", [1]),
    (STANDALONE, "02", [1]),
    (STANDALONE, "04", ["--only", "groups"]),
    (["python"], "05", []),
    (STANDALONE, "06", [1]),
], ids=["01", "02", "04", "05", "06"])  # fmt: skip
def test_scripts_for_one_machine_listen_on_loopback_alone(tmp_path, launcher, number, arguments):
    """Where Gloo would listen at the address in the network, and a store at all of them.

    All but torchrun itself, which listens everywhere: launch/README.md says so.
    """
    [script] = ROOT.glob(f"{number}_*.py")
    addresses, listeners, deadline = set(), set(), time.monotonic() + 300
    with Lab(tmp_path, 1) as lab:
        job = lab.start("node1", *launcher, script, *arguments)
        while job.process.poll() is None:
            assert time.monotonic() < deadline, job.output()
            for pid, command in family(job.process, itself=True).items():
                if "torchrun" not in [os.path.basename(word) for word in command.split()]:
                    with contextlib.suppress(OSError):  # it has just ended
                        if found := {address for address, _ in listening(pid)}:
                            addresses |= found
                            listeners.add(pid)
            time.sleep(0.02)
        assert job.result().status == 0, job.output()
    assert addresses == {"127.0.0.1"} and len(listeners) >= 2
