"""What befalls a job: kills at any moment, bad disks, hangs, a second job, whoever connects."""

import ast
import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch
from fault_campaign import DESIGN, MOMENTS, SCRIPTS, SIGNALS, Plan, campaign, one_round
from lab import Lab
from support import (
    PYTHON,
    ROOT,
    TORCHRUN,
    assert_nothing_left,
    end,
    family,
    files,
    fork,
    fork_ranks,
    listening,
    read_until,
    start,
    tensors,
    variant,
    wait_until,
)

SCRIPT = "02_torchrun_elastic.py"
MULTINODE = "03_multinode.py"
WAITED = "[rank 0/2] waited in vain for rank 1: it has stopped, or is slower than the timeout"

# ---- Killed anywhere (python tests/fault_campaign.py --rounds 100 for more) ----


@pytest.mark.long
@pytest.mark.parametrize("plan", DESIGN, ids=str)
def test_kills_at_every_moment_lose_nothing(mnist_dir, plan):
    one_round(plan, mnist_dir)


def test_the_design_covers_every_moment_and_signal():
    def times(name):
        return Counter(getattr(plan, name) for plan in DESIGN)

    assert set(times("moment")) == set(MOMENTS)
    assert set(times("signal")) == set(SIGNALS) and min(times("signal").values()) >= 3
    assert set(times("script")) == set(SCRIPTS) and set(times("world_size")) == {2, 3}
    assert min(times("script").values()) >= 5
    assert {"launcher", "job", "rank 0", "rank 1"} <= set(times("victim"))


def test_draws_of_one_script_come_to_every_moment():
    drawn = [Plan.draw(f"test/{number}", ("steps",)) for number in range(3000)]
    assert {plan.script for plan in drawn} == {"steps"}
    assert {plan.script for plan in map(Plan.draw, range(100))} == set(SCRIPTS)
    for name, values in (("moment", MOMENTS), ("signal", SIGNALS), ("world_size", (2, 3))):
        assert {getattr(plan, name) for plan in drawn} == set(values)
    assert {plan.count for plan in drawn if plan.moment == "step"} == set(range(1, 25))
    last = {plan.save_every: plan.count for plan in sorted(drawn, key=lambda plan: plan.count)
            if plan.moment == "writing"}  # fmt: skip
    assert last == {4: 6, 8: 3}
    assert {plan.actor for plan in drawn if plan.moment == "writing"} == {0}


@pytest.mark.parametrize("rounds", [0, -1])
def test_a_campaign_of_no_rounds_is_a_wrong_call(tmp_path, rounds):
    result = fork(ROOT / "tests/fault_campaign.py", f"--rounds={rounds}", cwd=tmp_path)
    assert result.status == 2 and result.error() == "--rounds: give 1 or more"
    assert len(result.output.splitlines()) == 1
    with pytest.raises(ValueError):
        campaign([], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("script", ["02_torchrun_elastic.py", "03_multinode.py"])
def test_workers_end_when_torchrun_is_killed(tmp_path, mnist_dir, script):
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / script, 500, 500,
                "--data-dir", mnist_dir, cwd=tmp_path)  # fmt: skip
    try:
        read_until(job, "epoch +1/500")
        assert len(family(job)) >= 2
        job.kill()
        job.wait()
        assert_nothing_left(job)
    finally:
        end(job)


# ---- Bad disks ----


@pytest.fixture(scope="module")
def good(tmp_path_factory, mnist_dir):
    """(a snapshot after one epoch, the tensors after two)."""
    folder = tmp_path_factory.mktemp("good")
    path = folder / "snapshot.pt"
    for epochs in (1, 2):
        job = {"cwd": folder, "world_size": 1}
        assert fork_ranks(SCRIPT, epochs, "--data-dir", mnist_dir, **job).status == 0
        if epochs == 1:
            first = path.read_bytes()
    return first, tensors(torch.load(path, weights_only=True))


def refused_or_unharmed(folder, content, good, mnist_dir):
    """Go on from this snapshot; return "refused" or "the same weights"; fails on anything else."""
    path = folder / "snapshot.pt"
    path.write_bytes(content)
    result = fork_ranks(SCRIPT, 2, "--data-dir", mnist_dir, cwd=folder, world_size=1)
    if result.status == 0:
        found = tensors(torch.load(path, weights_only=True))
        assert all(torch.equal(*pair) for pair in zip(found, good[1], strict=True))
        return "the same weights"
    assert "snapshot.pt" in result.error() and "move it" in result.error(), result.output
    assert "Traceback" not in result.output
    assert path.read_bytes() == content and files(folder) == ["snapshot.pt"]
    return "refused"


@pytest.mark.long
def test_a_snapshot_cut_at_any_length_is_refused(tmp_path, mnist_dir, good):
    content = good[0]
    lengths = [*range(0, len(content), len(content) // 15), *range(len(content) - 4, len(content))]
    assert len(lengths) in (19, 20)
    for length in lengths:
        assert refused_or_unharmed(tmp_path, content[:length], good, mnist_dir) == "refused"


@pytest.mark.long
def test_a_flipped_byte_anywhere_does_no_harm(tmp_path, mnist_dir, good):
    """In a tensor it is refused; in a part that holds nothing (padding) the run is the same."""
    content, outcomes = good[0], []
    for position in range(len(content) // 40, len(content), len(content) // 20):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        outcomes.append(refused_or_unharmed(tmp_path, bytes(damaged), good, mnist_dir))
    print(outcomes)
    assert len(outcomes) == 20 and outcomes.count("refused") >= 15


def make_folder_read_only():
    """Called in a child: after the first save, the folder is closed, and to root as well."""
    replace = os.replace

    def replace_and_close(source, target):
        replace(source, target)
        os.chmod(".", 0o555)
        if os.getuid() == 0:  # who may write everywhere
            os.setuid(65534)

    os.replace = replace_and_close


def test_a_folder_that_becomes_read_only(tmp_path, mnist_dir):
    arguments = (3, 1, "--data-dir", mnist_dir)
    result = fork_ranks(SCRIPT, *arguments, cwd=tmp_path, before=make_folder_read_only)
    assert result.status == 1, result.output
    assert "cannot write snapshot.pt, which stays as it was" in result.error()
    assert "Permission denied: 'snapshot.pt.tmp'" in result.error()
    assert result.saved() == [1] and files(tmp_path) == ["snapshot.pt"]
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["next_epoch"] == 2


# ---- Hangs become errors ----


@pytest.mark.parametrize("script", [SCRIPT, MULTINODE])
def test_a_rank_that_never_arrives_is_named(tmp_path, mnist_dir, script):
    """The last one: rank 0 speaks at once. (Without rank 0, rank 1 waits ten seconds more.)"""
    line = "roll_call(store, rank, world_size)  #"
    changes = {line: f"rank == world_size - 1 and time.sleep(3600); {line}"}
    if script == SCRIPT:
        changes |= {"TIMEOUT = timedelta(minutes=10)": "TIMEOUT = timedelta(seconds=3)"}
    arguments = [] if script == SCRIPT else ["--timeout", 3]
    script = variant(tmp_path, script, changes)
    result = fork_ranks(script, 1, "--data-dir", mnist_dir, *arguments, cwd=tmp_path, world_size=3)
    assert result.status == 1, result.output
    assert "rank 2 did not come within 3 s: look for an error above" in result.error()
    assert files(tmp_path) == [script.name], result.output


@pytest.mark.long
def test_a_rank_that_stops_is_named(tmp_path, mnist_dir):
    line = "        loss.backward()  #"
    stop = "        dist.get_rank() and os.kill(os.getpid(), signal.SIGSTOP)\n"
    script = variant(tmp_path, MULTINODE, {line: stop + line})
    arguments = (1, "--timeout", 3, "--data-dir", mnist_dir)
    result = fork_ranks(script, *arguments, cwd=tmp_path)
    assert result.status == 1 and WAITED in result.output, result.output


@pytest.mark.long
def test_ranks_that_wait_for_each_other_are_told_so(tmp_path, mnist_dir):
    line = "        accuracy = evaluate("
    receive = "        dist.get_rank() or dist.recv(torch.zeros(1), src=1)\n"
    script = variant(tmp_path, MULTINODE, {line: receive + line})
    arguments = (1, "--timeout", 3, "--data-dir", mnist_dir)
    result = fork_ranks(script, *arguments, cwd=tmp_path)
    assert result.status == 1, result.output
    assert "/2] waited in vain for others, which wait elsewhere: compare" in result.output


def pause_while_saving():
    """Called in a child: the first save takes 5 seconds longer, in which the process is stopped.

    A helper sees to it that the process has stopped, writes down the state in which it still is
    after the 5 seconds, into the file "paused", and lets it go on.
    """
    replace, status = os.replace, f"/proc/{os.getpid()}/status"
    helper = f"""
        for i in $(seq 100); do
            grep -q "^State:.T" {status} && break
            sleep 0.1
        done
        sleep 5
        grep "^State:" {status} >paused
        kill -CONT {os.getpid()}"""

    def pause_and_replace(source, target):
        if not os.path.exists(target):
            subprocess.Popen(["sh", "-c", helper])
            os.kill(os.getpid(), signal.SIGSTOP)
        replace(source, target)

    os.replace = pause_and_replace


@pytest.mark.long
def test_a_slow_rank_is_waited_for(tmp_path, mnist_dir):
    arguments = (2, 1, "--data-dir", mnist_dir)
    weights = []
    for before in (None, pause_while_saving):
        folder = tmp_path / str(before is None)
        folder.mkdir()
        result = fork_ranks(SCRIPT, *arguments, cwd=folder, before=before)
        assert result.status == 0 and result.attempts == 1, result.output
        assert result.saved() == [1, 2]
        weights.append(result.lines(0)[-1])
    assert (folder / "paused").read_text() == "State:\tT (stopped)\n"
    assert "sha256" in weights[0] and weights[0] == weights[1]


@pytest.mark.long
def test_a_hang_ends_after_the_time_that_02_states(tmp_path, mnist_dir):
    """Under torchrun, which grants the stopped process another 30 s."""
    script = variant(tmp_path, SCRIPT, {"timedelta(minutes=10)": "timedelta(seconds=20)"})
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, 500, 500,
                "--data-dir", mnist_dir, cwd=tmp_path)  # fmt: skip
    try:
        output = read_until(job, "epoch +1/500")
        os.kill(int(re.search(r"rank 1/2\] attempt 0, pid (\d+)", output)[1]), signal.SIGSTOP)
        output += job.communicate(timeout=240)[0]
        assert job.returncode == 1 and "Timed out waiting 20000ms" in output, output
        assert_nothing_left(job)
    finally:
        end(job)


def imports_torch(pid):
    """Whether the process has begun to."""
    with contextlib.suppress(OSError):
        return "libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.long
@pytest.mark.parametrize("script", [SCRIPT, MULTINODE, "recipes/train_by_steps.py"])
def test_torchrun_killed_while_its_ranks_import_torch(tmp_path, script):
    """They must not train on, nor wait for ten minutes for a store that is gone."""
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / script, 500, 500,
                cwd=tmp_path, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # fmt: skip
    try:
        wait_until(lambda: sum(map(imports_torch, family(job))) == 2, "two ranks import torch")
        job.kill()
        job.wait()
        assert_nothing_left(job, patience=60)  # importing takes a while on a busy machine
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


LONG_03 = pytest.param("03_multinode.py", marks=pytest.mark.long)


@pytest.mark.parametrize("script", ["02_torchrun_elastic.py", LONG_03])
def test_a_second_job_with_the_same_snapshot_is_refused(tmp_path, mnist_dir, script):
    arguments, results = (2, 1, "--data-dir", mnist_dir), []

    def first():
        before = partial(wait_before_the_first_save, "go")
        results.append(fork_ranks(script, *arguments, cwd=tmp_path, before=before))

    thread = threading.Thread(target=first)
    thread.start()
    try:
        wait_until(lambda: (tmp_path / "saving").exists() or results, "no save")
        assert not results, results
        second = fork_ranks(script, *arguments, cwd=tmp_path)
        assert second.status == 1, second.output
        # 03 has a lock for each machine, with the machine's name behind that of the snapshot.
        message = r"another job is running with snapshot\.pt(\.[^:]+)?: end it, or choose"
        assert re.search(message, second.error())
        other = fork_ranks(script, *arguments, "--snapshot-path", "other.pt", cwd=tmp_path)
        assert other.status == 0, other.output
    finally:
        (tmp_path / "go").touch()
        thread.join()
    assert results[0].status == 0 and results[0].saved() == [1, 2], results[0].output
    assert files(tmp_path) == ["go", "other.pt", "saving", "snapshot.pt"]


@pytest.mark.long
def test_two_jobs_in_one_folder_do_not_meet(tmp_path, mnist_dir):
    """Both with torchrun --standalone, or with mp.spawn, at the same time: ports never clash."""
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / SCRIPT, 3, 1)
    spawn = (PYTHON, ROOT / "01_single_node_multi_gpu.py", 3, 1, "--nprocs", 2)
    jobs = [
        start(*command, "--data-dir", mnist_dir, option, tmp_path / f"{number}.pt", cwd=tmp_path)
        for command, option in ((torchrun, "--snapshot-path"), (spawn, "--checkpoint-path"))
        for number in (f"{option}1", f"{option}2")
    ]
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=180)
            assert job.returncode == 0, output
            assert "2 replicas are identical, sha256 " in output
    finally:
        for job in jobs:
            end(job)


# ---- Trust ----


def all_addresses(job):
    """{command line: addresses} of the processes of a job that accept connections, to its end.

    All but torchrun itself, which listens everywhere: launch/README.md says so.
    """
    found, deadline = {}, time.monotonic() + 300
    while job.process.poll() is None:
        assert time.monotonic() < deadline, f"no end after 300 s:\n{job.output()}"
        for pid, command in family(job.process, itself=True).items():
            if "torchrun" not in [os.path.basename(word) for word in command.split()]:
                with contextlib.suppress(OSError):  # it has just ended
                    if addresses := {address for address, _ in listening(pid)}:
                        found.setdefault(f"{pid} {command}", set()).update(addresses)
        time.sleep(0.02)
    return found


LOOPBACK = {
    "01": ("python", 1),
    "02": ("torchrun", 1),
    "04": ("torchrun", "--only", "groups"),
    "05": ("python",),
    "06": ("torchrun", 1),
}
# On one machine the ranks use torchrun's store; in the lab, rank 0 would have one of its own.
TORCHRUN_ALONE = "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=0 torchrun --standalone --nproc-per-node=2"


def addresses_in_the_lab(tmp_path, script, launcher, *arguments):
    """all_addresses of a script, on a machine whose name stands for an address in a network."""
    words = shlex.split(TORCHRUN_ALONE) if launcher == "torchrun" else [launcher]
    with Lab(tmp_path, 1) as lab:
        job = lab.start("node1", *words, script, *arguments)
        found = all_addresses(job)
        assert job.result().status == 0, job.output()
    return found


@pytest.mark.long
@pytest.mark.parametrize("number", LOOPBACK)
def test_scripts_for_one_machine_listen_on_loopback_alone(tmp_path, number):
    """Where Gloo would listen at the address in the network, and a store at all of them."""
    [script] = ROOT.glob(f"{number}_*.py")
    found = addresses_in_the_lab(tmp_path, script, *LOOPBACK[number])
    assert set().union(*found.values()) == {"127.0.0.1"} and len(found) >= 2, found


@pytest.mark.long
def test_a_store_of_the_parent_on_all_addresses_is_seen(tmp_path):
    script, line = "01_single_node_multi_gpu.py", "    args = parse_args()\n"
    store = "    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
    copy = variant(tmp_path, script, {line: line + store.replace("store =", "open_store =")})
    assert {"::"} <= set().union(*addresses_in_the_lab(tmp_path, copy, "python", 1).values())


def test_no_pickle_is_loaded_from_disk():
    calls = 0
    for path in [*ROOT.glob("0*_*.py"), ROOT / "download_mnist.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pickle" not in ast.unparse(node), path.name
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path.name
                calls += 1
    assert calls >= 3
