"""Machines leave, die and come back in random order: tools/kill_test.py --machines plays it.

On template/train.py and 03, which must lose nothing but the steps since a save; on scripts that
lose something on several machines alone (departed.txt), where its verdict must say what; and
without torch, on what it must do itself: refuse, and clean up.
"""

import os
import pathlib
import random
import re
import signal
import sys
import time

import pytest
import shown
import torch
from forked import variant
from mistakes.machines import two_runs
from started import ACTIVE, PYTHON, ROOT, family, read_until, run, running, wait_until

sys.path.insert(0, str(ROOT / "tools"))
from kill_test import distance, equality, events, judging, lab, records, verdicts

KILL_TEST = ROOT / "tools/kill_test.py"
TEMPLATE, LESSON = "template/train.py", "03_multinode.py"
WORK = {TEMPLATE: "add_up_gradients", LESSON: "train_epoch"}  # for a step, or an epoch
TORCHRUN = (
    *("torchrun", "--nproc-per-node=1", "--max-restarts=50", "--rdzv-id=345"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint={endpoint}"),
    "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5",
)
# {name | options | status | what it says: text of a script}; "good.py" is changed by the others.
SCRIPTS = dict(
    re.findall(
        r"^# ---- (.+) ----\n((?:(?!# ----).*\n)*)",
        (ROOT / "tests/departed.txt").read_text(),
        re.MULTILINE,
    )
)
CASES = [[word.strip() for word in name.split("|", 3)] for name in SCRIPTS if " | " in name]
# What the others print when the first machine is gone, if its network is not.
LOST = (
    "has failed to send a keep-alive heartbeat to the rendezvous",
    "has failed to shutdown the rendezvous",
)


def played(folder, machines, options, command):
    """Play rounds of a command in a folder; return the result."""
    env = {**ACTIVE, "TMPDIR": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = "--machines", machines, *options, "--", *command
    result = run(PYTHON, KILL_TEST, *words, cwd=folder, env=env, timeout=1800)
    if "no machines here: " in result.output:
        pytest.skip(result.output)
    return result


@pytest.mark.long
def test_machines_come_and_go(tmp_path, mnist_dir):
    """In random order, each with a disk of its own."""
    script = random.choice([TEMPLATE, LESSON])
    slow = (  # some time is left for what runs beside
        f"REPORT_EVERY, work = 1, {WORK[script]}\n"
        f"{WORK[script]} = lambda *args: time.sleep(0.05) or work(*args)"
    )
    path = variant(tmp_path, script, slow)
    words = [path, 120, 20] if script == TEMPLATE else [path, 60, 3, "--data-dir", mnist_dir]
    options = ["--rounds", 1, "--kills", 3, "--seed", random.randrange(10**6)]
    options += ["--victims", "rank", "machine", "link", "leave", "join"]
    command = [*TORCHRUN, "--nnodes=1:3", *words, "--batch-size", 24, "--timeout", 15]
    result = played(tmp_path, 3, options, command)
    assert result.status == 0 or "but proves nothing" in result.output, result.output


@pytest.mark.long
def test_the_first_machine_goes(tmp_path):
    """By the command of the page, on one disk."""
    rounds = f"--rounds 1 --seed {random.randrange(10**6)} --victims first --kills 1 --keep"
    command = shown.block("kill test: several machines").replace("--seed 12", rounds)
    env = {**ACTIVE, "TMPDIR": str(tmp_path)}
    result = run("sh", "-euc", command, cwd=ROOT, env=env, timeout=1800)
    if "no machines here: " in result.output:
        pytest.skip(result.output)
    assert result.status == 0 or "but proves nothing" in result.output, result.output
    assert re.search(r"(?s) all were started anew .*; the first machine lost 1\n", result.output)
    kept = pathlib.Path(re.search("kept: (.+)", result.output)[1], "round1/output.txt").read_text()
    if re.search("node1 (got SIGTERM|was killed)", result.output):
        assert any(text in kept for text in LOST), kept
    assert all(f'"{message}"' in shown.PITFALLS.read_text() for message in LOST)


@pytest.mark.parametrize(
    ("name", "options", "status", "said"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.long) for case in CASES],
)
def test_a_verdict_is_true(tmp_path, name, options, status, said):
    """What a script loses on several machines is said; a right one is not accused."""
    text = next(text for key, text in SCRIPTS.items() if key.startswith(f"{name} |"))
    script = SCRIPTS["good.py"]
    for old, new in re.findall(r"<<<\n(.*?)===\n(.*?)>>>\n", text, re.DOTALL):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script)
    words = [*options.split(), "--rounds", 1, "--kills", 1]
    command = [*TORCHRUN, "--nnodes=1:2", "train.py"]
    result = played(tmp_path, 2, words, command)
    assert result.status == int(status) and re.search(said, result.output), result.output


# ---- Without torch ----


@pytest.mark.parametrize("call", SCRIPTS["wrong calls"].splitlines())
def test_wrong_calls(tmp_path, call):
    words, said = call.split(" :: ")
    result = run(PYTHON, KILL_TEST, *words.split(), cwd=tmp_path, env=ACTIVE)
    assert result.status == 2 and said in result.output, result.output
    assert result.output.count("\n") == 1 and not os.listdir(tmp_path), result.output


STATIC = "env", "RANK={number}", "WORLD_SIZE={machines}", PYTHON, "train.py"


@pytest.mark.long
def test_all_is_started_anew_where_nobody_starts_a_rank_again(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPTS["static.py"])
    options = "--shared", "--rounds", 3, "--seed", 3, "--victims", "rank", "machine", "first"
    result = played(tmp_path, 2, options, STATIC)
    assert result.status == 0, result.output
    assert "equal (bits); went on; " in result.output and "all were started anew" in result.output


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(tmp_path, number):
    """After Ctrl-C; after SIGKILL, once it is started again. Two at once do not meet."""
    (tmp_path / "train.py").write_text(SCRIPTS["static.py"])
    words = PYTHON, KILL_TEST, "--machines", 2, "--shared", "--", *STATIC
    with running(*words, cwd=tmp_path, env=ACTIVE) as process:
        read_until(process, "undisturbed: ")
        wait_until(lambda: len(family(process)) > 3, "the command on two machines")
        process.send_signal(number)
        process.send_signal(number)
        process.communicate(timeout=60)
        if number == signal.SIGKILL:
            assert family(process)
            played(tmp_path, 2, ["--shared", "--rounds", 1, "--victims", "rank"], STATIC)
        time.sleep(0.2)
        assert not family(process)


@pytest.mark.parametrize(
    ("until", "moments", "halves"),
    [
        (9, [5, 6, 7], True),
        (9, [5], False),  # a line that came late
        (4, [5, 6, 7], False),  # the old rank 0 had ended
    ],
)
def test_two_halves_are_told_from_a_change_of_machines(until, moments, halves):
    run = events.MachinesRun("/none")
    run.leaders = {1: events.Leader("node1", 0, until), 2: events.Leader("node2", 4.5, 9)}
    for machine, seconds in ("node1", [1, 2, 3, 5.5, 6.5]), ("node2", moments):
        for number, moment in enumerate(seconds):
            mark = records.Mark(("step",), (number,), "")
            run.printed_by.append(events.PrintedBy(moment, 1, machine, mark))
    found = verdicts.find_halves(run)
    assert (found is not None) == halves and (not found or found.since == 4.5)
    run.printed_by.sort()
    assert (verdicts.print_by_turns(run) is not None) == (len(moments) > 1)
    run.worlds = [events.World(5.7, 1)]  # new ranks started between their steps
    assert verdicts.print_by_turns(run) is None


def test_what_was_done_until_a_machine_was_met_is_done_again():
    run = events.MachinesRun("/none")
    steps, run.worlds = [], [events.World(4.5, 2)]
    for moment, place in enumerate((0, 1, 2, 3, 0, 1, 2, 3, 4), 1):
        run.printed_by.append(events.PrintedBy(moment, moment, "node1", None))
        steps.append(judging.PrintedStep(moment, place))
    event = events.Event("join", "node2 was started", 0, 2.5, 2, "", {}, set(), False)
    verdicts.note_steps_until_a_restart(run, event, None, steps)
    assert event.again == 4


@pytest.mark.long
def test_a_file_that_another_machine_has_is_named(tmp_path):
    text = "import os; open('of' + os.environ['RANK'], 'w').write('1'); print('step 1')"
    (tmp_path / "train.py").write_text(text)
    result = played(tmp_path, 2, ["--file", "of1"], STATIC)
    assert result.status == 2 and "node1 has no of1 at the end, but node2 has" in result.output


@pytest.mark.parametrize(
    ("change", "far", "others"),
    [
        ({}, 0, []),
        ({"weight": torch.tensor([3.0, 4.5])}, 0.1, []),
        ({"step": 4}, 0, ["a.pt['step'] is 4, not 3"]),
        ({"weight": torch.ones(1)}, 0, ["a.pt['weight'] is tensor([1.]), not tensor([3., 4.])"]),
    ],
)
def test_snapshots_are_so_far_apart(tmp_path, change, far, others):
    snapshot = {"weight": torch.tensor([3.0, 4.0]), "step": 3}
    for name, content in ("one", snapshot), ("other", snapshot | change):
        (tmp_path / name).mkdir()
        torch.save(content, tmp_path / name / "a.pt")
    found = distance.distance(tmp_path / "other", tmp_path / "one", [])
    assert abs(found.far - far) < 1e-6 and [*found.others.values()] == others


@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_of_another_machine_counts_if_it_is_new(tmp_path, is_new):
    """An old one stays on a machine that was away."""
    test, run = two_runs(tmp_path, events, 0 if is_new else time.time() + 60)
    found = distance.Distance()
    equality.look_at_other_machines(test, run, found)
    assert found.name == ("best.pt of node2" if is_new else "")


@pytest.mark.parametrize(("ranks", "by"), [(4, 1e-6), (4, 1e-3), (2, 1e-6)])
def test_three_ranks_may_add_in_another_order_after_a_restart(tmp_path, ranks, by):
    test, run = two_runs(tmp_path, events, 0, 3 + by, ranks)
    assert bool(equality.by_another_order(test, run, ranks)) == (ranks > 2 and by < 1e-5)


def test_a_lab_is_dead_if_its_owner_is():
    me = lab.OWNER.fullmatch(lab.name_of_owner(os.getpid())).groups()
    assert not lab.is_dead(*me) and lab.is_dead(*me[:2], "1")
    assert not lab.is_dead("1", me[1], "1")  # of another container: nobody can know
