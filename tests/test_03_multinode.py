"""03 on two machines ends with the bits of one, whichever machine has the newest snapshot.

Processes play the machines. test_lab.py runs it on machines that are apart.
"""

import functools
import re
import shutil

import pytest
import torch
from digits import difference, digest, load, pickle_in_an_archive
from forked import fork, fork_ranks, own_disk, play_machine
from started import files

SCRIPT = "03_multinode.py"


def train(folder, *arguments, before=(), script=SCRIPT, world_size=4, nodes=2):
    folder.mkdir(exist_ok=True)
    return fork_ranks(
        script,
        *arguments,
        cwd=folder,
        world_size=world_size,
        nodes=nodes,
        before=(play_machine, *before),
    )


apart = functools.partial(train, before=(own_disk,))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, mnist_dir):
    """(outputs of each epoch, path of the snapshot after each) of 02 on one machine, four ranks."""
    folder, paths, results = tmp_path_factory.mktemp("whole"), [], []
    for epoch in (1, 2, 3):  # 02 goes on with the same bits: test_02_torchrun_elastic.py
        results.append(
            train(
                folder, epoch, "--data-dir", mnist_dir, script="02_torchrun_elastic.py", nodes=1
            ).ok()
        )
        paths.append(shutil.copy(folder / "snapshot.pt", folder / f"{epoch}.pt"))
    return results, paths


def assert_ends_as(whole, result, *folders):
    results, paths = whole
    assert digest(result) == digest(results[-1])
    for folder in folders:
        assert difference(load(folder), torch.load(paths[-1], weights_only=True)) == 0


def test_two_machines_train_as_one_does_and_show_who_is_who(tmp_path, mnist_dir, whole):
    """With one disk for both."""
    result = train(tmp_path / "run", 3, 2, "--data-dir", mnist_dir).ok()
    rows = [line.split() for line in result.lines(0)[1:5]]
    assert [" ".join(row[:5]) for row in rows] == [
        "node1 0 0 0 cpu",
        "node1 0 1 1 cpu",
        "node2 1 2 0 cpu",
        "node2 1 3 1 cpu",
    ]
    assert len({row[5] for row in rows}) == 4
    assert [{epoch: said} for epoch, said in result.epochs().items()] == [
        one.epochs() for one in whole[0]
    ]
    assert_ends_as(whole, result, tmp_path / "run")
    assert result.saved() == [2, 3] and files(tmp_path / "run") == ["snapshot.pt"]


def on_disks(folder, *snapshots):
    """The folders of the machines, with these snapshots in them."""
    disks = [folder / f"disk{number}" for number, _ in enumerate(snapshots, 1)]
    for disk, snapshot in zip(disks, snapshots, strict=True):
        disk.mkdir()
        shutil.copy(snapshot, disk / "snapshot.pt")
    return disks


def test_the_newest_snapshot_counts_whichever_machine_has_it(tmp_path, mnist_dir, whole):
    disks = on_disks(tmp_path, whole[1][0], whole[1][1])
    result = apart(tmp_path, 3, "--data-dir", mnist_dir).ok()
    assert "resumed from snapshot.pt at epoch 3" in result.lines(0)
    assert list(result.epochs()) == [3]
    assert_ends_as(whole, result, *disks)


def test_of_two_snapshots_of_one_epoch_all_ranks_take_the_same(tmp_path, mnist_dir, whole):
    """They may be of different runs. A machine that has none gets it at once."""
    state = torch.load(whole[1][-1], weights_only=True)
    state["optimizer"]["param_groups"][0]["lr"] = 1.0
    state["model"] = {name: weights / 2 for name, weights in state["model"].items()}
    torch.save(state, tmp_path / "other.pt")
    disks = on_disks(tmp_path, whole[1][-1], tmp_path / "other.pt")
    for _ in range(2):
        result = apart(tmp_path, 3, "--data-dir", mnist_dir, world_size=2)
        assert result.status == 0, result.output  # 03 compares the replicas
        assert_ends_as(whole, result, *disks)
        shutil.rmtree(disks[0])


def test_a_snapshot_that_one_machine_cannot_load(tmp_path, mnist_dir):
    path = tmp_path / "disk2/snapshot.pt"
    path.parent.mkdir()
    pickle_in_an_archive(path, None)
    before = path.read_bytes()
    result = apart(tmp_path, 2, "--data-dir", mnist_dir, world_size=2)
    assert result.status == 1 and result.output.count("cannot go on from snapshot.pt: ") == 1
    assert path.read_bytes() == before and files(tmp_path / "disk1") == []


def test_machines_with_different_data_do_not_train(tmp_path, mnist_dir):
    (tmp_path / "disk1").mkdir()
    (tmp_path / "disk1/digits").symlink_to(mnist_dir)
    result = apart(tmp_path, 1, "--data-dir", "digits")
    assert result.status == 1, result.output
    assert "the machines have different data: [('node1', 'images of MNIST', " in result.output
    assert "('node2', 'generated images" in result.output
    assert files(tmp_path / "disk1") == ["digits"]


# ---- Other starts ----


def test_a_wrong_start_ends_in_words(tmp_path):
    """Restarts would look for dead ranks."""
    asked = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for env, message in (
        ({}, "torchrun --standalone --nproc-per-node=2 .*/03_.* 5 1$"),
        (asked, "for restarts: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend"),
    ):
        result = fork(SCRIPT, cwd=tmp_path, env=env)
        assert result.status == 2 and re.search(message, result.error()), result.output
