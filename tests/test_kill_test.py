"""tools/kill_test.py finds what a kill can cost, and lets a script pass that loses nothing."""

import json
import os
import pathlib
import random
import re
import shlex
import signal
import sys

import pytest
import shown
import torch
from started import ACTIVE, PYTHON, ROOT, family, read_until, run, running, wait_until

sys.path.insert(0, str(ROOT / "tools"))
import foreign_command
from kill_test import (
    comparing,
    drawing,
    judging,
    options,
    processes,
    reading,
    records,
    reference,
    watching,
    words,
)

KILL_TEST, LONG = ROOT / "tools/kill_test.py", pytest.mark.long
# Its first draws kill in the middle, when something is saved.
ONCE = ("--rounds", 1, "--kills", 1, "--seed", 1027)
# {name: text of a script}; names with "|" are cases.
SCRIPTS = dict(
    re.findall(
        r"^# ---- (.+) ----\n((?:(?!# ----).*\n)+)",
        (ROOT / "tests/killed.txt").read_text(),
        re.MULTILINE,
    )
)
CASES = [[word.strip() for word in name.split("|", 3)] for name in SCRIPTS if " | " in name]
CASES = [case for case in CASES if not case[0].startswith("fed: ")]
JOB = SCRIPTS["job.py"]


def kill_test(folder, *options, how="survives"):
    (folder / "job.py").write_text(JOB)
    command = ("--", PYTHON, "job.py", how) if how else ()
    env = {**ACTIVE, "TMPDIR": str(folder)}  # for what is kept
    return run(PYTHON, KILL_TEST, *options, *command, cwd=folder, env=env)


@pytest.mark.parametrize(
    ("options", "how", "error"),
    [
        ([], None, "the command is missing"),
        (["--", "no_such_command"], None, r"cannot go on: \[Errno 2\] .*: 'no_such_command'"),
        (
            ["--file", "b.txt", "--file", "state.json"],
            "survives",
            "it left no b.txt: give --file as ",
        ),
        ([], "fails", r"the command fails undisturbed \(status 1 at the last of 1 starts\)\. It "),
        (
            [],
            "silent",
            "it prints nothing that matches .*: let it print a checksum of its weights ",
        ),
    ],
)
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
    result = kill_test(tmp_path, *ONCE, "--keep", "--victims", victim).ok()
    went_on = 0 if victim == "worker" else 1  # nobody waits for a worker
    *_, kept = lines = result.output.splitlines()
    said = f"1 of 1 rounds ended equal, {went_on} of these went on; killed: {victim} 1"
    assert said in lines, result.output
    starts = "2 times" if victim == "launcher" else "once"
    assert f"; 1 killed, command started {starts}, " in result.output
    text = pathlib.Path(kept[6:], "round1/output.txt").read_text()
    killed_worker = text.count("worker starts") > text.count("worker ends")
    assert killed_worker == (victim == "worker")
    assert (text.count("resumed at step ") >= 2) == went_on, text


@pytest.mark.parametrize(
    ("how", "options", "failure"),
    [
        pytest.param(
            "hangs", ["--victims", "rank", "--limit", "4"], "hung: no end in 4 s", marks=LONG
        ),
        pytest.param(
            "leaves",
            ["--victims", "launcher", "--patience", "3", "--orphans", "1"],
            r"left behind after 3 s: \d+ \(sleep 600\)",
            marks=LONG,
        ),
        ("repeats", ["--victims", "rank"], r"not equal: sha256 [0-9a-f.]+"),
    ],
)
def test_a_script_that_does_not_survive(tmp_path, how, options, failure):
    result = kill_test(tmp_path, *ONCE, *options, how=how)
    assert result.status == 1, result.output
    assert re.search(rf"\nround 1: {failure}; \d killed", result.output), result.output
    assert "\n0 of 1 rounds ended equal; killed" in result.output
    assert ("note: one more undisturbed run was equal" in result.output) == (how == "repeats")
    path = re.search("what it printed: (.+)", result.output)[1]
    assert "step " in pathlib.Path(path).read_text()


@pytest.mark.parametrize(
    ("name", "options", "status", "said"),
    [pytest.param(*case, id=case[0], marks=LONG if i % 9 else ()) for i, case in enumerate(CASES)],
)
def test_a_verdict_is_true(tmp_path, name, options, status, said):
    """On scripts that lose their work and seem not to, and the other way round."""
    text = next(text for key, text in SCRIPTS.items() if key.startswith(f"{name} |"))
    for file, content in {**SCRIPTS, "script": text}.items():
        if "|" not in file:
            (tmp_path / file).write_text(content.replace("FOLDER", str(tmp_path)))
            (tmp_path / file).chmod(0o755)
    (tmp_path / "old.json").write_text('[25, "old"]')
    words = options.replace("FOLDER", str(tmp_path)).split()
    wrapper = [word[8:].replace("+", " ") for word in words if word.startswith("WRAPPER=")]
    options = [word for word in words if not word.startswith("WRAPPER=")]
    alone = ["./script"] if text.startswith("#!") else [PYTHON, "L.py", tmp_path / "script"]
    env = {**ACTIVE, "TMPDIR": str(tmp_path), "WRAPPER": "".join(wrapper)}
    command = [PYTHON, KILL_TEST, "--rounds", 2, "--seed", 3, *options, "--", *alone, "old.json"]
    result = run(*command, cwd=tmp_path, env=env)
    assert result.status == int(status) and re.search(said, result.output), result.output


def lines_of(text):
    """Yield the lines of "step {} :: 1-3 5": step 1, step 2, step 3 and step 5."""
    for line in text.splitlines():
        form, _, numbers = line.partition(" :: ")
        for part in numbers.split() or ["0"]:
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield form.replace("{}", str(number))


def feed(test, text, ranks):
    """Return a records.Run whose ranks print these lines, one a second, and are killed."""
    run = records.Run(test.base, starts=1, saved=1.0, shares_store=True)
    for line in lines_of(text):
        run.seconds += 1
        if line == "kill":
            of_victim = "rank", "rank 0", 1, run.seconds, run.lines, run.last_of_start
            run.kills.append(records.Kill(*of_victim, {}, set(), False, restarted=True))
            continue
        stream, text = ("stderr", line[8:]) if line.startswith("stderr: ") else ("stdout", line)
        reading.note_lines(test, run, [foreign_command.Line(run.seconds, text, stream)])
    run.lives = {("rank", 1): records.Life("rank", 0.0, run.seconds)} if ranks else {}
    return run


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("fed: ")])
def test_lines_are_read_and_judged(tmp_path, name):
    """Lines of an undisturbed run and of a round, without a process."""
    said = name.partition("|")[2].strip()
    undisturbed, round_1 = SCRIPTS[name].split("then\n")
    test = records.KillTest(options.parse(["--", "job"], ""), base=str(tmp_path))
    test.reference = reference.read_reference(test.options, feed(test, undisturbed, ranks=True))
    run = feed(test, round_1, ranks=False)
    played = records.Round(1, run, judging.judge(test.options, test.reference, run))
    lines = [f"note: {text}" for text in words.about_reference(test)]
    lines += words.describe(played, test.reference)
    lines += words.summary(test.options, test.reference, [played])
    assert re.search(said, "\n".join(lines)), "\n".join(lines)


@pytest.mark.parametrize("keep", [(), ("--keep",)])
def test_ctrl_c_ends_all_processes(tmp_path, keep):
    """With --keep, what the runs have left stays."""
    (tmp_path / "job.py").write_text(JOB)
    with running(
        PYTHON,
        KILL_TEST,
        *keep,
        "--",
        PYTHON,
        "job.py",
        "survives",
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path)},
    ) as process:
        read_until(process, "undisturbed: ")
        wait_until(lambda: len(family(process)) == 4, "the launcher, its ranks and a worker")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and "ended by Ctrl-C" in output, output
        assert not family(process)
        kept = [os.path.basename(path) for path in re.findall("kept: (.+)", output)]
        assert sorted(os.listdir(tmp_path)) == ["job.py", *kept] and len(kept) == len(keep), output


def test_a_victims_last_line_is_of_its_own_start():
    run = records.Run("/none", last_of_start="a traceback of the start before", ranks={1})
    run.kills.append(records.Kill("rank", "rank 0", 1, 1.0, 1, "step 1", {}, set(), False))
    roles = processes.Roles()
    roles.add("rank", "rank 0", 2)
    watching.watch(run, options.parse(["--", "job"], ""), {}, roles, 0)
    assert run.kills[0].restarted and run.last_of_start == ""


def test_the_fifth_round_kills_after_the_last_step():
    marks = [records.Mark(("step",), (number,), "") for number in range(3)]
    run = records.Run("/none", seconds=10.0, saved=1.0)
    seen = {kind: records.Span(0.5, 9.0) for kind in options.KINDS}
    shown_by = (marks[0].kind, marks, [2.0, 4.0, 6.0])
    undisturbed = records.Reference(run, "", seen, *shown_by, 0, False, {}, 30.0, 900.0)
    asked = options.parse(["--", "job"], "")
    for draw in range(9):
        (kill,) = drawing.draw_late_kill(asked, random.Random(draw), undisturbed, 1.0)
        assert kill.kind == "rank" and kill.marks == 3 and 0 <= kill.seconds <= 3
    assert drawing.LATE_ROUND == 5  # as the page says


def test_tqdm_may_be_missing():
    code = "import sys; sys.modules['tqdm'] = None; sys.path.insert(0, 'tools')\n"
    code += "from kill_test import words; words.say('said'); print(*words.with_bar([1, 2]))"
    assert run(PYTHON, "-c", code, cwd=ROOT, env=ACTIVE).ok().output == "said\n1 2\n"


def safetensors(**tensors):
    """Return a file of safetensors, as bytes."""
    places, numbers = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        begin, numbers = len(numbers), numbers + tensor.numpy().tobytes()
        offsets = {"data_offsets": [begin, len(numbers)]}
        places[name] = {"dtype": "F32", "shape": [*tensor.shape]} | offsets
    header = json.dumps(places).encode()
    return len(header).to_bytes(8, "little") + header + numbers


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({}, None),
        ({"a.safetensors": 2.0}, r"out\['a.safetensors'\]\['weight'\]: .*: 2 / 6 .*: 2.0 at .*"),
        ({"rng.pth": 2.0}, r"out\['rng.pth'\]: .*: 2 / 6 .*"),
        ({"args.bin": 2.0}, r"out\['args.bin'\] is bytes with sha256 .*"),
        ({"log/new": 2.0}, r"out\['log/new'\] is new"),
    ],
)
def test_a_folder_is_compared_file_by_file(tmp_path, change, difference):
    runs = []
    for name, factors in ("undisturbed", {}), ("round", change):
        out = tmp_path / name / "work/out"
        (out / "log").mkdir(parents=True)
        for file in {"a.safetensors": 1, "rng.pth": 1, "args.bin": 1} | factors:
            weight = torch.tensor([[0.0, 0.0, 2.0], [2.0, 0.0, 0.0]]) * factors.get(file, 1)
            if file.endswith(".pth"):
                torch.save(weight, out / file)
            else:
                data = safetensors(empty=torch.ones(0, 2), weight=weight)
                (out / file).write_bytes(data if "." in file else b"text")
        runs.append(records.Run(str(tmp_path / name)))
    found = comparing.difference_of_files(["out/"], *runs)
    assert found is difference or re.fullmatch(difference, found.text)


SNAPSHOT = {"weight": torch.tensor([1.0, float("nan")]), "rate": float("nan"), "epoch": [3, (4,)]}


@pytest.mark.parametrize(
    ("change", "row", "difference"),
    [
        ({}, "", ""),
        (
            {"weight": torch.tensor([1.5, float("nan")])},
            "",
            r"a.pt\['weight'\]: .*: 1 / 2 .*: 0.5 at index \(0,\).*",
        ),
        ({"weight": torch.ones(1)}, "", r"a.pt\['weight'\]: .* not match: .*\[1\].*\[2\].*"),
        ({"epoch": [3, (5,)]}, "", r"a.pt\['epoch'\]\[1\]\[0\] is 5, not 4"),
        ({"epoch": [3]}, "", r"a.pt\['epoch'\]\[1\] is missing"),
        ({}, "3,0.1\n", r"log.csv\[2\] is new"),
    ],
)
def test_files_are_compared_by_their_content(tmp_path, change, row, difference):
    runs = []
    for name, content, more in ("undisturbed", SNAPSHOT, ""), ("round", SNAPSHOT | change, row):
        (tmp_path / name / "work").mkdir(parents=True)
        torch.save(content, tmp_path / name / "work/a.pt")
        (tmp_path / name / "work/log.csv").write_text(f"epoch,loss\n3,0.1\n{more}")
        runs.append(records.Run(str(tmp_path / name)))
    found = comparing.difference_of_files(["a.pt", "log.csv"], *runs)
    assert re.fullmatch(difference, found.text if found else "")


@pytest.mark.long
def test_the_command_of_the_page(request):
    """No kill costs anything, here in one round. The page shows the last of three."""
    path = shown.FOLDER / "kill_test.txt"
    command, before = shown.read(path)
    # A rank that has not run a line when torchrun is killed does not see that: it waits for
    # torchrun's store, and ends after TIMEOUT, ten minutes.
    rounds = 3 if request.config.getoption("--write-transcripts") else 1
    words = shlex.split(command.replace(" -- ", f" --patience 660 --rounds {rounds} -- "))
    result = run(*words, cwd=ROOT, env=ACTIVE, timeout=1800)
    lines = result.output.splitlines()
    early = "killed before it had printed a step"  # on a busy machine, all kills may come so early
    assert result.status == 0 or rounds == 1 and early in result.output, result.output
    assert f"\n{rounds} of {rounds} rounds ended equal, " in result.output, result.output
    if rounds == 3:
        assert any(re.match(r" {11}\[rank 0/2\] resumed from ", line) for line in lines)
        page = (ROOT / "tools/README.md").read_text()
        (old,) = (text for name, text in shown.BLOCK.findall(page) if name == path.name)
        third = next(i for i, line in enumerate(lines) if line.startswith("round 3:"))
        page = page.replace(old, "\n".join([*lines[:2], *lines[third:], ""]))
        (ROOT / "tools/README.md").write_text(page)
        path.write_text("\n".join([f"$ {command}", *lines, ""]))
    assert shown.masked(before[:2]) == shown.masked(lines[:2])
