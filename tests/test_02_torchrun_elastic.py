"""02: a rank killed at any moment costs no bit and no saved epoch; a bad snapshot is refused.

Kills at every moment: test_faults.py. With another model and data: test_swap.py. More of it:
test_jobs.py. The last two tests hold for 03, too.
"""

import os
import pathlib
import re
import runpy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from digits import difference, load, pickle_in_an_archive, plain_pickle
from forked import come_late, fork, fork_ranks
from started import ROOT, files

SCRIPT = "02_torchrun_elastic.py"
LESSONS = (SCRIPT, "03_multinode.py")


def train(folder, *arguments, **options):
    folder.mkdir(exist_ok=True)
    return fork_ranks(SCRIPT, *arguments, cwd=folder, **options)


OTHERS = [pytest.param(world_size, marks=pytest.mark.long) for world_size in (1, 2, 4)]


@pytest.mark.parametrize("world_size", [3, *OTHERS])
def test_killed_and_resumed_is_bit_for_bit_uninterrupted(tmp_path, mnist_dir, world_size):
    """It costs the epochs since the last snapshot. One restart is enough: no rank looks for those
    of the attempt before."""
    arguments, job = (4, 2, "--data-dir", mnist_dir), {"world_size": world_size}
    whole = train(tmp_path / "whole", *arguments, **job).ok()
    killed = train(
        tmp_path / "killed", *arguments, "--crash-epoch", 4, max_restarts=1, before=come_late, **job
    )
    assert killed.status == 0 and killed.attempts == 2, killed.output
    assert "crash on purpose, before this epoch is saved" in killed.lines(world_size - 1)
    assert "attempt 1: resumed from snapshot.pt at epoch 3" in killed.lines(0)
    epochs = re.findall(r"^\[rank 0/\d\] epoch +(\d)/4", killed.output, re.MULTILINE)
    assert epochs == ["1", "2", "3", "3", "4"] and killed.epochs() == whole.epochs()
    assert difference(load(tmp_path / "whole"), load(tmp_path / "killed")) == 0
    assert killed.lines(0)[-1] == whole.lines(0)[-1]  # with the sha256
    assert files(tmp_path / "killed") == ["snapshot.pt"]


@pytest.mark.long
def test_world_sizes_agree(tmp_path, mnist_dir):
    """1, 2 and 4 ranks take the same steps up to rounding, and this model does not amplify it."""
    found = {}
    for ranks in (1, 2, 4):
        folder, arguments = tmp_path / str(ranks), ("--data-dir", mnist_dir, "--batch-size", 16)
        accuracy = train(folder, 3, *arguments, world_size=ranks).epochs()[3][1]
        weights = torch.cat([tensor.flatten() for tensor in load(folder)["model"].values()])
        found[ranks] = weights, accuracy
    for weights, accuracy in (found[2], found[4]):
        assert 0 < (weights - found[1][0]).abs().max() < 1e-4
        assert accuracy > 0.95 and abs(accuracy - found[1][1]) <= 0.01


def test_a_wrong_start_ends_in_words(tmp_path):
    on_two_machines = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for env in {}, on_two_machines:
        result = fork(SCRIPT, cwd=tmp_path, env=env)
        assert result.status == 2 and re.search(
            r"start it with: torchrun --standalone --nproc-per-node=2 .*/02_\w+.py 5 1$",
            result.error(),
        ), result.output


# ---- The snapshot ----


@pytest.mark.parametrize("name", LESSONS)
def test_all_is_on_the_disk_before_the_old_file_goes(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path, events, fsync, replace = pathlib.Path("saved.pt"), [], os.fsync, os.replace
    path.write_text("old")

    def watched_fsync(number):
        fsync(number)
        events.append(("on the disk", os.fstat(number).st_size))

    def watched_replace(source, target):
        events.append(("replaced", path.read_text(), os.path.dirname(source)))
        replace(source, target)

    with (
        patch.object(torch, "save", lambda state, file: file.write(state)),  # and flush nothing
        patch.object(torch.distributed, "get_rank", int),
        patch.object(os, "fsync", watched_fsync),
        patch.object(os, "replace", watched_replace),
    ):
        runpy.run_path(str(ROOT / name))["save"](b"new state", "saved.pt")
    assert events == [("on the disk", 9), ("replaced", "old", "")]
    assert path.read_text() == "new state"


@pytest.mark.parametrize("name", LESSONS)
def test_a_bad_snapshot_is_refused_by_name_and_stays(tmp_path, monkeypatch, capsys, name):
    """Cut at any length, of another model, without a model, or a pickle that would run code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    script, path = runpy.run_path(str(ROOT / name)), tmp_path / "snapshot.pt"
    model = script["Net"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "next_epoch": 2}
    torch.save(state, path)
    content = path.read_bytes()

    def cut(length):
        return lambda path, good: path.write_bytes(good[:length])

    def other(**parts):
        return lambda path, good: torch.save({**state, **parts}, path)

    bad = [cut(length) for length in range(0, len(content), len(content) // 15)]
    bad += [plain_pickle, pickle_in_an_archive, other(model={}), other(optimizer=None)]
    bad += [
        lambda path, good: torch.save({}, path),
        lambda path, good: torch.save(torch.ones(3), path),
    ]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert script["resume"]("none.pt", model, optimizer) == 1
        assert script["resume"]("snapshot.pt", model, optimizer) == 2
        for spoil in bad:
            path.write_bytes(content)
            spoil(path, content)
            before = path.read_bytes()
            with pytest.raises(SystemExit, match="cannot go on from snapshot.pt: "):
                script["resume"]("snapshot.pt", model, optimizer)
            assert path.read_bytes() == before
            assert files(tmp_path) == ["snapshot.pt"], "code in the pickle was executed"
    finally:
        dist.destroy_process_group()
