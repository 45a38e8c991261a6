"""The template on two machines ends with the bits of one: whoever leaves, whatever snapshot counts.

Processes play the machines. test_lab.py runs it on machines that are apart.
"""

import functools
import itertools
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess

import pytest
from snapshots import BAD_CALLS, flipped_byte
from support import (
    ROOT,
    difference,
    digest,
    files,
    fork,
    fork_each,
    fork_ranks,
    free_port,
    load,
    machine,
    play_machine,
    pretend_one_gpu,
    variant,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

SCRIPT = "template/several_machines.py"


def own_disk():
    """Called in a child: a current folder for each machine."""
    os.makedirs(f"disk{machine()}", exist_ok=True)
    os.chdir(f"disk{machine()}")


def train(folder, *arguments, before=(), script=SCRIPT, world_size=4, nodes=2, **options):
    folder.mkdir(exist_ok=True)
    return fork_ranks(script, *arguments, cwd=folder, world_size=world_size, nodes=nodes,
                      before=(play_machine, *before), **options)  # fmt: skip


apart = functools.partial(train, before=(own_disk,))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, mnist_dir):
    """(result, snapshot) of three epochs of 02 on one machine with four ranks."""
    folder = tmp_path_factory.mktemp("whole")
    result = train(folder, 3, 1, "--data-dir", mnist_dir, script="02_torchrun_elastic.py", nodes=1)
    assert result.status == 0, result.output
    return result, load(folder)


def test_two_machines_train_as_one_does_and_show_who_is_who(tmp_path, mnist_dir, whole):
    """With one disk, on which one rank saves."""
    saving = "    save(state, path)\n"
    script = variant(tmp_path, SCRIPT, {saving: f'    log(f"writes {{path}}", True)\n{saving}'})
    result = train(tmp_path / "run", 3, 2, "--data-dir", mnist_dir, script=script, max_restarts=1)
    assert result.status == 0, result.output
    assert re.findall(".*writes.*", result.output) == ["[rank 0/4] writes snapshot.pt"] * 2
    rows = [line.split() for line in result.lines(0)[1:5]]
    assert [row[:5] for row in rows] == [
        ["node1", "0", "0", "0", "cpu"],
        ["node1", "0", "1", "1", "cpu"],
        ["node2", "1", "2", "0", "cpu"],
        ["node2", "1", "3", "1", "cpu"],
    ]
    assert len({row[5] for row in rows}) == 4
    assert result.epochs() == whole[0].epochs()
    assert difference(load(tmp_path / "run"), whole[1]) == 0 and digest(result) == digest(whole[0])
    assert result.saved() == [2, 3] and files(tmp_path / "run") == ["snapshot.pt"]
    assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line for line in result.lines(0))


def test_the_newest_snapshot_counts_whichever_machine_has_it(tmp_path, mnist_dir, whole):
    """It is on the machine of ranks 2 and 3; that of rank 0 has an old one."""
    disk1, disk2 = tmp_path / "disk1", tmp_path / "disk2"
    apart(tmp_path, 1, "--data-dir", mnist_dir)
    assert load(disk1)["next_epoch"] == load(disk2)["next_epoch"] == 2
    train(disk2, 2, "--data-dir", mnist_dir, nodes=1)
    result = apart(tmp_path, 3, "--data-dir", mnist_dir)
    assert result.status == 0, result.output
    assert "resumed from snapshot.pt of node2 at epoch 3" in result.lines(0)
    assert list(result.epochs()) == [3] and digest(result) == digest(whole[0])
    assert difference(load(disk1), whole[1]) == difference(load(disk2), whole[1]) == 0


def test_a_snapshot_that_one_machine_cannot_continue(tmp_path, mnist_dir):
    path = tmp_path / "disk2/snapshot.pt"
    train(path.parent, 1, "--data-dir", mnist_dir, world_size=1, nodes=1)
    flipped_byte(path, path.read_bytes())
    before = path.read_bytes()
    result = apart(tmp_path, 2, "--data-dir", mnist_dir, world_size=2)
    assert result.status == 1, result.output
    assert result.error().startswith("node2: cannot continue from snapshot.pt")
    assert path.read_bytes() == before and files(tmp_path / "disk1") == []


def test_machines_with_different_data_do_not_train(tmp_path, mnist_dir):
    (tmp_path / "disk1").mkdir()
    (tmp_path / "disk1/digits").symlink_to(mnist_dir)
    result = apart(tmp_path, 1, "--data-dir", "digits")
    assert result.status == 1, result.output
    assert "node1 has 1024 images of MNIST, sha256" in result.output
    assert "node2 has 8192 generated images" in result.output
    assert files(tmp_path / "disk1") == ["digits"]


def test_machines_with_snapshots_of_different_jobs(tmp_path, mnist_dir):
    """That of the longer job would replace the other's work."""
    for node, epochs in (1, 2), (2, 1):
        train(tmp_path / f"disk{node}", epochs, "--data-dir", mnist_dir, world_size=1, nodes=1)
    result = apart(tmp_path, 3, "--data-dir", mnist_dir, world_size=2)
    assert result.status == 1 and "have snapshots of different jobs" in result.output
    assert [load(tmp_path / f"disk{node}")["next_epoch"] for node in (1, 2)] == [3, 2]


def test_two_halves_of_a_job_do_not_both_write_one_snapshot(tmp_path, mnist_dir):
    """One disk, and halves that do not see each other: who saves second finds the other's file."""
    loop = "    for epoch in range(first_epoch, "
    script = variant(tmp_path, SCRIPT, {loop: f"    os.replace('other.pt', 'snapshot.pt')\n{loop}"})
    run = functools.partial(train, tmp_path, world_size=1, nodes=1)
    for epochs in 1, 2:  # the job; and its other half, which goes on
        assert run(epochs, "--data-dir", mnist_dir).saved() == [epochs]
        shutil.copy(tmp_path / "snapshot.pt", tmp_path / f"{epochs}.pt")
    (tmp_path / "1.pt").replace(tmp_path / "snapshot.pt")
    (tmp_path / "2.pt").replace(tmp_path / "other.pt")
    refused = run(3, "--data-dir", mnist_dir, script=script)
    assert refused.status == 1 and refused.saved() == []
    assert "a lost part of this one, has written snapshot.pt meanwhile" in refused.error()
    assert load(tmp_path)["next_epoch"] == 3


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


@pytest.mark.parametrize(("ranks", "done"), [(1, 64), (4, 64), (5, 65), (7, 70)])
def test_an_epoch_goes_on_with_the_images_that_are_left(ranks, done):
    sampler_class = runpy.run_path(str(ROOT / SCRIPT))["RemainingSampler"]

    def drawn(done):
        samplers = [sampler_class(range(140), ranks, rank, drop_last=True) for rank in range(ranks)]
        for sampler in samplers:
            sampler.done = done
        shares = [list(sampler) for sampler in samplers]
        assert {len(share) for share in shares} == {len(sampler) for sampler in samplers}
        return [item for step in zip(*shares, strict=True) for item in step]

    assert drawn(done) == drawn(0)[done:]


# ---- Without torchrun: four variables are all that a process needs to find the others ----


@pytest.fixture
def by_hand():
    """The environment of each of so many ranks. Rank 0 serves their store."""
    with free_port() as port:
        yield lambda count: [
            {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)} for rank in range(count)]


def test_started_by_hand(tmp_path, mnist_dir, by_hand):
    arguments = (1, "--data-dir", mnist_dir)
    result = fork_each(SCRIPT, *arguments, cwd=tmp_path, environments=by_hand(2))
    assert result.status == 0, result.output
    assert result.lines(0)[-1].startswith("2 replicas are identical, sha256")
    assert not any(line.startswith("note: ") for line in result.lines(0))


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_comes_is_named(tmp_path, by_hand, missing):
    waiting = [variables for rank, variables in enumerate(by_hand(3)) if rank != missing]
    result = fork_each(SCRIPT, "--timeout", 3, cwd=tmp_path, environments=waiting)
    assert result.status == 1
    named, gone = "rank 2 did not come", "rank 0 serves the store on 127.0.0.1, and does not answer"
    lines = [line for line in result.output.splitlines() if ": error: " in line]
    assert any((gone if missing == 0 else named) in line for line in lines), result.output
    assert all(named in line or gone in line for line in lines), "a false cause"


@pytest.mark.long
@pytest.mark.parametrize(("stopped", "whom"), [
    (0, "a store that does not answer"), (1, "rank 1: it has stopped, or is slower than the")])
def test_a_rank_that_stops_is_named(tmp_path, mnist_dir, by_hand, stopped, whom):
    """Rank 0 takes the store along."""
    line = "        loss.backward()  #"
    stop = f"        dist.get_rank() == {stopped} and os.kill(os.getpid(), signal.SIGSTOP)\n"
    script = variant(tmp_path, SCRIPT, {line: stop + line})
    result = fork_each(script, 1, "--timeout", 3, "--data-dir", mnist_dir, cwd=tmp_path,
                       environments=by_hand(2))  # fmt: skip
    assert result.status == 1
    assert f"[rank {1 - stopped}/2] waited in vain for {whom}" in result.output, result.output


# ---- Bad calls and starts ----

CALLS = BAD_CALLS | {"timeout 0": (["--timeout", 0], "and --timeout must be 1 or more", 2)}


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls_end_in_one_line(tmp_path, mnist_dir, name):
    arguments, message, status = CALLS[name]
    result = train(tmp_path, *arguments, "--data-dir", mnist_dir, world_size=2, nodes=1)
    assert result.status == status, result.output
    assert message in result.error() and "Traceback" not in result.output
    assert files(tmp_path) == []


def test_bad_starts_end_in_one_line(tmp_path):
    nowhere = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.invalid", "MASTER_PORT": "1"}
    for result, status, message in (
        (fork(SCRIPT, cwd=tmp_path), 2, "torchrun .*/several_machines.py 5 1$"),
        (train(tmp_path, before=(pretend_one_gpu,), nodes=1), 2,
         "each process needs a GPU, and there are 1: use --nproc-per-node=1"),
        (fork(SCRIPT, "--timeout", 1, cwd=tmp_path, env=nowhere), 1,
         "does not know the name a.invalid, or its own: put it into /etc/hosts"),
    ):
        assert result.status == status and re.search(message, result.error()), result.output
