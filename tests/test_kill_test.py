"""launch/kill_test.py finds what a kill can cost, and lets a script pass that loses nothing."""

import argparse
import os
import pathlib
import re
import runpy
import shlex
import signal

import pytest
import shown
import torch
from support import (
    ACTIVE,
    PYTHON,
    ROOT,
    assert_nothing_left,
    end,
    family,
    read_until,
    run,
    start,
    wait_until,
)

KILL_TEST = ROOT / "launch/kill_test.py"
SEED = 1043  # its first draws kill when something is saved
# A launcher with two ranks, one with a worker; without torch, so that they start at once. Rank 0
# saves each of 40 steps. The launcher starts both ranks again when one has failed.
JOB = """
import hashlib, json, os, subprocess, sys, time
how, sleeper = sys.argv[1], None
path = how if os.path.isabs(how) else "state.json"
if "RANK" in os.environ:
    if os.environ["RANK"] == "1":  # its worker ends with it, by the pipe
        work = "import sys; print('worker starts'); sys.stdin.read(); print('worker ends')"
        subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE)
    step, state = json.loads(os.environ["STATE"])
    print(f"resumed at step {step}" if step else "starts at step 0")
    time.sleep(600 if how == "hangs" and os.environ["ATTEMPT"] != "0" else 0)
    while step < 40:
        time.sleep(0.02)
        step, state = step + 1, hashlib.sha256(f"{state} {step}".encode()).hexdigest()
        if os.environ["RANK"] == "0":
            with open("new", "w") as file:
                json.dump([step - (how == "repeats"), state], file)
            os.replace("new", path)
    time.sleep(1 if os.path.isabs(how) else 0)  # in which a kill can hit what only goes on
    if os.environ["RANK"] == "0":
        print("the end" if how == "silent" else f"the end, sha256 {state}")
    sys.exit(how == "fails")
if how == "leaves":
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
for attempt in range(9 if how != "fails" else 1):
    state = open(path).read() if os.path.exists(path) else '[0, ""]'  # alike for both ranks
    env = {**os.environ, "ATTEMPT": str(attempt), "STATE": state}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**env, "RANK": r}) for r in "01"]
    while {None} <= {rank.poll() for rank in ranks} <= {None, 0}:
        time.sleep(0.01)
    if failed := any(rank.poll() for rank in ranks):
        for rank in ranks:
            rank.kill(), rank.wait()
    else:
        break
if sleeper:
    sleeper.kill()
sys.exit(failed)
"""


def kill_test(folder, *options, how="survives"):
    (folder / "job.py").write_text(JOB)
    command = ("--", PYTHON, "job.py", how) if how else ()
    env = {**ACTIVE, "TMPDIR": str(folder)}  # for what is kept
    return run(PYTHON, KILL_TEST, *options, *command, cwd=folder, env=env)


@pytest.mark.parametrize(("options", "how", "error"), [
    ([], None, "the command is missing"),
    (["--", "no_such_command"], None, "cannot start the command"),
    (["--rounds", "0"], "survives", "--rounds, --kills, --starts and --limit must be 1 or more"),
    (["--line", "("], "survives", r"argument --line: '\(' is no regular expression: "),
    ([], "fails", r"the command fails undisturbed \(status 1 at the last of 1 starts\)\. It "),
    ([], "silent", "it prints nothing that matches .*: let it print a checksum of its weights "),
    pytest.param(["--file", "a.pt"], "silent", "it left no a.pt: give --file as a path in ",
                 marks=pytest.mark.long),  # it imports torch
])  # fmt: skip
def test_wrong_calls(tmp_path, options, how, error):
    result = kill_test(tmp_path, *options, how=how)
    assert result.status == 2, result.output
    assert re.match(f"kill_test.py: error: {error}", result.output.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


@pytest.mark.parametrize("victim", ["launcher", "rank", "worker"])
def test_a_script_that_survives(tmp_path, victim):
    """The victim is really killed, as the victims' own lines show.

    One kind for each run: where a round ends before its kill, the next draw may choose another.
    """
    result = kill_test(tmp_path, "--rounds", 1, "--kills", 1, "--seed", SEED, "--keep",
                       "--victims", victim)  # fmt: skip
    assert result.status == 0, result.output
    went_on = 0 if victim == "worker" else 1  # nobody waits for a worker
    *_, kept = lines = result.output.splitlines()
    said = f"1 of 1 rounds ended equal, {went_on} went on after a kill; killed: {victim} 1"
    assert said in lines, result.output
    text = pathlib.Path(kept[6:], "round1/output.txt").read_text()
    starts, resumed = re.search(r"^round 1: equal; kills 1, starts (\d),.*\n +[\d.]+ s  " + victim
                                + r".* killed after: .*(?:\n {11}(resumed at step \d+))?",
                                result.output, re.MULTILINE).groups()  # fmt: skip
    assert starts == ("2" if victim == "launcher" else "1")
    killed_worker = text.count("worker starts") > text.count("worker ends")
    assert killed_worker == (victim == "worker") == (not resumed), text
    assert killed_worker or (resumed in text and text.count("resumed at step ") >= 2), text


@pytest.mark.parametrize(("how", "options", "failure"), [
    ("repeats", ["--victims", "rank"], r"not equal: sha256 [0-9a-f]+\.\.\."),
    ("hangs", ["--victims", "rank", "--limit", "4"], "hung: no end in 4 s"),
    ("leaves", ["--victims", "launcher", "--patience", "2"],
     r"left behind after 2 s: \d+ \(sleep 600 ?\)"),
    ("/", [], r"it went on, or ended, before the first kill\. Does .* an absolute path, .*"),
])  # fmt: skip
def test_a_script_that_does_not_survive(tmp_path, how, options, failure):
    how = how.replace("/", f"{tmp_path}/state.json")  # one for all rounds
    result = kill_test(tmp_path, "--rounds", 1, "--kills", 1, "--seed", SEED, *options, how=how)
    assert result.status == 1, result.output
    assert re.search(rf"\nround 1: {failure}; kills \d", result.output), result.output
    assert "\n0 of 1 rounds ended equal, " in result.output
    assert "two undisturbed runs differ" not in result.output
    path = re.search("what it printed: (.+)", result.output)[1]
    assert " at step " in pathlib.Path(path).read_text()


def test_ctrl_c_ends_all_processes(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    command = [PYTHON, KILL_TEST, "--", PYTHON, "job.py", "survives"]
    process = start(*command, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    try:
        read_until(process, "undisturbed: ")
        wait_until(lambda: len(family(process)) == 4, "the launcher, its ranks and a worker")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and "ended by Ctrl-C" in output, output
        assert_nothing_left(process, patience=0)
        assert os.listdir(tmp_path) == ["job.py"]
    finally:
        end(process)


SNAPSHOT = {"weight": torch.tensor([1.0, float("nan")]), "rate": float("nan"), "epoch": [3, (4,)]}


@pytest.mark.parametrize(("change", "difference"), [
    ({}, ""),
    ({"weight": torch.tensor([1.5, float("nan")])},
     "a.pt['weight'] differs by 0.5, in 1 of 2 numbers"),
    ({"weight": torch.tensor([1, 2])},
     "a.pt['weight'] is torch.int64 [2], not torch.float32 [2]"),
    ({"weight": torch.ones(1)}, "a.pt['weight'] is torch.float32 [1], not torch.float32 [2]"),
    ({"epoch": [3, (5,)]}, "a.pt['epoch'][1][0] is 5, not 4"),
    ({"epoch": [3]}, "a.pt['epoch'][1] is missing"),
    ({"more": True}, "a.pt['more'] is new"),
    ({"rate": 1}, "a.pt['rate'] is 1, not nan"),
])  # fmt: skip
def test_files_are_compared_by_their_content(tmp_path, change, difference):
    module, runs = runpy.run_path(str(KILL_TEST)), []
    for name, content in ("undisturbed", SNAPSHOT), ("round", SNAPSHOT | change):
        (tmp_path / name / "work").mkdir(parents=True)
        torch.save(content, tmp_path / name / "work/a.pt")
        runs.append(module["Run"](str(tmp_path / name)))
    args = argparse.Namespace(line=None, file="a.pt")
    assert module["difference"](args, *runs) == difference


# ---- Real jobs ----


@pytest.mark.long
def test_the_command_of_the_page(request):
    """02: no kill costs anything, and the page shows what the command printed."""
    path = shown.FOLDER / "kill_test.txt"
    command, before = shown.read(path)
    # A rank that has not run a line when torchrun is killed does not see that: it waits for
    # torchrun's store, and ends after TIMEOUT, ten minutes.
    words = shlex.split(command.replace(" -- ", " --patience 660 -- "))
    result = run(*words, cwd=ROOT, env=ACTIVE, timeout=1800)
    assert result.status == 0, result.output
    lines = result.output.splitlines()
    assert any(line.startswith("3 of 3 rounds ended equal, ") for line in lines), result.output
    if request.config.getoption("--write-transcripts"):
        # On a busy machine, all kills may come before the first snapshot.
        assert any(re.match(r" {11}\[rank 0/2\] attempt \d: resumed", line) for line in lines)
        shown.write(path, command, lines)
    assert shown.masked(before[:2]) == shown.masked(lines[:2])


@pytest.mark.long
def test_the_file_of_a_real_job():
    script = ("template/train.py", 60, 20)
    command = ("torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=3", *script)
    options = ("--rounds", 1, "--seed", 7, "--line", r"sha256 \w+", "--file", "train.pt")
    result = run(PYTHON, KILL_TEST, *options, "--", *command, cwd=ROOT, env=ACTIVE, timeout=1200)
    assert result.status == 0, result.output
    assert " and train.pt\n" in result.output
    assert "\n1 of 1 rounds ended equal" in result.output
