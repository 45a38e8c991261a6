"""03 on two machines ends with the bits of one: whichever has the newest snapshot, whoever leaves.

Processes play the machines. test_lab.py runs it on machines that are apart.
"""

import itertools
import multiprocessing
import os
import pathlib
import re
import runpy
import shutil
import signal
import socket
import subprocess
import threading

import pytest
from snapshots import (
    BAD_CALLS,
    BAD_SNAPSHOTS,
    flipped_byte,
    only_weights,
    pickle_in_an_archive,
)
from support import (
    PYTHON,
    ROOT,
    TORCHRUN,
    difference,
    digest,
    end,
    files,
    fork,
    fork_each,
    fork_ranks,
    free_port,
    load,
    machine,
    one_core,
    play_machine,
    pretend_one_gpu,
    run,
    start,
    variant,
    wait_until,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.distributed import DistributedSampler

SCRIPT = "03_multinode.py"


def own_disk():
    """Called in a child: a current folder for each machine."""
    os.makedirs(f"disk{machine()}", exist_ok=True)
    os.chdir(f"disk{machine()}")


def sigterm_in_step_26():
    """Called in a child: rank 1 alone gets SIGTERM, and so do its loader's workers."""
    steps = itertools.count(1)

    def kill(*_):
        if next(steps) == 26 and os.environ["RANK"] == "1":
            workers = [worker.pid for worker in multiprocessing.active_children()]
            assert workers, "torchrun signals the whole process group"
            # By another process, as torchrun is one: the rank's own signal would end its workers.
            subprocess.run(["kill", *map(str, workers), str(os.getpid())], check=True)

    register_optimizer_step_pre_hook(kill)


def show_writes():
    """Called in a child: print which rank moves a file to its place."""
    replace = os.replace

    def replace_and_print(source, target):
        replace(source, target)
        print(f"rank {os.environ['RANK']} wrote {target}\n", end="", flush=True)

    os.replace = replace_and_print


def train(folder, *arguments, before=(), script=SCRIPT, world_size=4, nodes=2, **options):
    folder.mkdir(exist_ok=True)
    before = (play_machine, one_core, *before)
    return fork_ranks(script, *arguments, cwd=folder, world_size=world_size, nodes=nodes,
                      before=before, **options)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, mnist_dir):
    """(result, snapshot) of three epochs of 02 on one machine with four ranks."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = (3, 1, "--data-dir", mnist_dir)
    result = fork_ranks("02_torchrun_elastic.py", *arguments, cwd=folder, world_size=4,
                        before=one_core)  # fmt: skip
    assert result.status == 0, result.output
    return result, load(folder)


def test_two_machines_train_as_one_does_and_show_who_is_who(tmp_path, mnist_dir, whole):
    result = train(tmp_path, 3, 2, "--data-dir", mnist_dir, before=(show_writes,))
    assert result.status == 0, result.output
    assert re.findall("rank . wrote .*", result.output) == ["rank 0 wrote snapshot.pt"] * 2
    rows = [line.split() for line in result.lines(0)[1:5]]
    assert [row[:5] for row in rows] == [
        ["node1", "0", "0", "0", "cpu"],
        ["node1", "0", "1", "1", "cpu"],
        ["node2", "1", "2", "0", "cpu"],
        ["node2", "1", "3", "1", "cpu"],
    ]
    assert len({row[5] for row in rows}) == 4
    assert result.epochs() == whole[0].epochs()
    assert difference(load(tmp_path), whole[1]) == 0 and digest(result) == digest(whole[0])
    assert result.saved() == [2, 3] and files(tmp_path) == ["snapshot.pt"]
    assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line for line in result.lines(0))


def test_the_newest_snapshot_counts_whichever_machine_has_it(tmp_path, mnist_dir, whole):
    """It is on the machine of ranks 2 and 3; that of rank 0 has an old one."""
    data, job = ("--data-dir", mnist_dir), {"before": (own_disk,)}
    disk1, disk2 = tmp_path / "disk1", tmp_path / "disk2"
    for epochs in (1, 2):
        assert train(tmp_path, epochs, 1, *data, **job).saved()[-1] == epochs
        assert load(disk1)["next_epoch"] == load(disk2)["next_epoch"] == epochs + 1
        if epochs == 1:
            shutil.copy(disk1 / "snapshot.pt", tmp_path / "old.pt")
    (tmp_path / "old.pt").replace(disk1 / "snapshot.pt")
    result = train(tmp_path, 3, 1, *data, **job)
    assert result.status == 0, result.output
    assert "resumed from snapshot.pt of node2 at epoch 3" in result.lines(0)
    assert list(result.epochs()) == [3] and digest(result) == digest(whole[0])
    assert difference(load(disk1), whole[1]) == difference(load(disk2), whole[1]) == 0


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory, mnist_dir):
    folder = tmp_path_factory.mktemp("good")
    train(folder, 1, 1, "--data-dir", mnist_dir, world_size=1, nodes=1)
    return folder / "snapshot.pt"


@pytest.mark.parametrize("spoil", [flipped_byte, pickle_in_an_archive, only_weights])
def test_a_snapshot_that_one_machine_cannot_continue(tmp_path, mnist_dir, snapshot, spoil):
    disk1, disk2 = tmp_path / "disk1", tmp_path / "disk2"
    disk1.mkdir()
    disk2.mkdir()
    path = disk2 / "snapshot.pt"
    shutil.copy(snapshot, path)
    spoil(path, path.read_bytes())
    before = path.read_bytes()
    result = train(tmp_path, 2, 1, "--data-dir", mnist_dir, before=(own_disk,), world_size=2)
    assert result.status == 1, result.output
    assert result.error().startswith("node2: cannot continue from snapshot.pt")
    assert BAD_SNAPSHOTS[spoil] in result.error() and "move it" in result.error()
    assert path.read_bytes() == before
    assert files(disk2) == ["snapshot.pt"] and files(disk1) == []


def other_data():
    """Called in a child: the second machine finds no MNIST in its folder."""
    if machine() == 2:
        os.chdir("..")


def test_machines_with_different_data_do_not_train(tmp_path, mnist_dir):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/digits").symlink_to(mnist_dir)
    result = train(tmp_path / "here", 1, 1, "--data-dir", "digits", before=(other_data,))
    assert result.status == 1, result.output
    message = next(line for line in result.output.splitlines() if ": error: " in line)
    assert "node1 has 1024 images of MNIST, sha256" in message
    assert "node2 has 8192 generated images" in message
    assert not (tmp_path / "here/snapshot.pt").exists()


def test_sigterm_of_one_rank_saves_and_ends_all(tmp_path, mnist_dir):
    """In the middle of an epoch, with loader workers; the restart goes on at that image."""
    script = variant(tmp_path, SCRIPT, {"isinstance(dataset, TensorDataset)": "False"})
    arguments = (2, 2, "--data-dir", mnist_dir, "--batch-size", 16)
    folder, job = tmp_path / "left", {"world_size": 2}
    result = train(folder, *arguments, script=script, before=(sigterm_in_step_26,), **job)
    assert result.status == 128 + signal.SIGTERM, result.output
    # 64 steps an epoch, and all leave at the next of those at which they ask each other.
    assert result.lines(0)[-1].startswith("leaving (SIGTERM): epoch 1 after 640 images | saved")
    result = train(folder, *arguments, **job)
    assert "resumed from snapshot.pt of node1 at epoch 1, image 640" in result.lines(0)
    unbroken = train(tmp_path / "unbroken", *arguments, **job)
    assert list(result.epochs()) == [1, 2] and digest(result) == digest(unbroken)
    assert difference(load(folder), load(tmp_path / "unbroken")) == 0


@pytest.mark.parametrize(("ranks", "lost"), [(1, 0), (2, 0), (4, 0), (5, 1), (7, 6)])
def test_an_epoch_goes_on_with_the_images_that_are_left(ranks, lost):
    sampler_class = runpy.run_path(str(ROOT / SCRIPT))["RemainingSampler"]
    drawn = {}
    for done in (0, 64 + lost):
        samplers = [sampler_class(range(140), ranks, rank, drop_last=True) for rank in range(ranks)]
        for sampler in samplers:
            sampler.done = done
        shares = [list(sampler) for sampler in samplers]
        assert {len(share) for share in shares} == {len(sampler) for sampler in samplers}
        drawn[done] = [item for step in zip(*shares, strict=True) for item in step]
    assert drawn[64 + lost] == drawn[0][64 + lost :]


def test_machines_with_snapshots_of_different_jobs(tmp_path, mnist_dir):
    """That of the longer job would replace the other's work."""
    job = {"before": (own_disk,), "world_size": 2}
    for epochs, other in ((2, 1), (1, 2)):
        assert train(tmp_path, epochs, "--data-dir", mnist_dir, **job).status == 0
        for node in (1, 2):
            path = tmp_path / f"disk{node}/snapshot.pt"
            path.rename(tmp_path / f"job{other}.pt")
    (tmp_path / "job1.pt").rename(tmp_path / "disk1/snapshot.pt")
    (tmp_path / "job2.pt").rename(tmp_path / "disk2/snapshot.pt")
    result = train(tmp_path, 3, "--data-dir", mnist_dir, **job)
    assert result.status == 1 and "have snapshots of different jobs" in result.output
    assert [load(tmp_path / f"disk{node}")["next_epoch"] for node in (1, 2)] == [3, 2]


@pytest.mark.long
def test_rank_0_stops_and_takes_the_store_along(tmp_path, mnist_dir):
    line = "        loss.backward()  #"
    stop = "        dist.get_rank() or os.kill(os.getpid(), signal.SIGSTOP)\n"
    script = variant(tmp_path, SCRIPT, {line: stop + line})
    with free_port() as port:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        result = fork_each(script, 1, "--timeout", 3, "--data-dir", mnist_dir, cwd=tmp_path,
                           environments=[{"RANK": rank, **common} for rank in "01"])  # fmt: skip
    assert "[rank 1/2] waited in vain for a store that does not answer" in result.output
    assert result.status == 1


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_comes_is_named(tmp_path, missing):
    """Each attempt has a store of its own, which rank 0 serves: the recommended way."""
    with free_port() as port:
        common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        waiting = [{"RANK": str(rank), **common} for rank in range(3) if rank != missing]
        result = fork_each(SCRIPT, "--timeout", 3, cwd=tmp_path, environments=waiting)
    assert result.status == 1
    named, gone = "rank 2 did not come", "rank 0 serves the store on 127.0.0.1, and does not answer"
    lines = [line for line in result.output.splitlines() if ": error: " in line]
    assert any((gone if missing == 0 else named) in line for line in lines), result.output
    assert all(named in line or gone in line for line in lines), "a false cause"


def test_a_rank_that_waits_for_a_dead_one_leaves_by_itself(tmp_path):
    """SIGTERM comes while the main thread waits in torch's C++, where no handler of Python runs."""
    wait = tmp_path / "wait.py"
    wait.write_text(f"""
import os, runpy, signal, threading
from datetime import timedelta
import torch.distributed as dist
os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "11"  # seconds
asked = runpy.run_path({str(ROOT / SCRIPT)!r})["leave_on_sigterm"]()
os.kill(os.getpid(), signal.SIGTERM)
assert asked.wait(10)  # in Python the handler runs, and the process goes on
asked.clear()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
store.wait(["never"], timedelta(seconds=50))
""")
    result = fork(wait, cwd=tmp_path)
    assert result.status == 128 + signal.SIGTERM, result.output


def one_half():
    """Called in a child: after its first save it waits until the other half has begun to train."""
    replace, saves = os.replace, []

    def replace_and_wait(source, target):
        replace(source, target)
        saves.append(target)
        pathlib.Path(f"saved {len(saves)}").touch()
        wait_until(lambda: os.path.exists("the other trains"), "no other half")

    os.replace = replace_and_wait


def other_half():
    """Called in a child: a machine of another name, whose epoch ends after the first's second."""
    socket.gethostname = lambda: f"other{machine()}"
    set_epoch = DistributedSampler.set_epoch

    def set_epoch_and_wait(sampler, epoch):
        set_epoch(sampler, epoch)
        pathlib.Path("the other trains").touch()
        wait_until(lambda: os.path.exists("saved 2"), "no second save")

    DistributedSampler.set_epoch = set_epoch_and_wait


def test_two_halves_of_a_job_do_not_both_write_one_snapshot(tmp_path, mnist_dir):
    """They see the same file system and not each other: one goes on, one is refused."""
    arguments, results = (3, 1, "--data-dir", mnist_dir), {}

    def half(before):
        job = {"world_size": 1, "nodes": 1, "before": (before,)}
        results[before.__name__] = train(tmp_path, *arguments, **job)

    halves = [threading.Thread(target=half, args=(before,)) for before in (one_half, other_half)]
    halves[0].start()
    wait_until(lambda: (tmp_path / "saved 1").exists() or results, "no first save")
    halves[1].start()
    for thread in halves:
        thread.join()
    kept, refused = results["one_half"], results["other_half"]
    assert (kept.status, refused.status) == (0, 1), kept.output + refused.output
    assert "resumed from snapshot.pt of other1 at epoch 2" in refused.lines(0)
    assert "a lost part of this one, has written snapshot.pt meanwhile" in refused.error()
    assert kept.saved() == [1, 2, 3] and refused.saved() == []
    assert load(tmp_path)["next_epoch"] == 4
    marks = ["saved 1", "saved 2", "saved 3", "the other trains"]
    assert files(tmp_path) == [*marks[:3], "snapshot.pt", marks[3]]


# ---- Bad calls ----

CALLS = BAD_CALLS | {"timeout 0": (["--timeout", 0], "and --timeout must be 1 or more", 2)}


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls_end_in_one_line(tmp_path, mnist_dir, name):
    arguments, message, status = CALLS[name]
    result = train(tmp_path, *arguments, "--data-dir", mnist_dir, world_size=2, nodes=1)
    assert result.status == status, result.output
    assert message in result.error()
    assert "Traceback" not in result.output
    assert files(tmp_path) == []


def test_started_without_torchrun(tmp_path):
    result = fork(SCRIPT, cwd=tmp_path)
    assert result.status == 2
    assert "torchrun --standalone --nproc-per-node=2" in result.error()
    assert result.error().endswith("03_multinode.py 5 1")


def test_more_processes_than_gpus(tmp_path):
    result = train(tmp_path, before=(pretend_one_gpu,), nodes=1)
    assert result.status == 2
    assert "each process needs a GPU, and there are 1: use --nproc-per-node=1" in result.error()


def test_an_address_that_nobody_knows(tmp_path):
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.invalid", "MASTER_PORT": "1"}
    result = fork(SCRIPT, "--timeout", 1, cwd=tmp_path, env=environment)
    assert result.status == 1
    assert "does not know the name a.invalid" in result.error()
    assert "put it into /etc/hosts" in result.error()


# ---- Real launches ----


@pytest.mark.long
def test_by_hand_in_two_terminals(tmp_path, mnist_dir):
    """Four variables are all that a process needs to find the others."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = (PYTHON, ROOT / SCRIPT, 2, 1, "--data-dir", mnist_dir)
    with free_port() as port:
        common["MASTER_PORT"] = str(port)
        other = start(*command, cwd=tmp_path, env={"RANK": "1", **common})
        try:
            result = run(*command, cwd=tmp_path, env={"RANK": "0", **common})
            output, _ = other.communicate(timeout=60)
        finally:
            end(other)
    assert result.status == other.returncode == 0, result.output + output
    assert any(line.startswith("2 replicas are identical, sha256") for line in result.lines(0))
    assert not any(line.startswith("note: ") for line in result.lines(0))


@pytest.mark.long
def test_torchrun_without_the_shared_store(tmp_path, mnist_dir):
    launch = (*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / SCRIPT, 1)
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    result = run(*launch, "--data-dir", mnist_dir, cwd=tmp_path, env=environment)
    assert result.status == 0, result.output
    assert list(result.epochs()) == [1] and "note: " not in result.output
    assert "terminate called" not in result.output
