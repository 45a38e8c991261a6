"""pitfalls/ about files and processes: each shows its symptom, and with --fixed the cure."""

import re

import pytest
from support import PYTHON, ROOT, fork, run
from test_pitfalls_hangs import show


def alone(name, cwd, *arguments):
    """Run a pitfall of one process; return its lines."""
    result = fork(f"pitfalls/{name}.py", *arguments, cwd=cwd)
    assert result.status == 0, result.output
    assert not list(cwd.iterdir()), "files left in the reader's folder"
    return result.output.splitlines()


def launch(name, cwd, *arguments):
    """Run a pitfall that starts processes of its own, for real; return its lines."""
    result = run(PYTHON, ROOT / f"pitfalls/{name}.py", *arguments, cwd=cwd, timeout=400)
    assert result.status == 0, result.output
    return result.output.splitlines()


def test_optimizer_not_saved(tmp_path):
    last = alone("optimizer_not_saved", tmp_path)[-1]
    found = re.fullmatch(r"symptom: after epoch 3 weights differ by (0\.\d+)", last)
    assert float(found[1]) > 0.01
    fixed = alone("optimizer_not_saved", tmp_path, "--fixed")
    assert fixed[-1] == "cured: after epoch 3 weights differ by 0"
    losses = [line.rpartition(" ")[2] for line in fixed[:4]]
    assert losses[2] == losses[3] != losses[1]


def test_off_by_one_epoch(tmp_path):
    last = alone("off_by_one_epoch", tmp_path)[-1]
    assert re.fullmatch(r"symptom: trained epochs 1 2 3 3 4; the weights are off by 0\.\d+", last)
    last = alone("off_by_one_epoch", tmp_path, "--fixed")[-1]
    assert last == "cured: trained epochs 1 2 3 4; the weights are off by 0"


def test_snapshot_in_place(tmp_path):
    broken = alone("snapshot_in_place", tmp_path)
    assert broken[1].startswith("epoch 2: exit -9, file of 100000 bytes")
    assert broken[-1].endswith("failed reading zip archive: failed finding central directory")
    fixed = alone("snapshot_in_place", tmp_path, "--fixed")
    assert fixed[1].startswith("epoch 2: exit -9, ")
    assert fixed[-1] == "cured: the snapshot of epoch 1 is still there"


def test_every_rank_saves(tmp_path):
    last = show("every_rank_saves", tmp_path).lines(0)[-1]
    counts = re.fullmatch(
        r"symptom: 10 snapshots: {'whole': (\d), 'mixed': (\d), 'unreadable': (\d)}", last
    )
    whole, mixed, unreadable = map(int, counts.groups())
    assert whole + mixed + unreadable == 10 and mixed + unreadable > 0
    last = show("every_rank_saves", tmp_path, "--fixed").lines(0)[-1]
    assert last == "cured: 10 snapshots: {'whole': 10, 'mixed': 0, 'unreadable': 0}"


def test_download_by_all(tmp_path):
    last = show("download_by_all", tmp_path).lines(0)[-1]
    sizes = re.fullmatch(r"symptom: of 600000 bytes the ranks have read \[(\d+), (\d+)\]", last)
    assert int(sizes[1]) == 600_000 and 0 < int(sizes[2]) < 600_000
    last = show("download_by_all", tmp_path, "--fixed").lines(0)[-1]
    assert last == "cured: of 600000 bytes the ranks have read [600000, 600000]"


@pytest.mark.long
def test_orphans(tmp_path):
    worker = r"worker (\d+) of parent (\d+): step \d+"
    for arguments, reports, outcome in ([], r"1\d", "symptom"), (["--fixed"], r"\d", "cured"):
        lines = launch("orphans", tmp_path, *arguments)
        last = rf"{outcome}: the workers reported {reports} times without torchrun"
        assert re.fullmatch(last, lines[-1]), lines
        end = lines.index("torchrun killed: exit status -9")
        seen, later = (
            [found.groups() for line in part if (found := re.fullmatch(worker, line))]
            for part in (lines[:end], lines[end:])
        )
        pids, [torchrun] = {pid for pid, _ in seen}, {parent for _, parent in seen}
        orphans = {pid for pid, parent in later if parent != torchrun}
        assert len(pids) == 2 and orphans <= pids and (orphans == pids or outcome == "cured")


@pytest.mark.long
def test_stale_addresses(tmp_path):
    job = r"job \d: exit status (\d), restarts (\d), (\d+) lines 'Gloo connectFullMesh failed'"
    lines = launch("stale_addresses", tmp_path)
    clean = [re.fullmatch(job, line).group(1, 2) for line in lines[:4]].count(("0", "1"))
    symptom = f"symptom: {clean} of 4 jobs went on after one restart"
    assert lines[4] == symptom or clean == 4 and lines[4].startswith("no symptom this time"), lines
    lines = launch("stale_addresses", tmp_path, "--fixed")
    assert [re.fullmatch(job, line).groups() for line in lines[:4]] == [("0", "1", "0")] * 4
    assert lines[4:] == ["cured: 4 of 4 jobs went on after one restart"]


@pytest.mark.long
def test_no_destroy(tmp_path):
    lines = launch("no_destroy", tmp_path)
    chance = "symptom|a matter of chance, not this time"
    summary = rf"({chance}): (\d) of 6 jobs aborted; destroy called: (False|True)"
    found = [match for line in lines if (match := re.fullmatch(summary, line))]
    assert [match[3] for match in found] == ["False", "True"], lines
    assert all((match[1] == "symptom") == (match[2] != "0") for match in found), lines
    aborts = lines.count("terminate called without an active exception")
    assert aborts == sum(int(match[2]) for match in found), lines
    lines = launch("no_destroy", tmp_path, "--fixed")
    assert lines == ["cured: 0 of 6 jobs aborted; destroy called: True"]
