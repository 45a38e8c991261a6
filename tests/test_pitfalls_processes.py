"""pitfalls/ about files and processes: each shows its symptom, and with --fixed the cure."""

import os
import re
import time

import pytest
from pitfall_runs import both, last_line, show_alone
from support import PYTHON, ROOT, fork_ranks, run


def launch(name, cwd, *arguments):
    """Run a pitfall that starts processes of its own, for real; return its lines."""
    result = run(PYTHON, ROOT / f"pitfalls/{name}.py", *arguments, cwd=cwd, timeout=1200)
    assert result.status == 0, result.output
    return result.output.splitlines()


def test_optimizer_not_saved(tmp_path):
    broken, fixed = both("optimizer_not_saved", tmp_path, run=show_alone)
    found = re.fullmatch(r"symptom: after epoch 3 weights differ by (0\.\d+)", broken[-1])
    assert float(found[1]) > 0.01
    assert fixed[-1] == "cured: after epoch 3 weights differ by 0"
    losses = [line.rpartition(" ")[2] for line in fixed[:4]]
    assert losses[2] == losses[3] != losses[1]


def test_off_by_one_epoch(tmp_path):
    broken, fixed = both("off_by_one_epoch", tmp_path, run=show_alone)
    symptom = r"symptom: trained epochs 1 2 3 3 4; the weights are off by 0\.\d+"
    assert re.fullmatch(symptom, broken[-1])
    assert fixed[-1] == "cured: trained epochs 1 2 3 4; the weights are off by 0"


def test_snapshot_in_place(tmp_path):
    broken, fixed = both("snapshot_in_place", tmp_path, run=show_alone)
    assert broken[1] == "epoch 2: exit -25, file of 100000 bytes"
    assert broken[-1].endswith("failed reading zip archive: failed finding central directory")
    whole = re.fullmatch(r"epoch 1: exit 0, (file of \d+ bytes)", fixed[0])[1]
    assert fixed[1] == f"epoch 2: exit -25, {whole}"
    assert fixed[-1] == "cured: the snapshot of epoch 1 is still there"


def test_every_rank_saves(tmp_path):
    broken, fixed = both("every_rank_saves", tmp_path)
    assert re.fullmatch(r"symptom: snapshot \d+ is (mixed|unreadable)", broken.lines(0)[-1])
    assert fixed.lines() == ["cured: 10 snapshots, all of them whole"]


def test_download_by_all(tmp_path):
    broken, fixed = both("download_by_all", tmp_path, nodes=2)  # two local ranks 0, one disk
    pattern = r"symptom: of 600000 bytes the ranks have read \[(\d+), (\d+)\]"
    first, second = last_line(broken, pattern)
    assert first == 600_000 and 0 <= second < 600_000
    assert fixed.lines(0) == ["cured: of 600000 bytes the ranks have read [600000, 600000]"]


def come_late():
    """Called in a child: in later attempts, rank 1 looks up rank 0 before that is there."""
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        time.sleep(0.5)


def test_stale_addresses_cured(tmp_path):
    """One restart is enough; here with a store for all attempts, as torchrun has it."""
    result = fork_ranks(
        "pitfalls/stale_addresses.py", "--fixed", cwd=tmp_path, max_restarts=1, before=come_late
    )
    assert (result.status, result.attempts) == (0, 2), result.output
    attempts = [line for line in result.output.splitlines() if line.startswith("attempt ")]
    assert sorted(attempts) == [*["attempt 0"] * 2, *["attempt 1"] * 2], result.output


@pytest.mark.long
def test_no_destroy_cured(tmp_path):
    """Forked processes skip the end of the interpreter: test_pitfalls.py has it with real ones."""
    assert show_alone("no_destroy", tmp_path, "--fixed") == ["cured: fixed(): 0 of 3 jobs aborted"]


def check_orphans(lines, reports, outcome):
    """The workers have reported so often after the end of torchrun, and had another parent then."""
    worker = r"worker (\d+) of parent (\d+): step \d+"
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


def test_orphans_cured(tmp_path):
    check_orphans(launch("orphans", tmp_path, "--fixed"), r"\d", "cured")


@pytest.mark.long
def test_orphans(tmp_path):
    check_orphans(launch("orphans", tmp_path), r"1\d", "symptom")


@pytest.mark.long
def test_stale_addresses(tmp_path):
    job = (r"job \d+: status (\d), restarts (\d), (\d+) lines 'Gloo connectFullMesh failed',"
           r" (\d+) with 'Connection refused'")  # fmt: skip
    *jobs, last = launch("stale_addresses", tmp_path)
    found = [re.fullmatch(job, line).group(1, 2) for line in jobs]
    clean = len(jobs) - 1
    assert found[:-1] == [("0", "1")] * clean and found[-1] != ("0", "1"), jobs
    assert last == f"symptom: {clean} of {len(jobs)} jobs went on after one restart"


@pytest.mark.long
def test_no_destroy(tmp_path):
    lines = launch("no_destroy", tmp_path)
    summary = r"symptom: (broken|broken_too)\(\): 1 of \d+ jobs aborted"
    found = [match[1] for line in lines if (match := re.fullmatch(summary, line))]
    assert found == ["broken", "broken_too"], lines
    assert lines.count("terminate called without an active exception") >= 2, lines
