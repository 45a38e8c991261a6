"""tools/check_training.py names silent mistakes with their line, accuses no right script, and
changes nothing in what it watches.

The scripts run in forked processes, with the recorder in them; some tests start the command itself.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import xml.etree.ElementTree

import pytest
import torch
from forked import fork_ranks, variant
from mistakes.calls import WRONG_CALLS
from mistakes.check_training import BASE, COMMANDS, DATA, GELU, MISTAKES, OTHERS, RIGHT, before
from recorded import come_in
from started import ACTIVE, PYTHON, ROOT, TORCHRUN, read_until, run, running

sys.path.insert(0, str(ROOT / "tools"))
from check_training import clocks, findings, gaps, lines, links, reading, report, rules, times
from check_training.recorder import links as recorder_links
from check_training.records.process import Joined
from check_training.records.times import Gap, GpuPart, GpuTimes, Span, StepTimes
from mistakes.records import CASES, LINKS, a_pass, run_of, run_of_machines

CHECK, LONG = ROOT / "tools/check_training.py", pytest.mark.long
TWO = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "many_processes.py"]


def watched(tmp_path, changes, base=BASE, *arguments, broken=False):
    """Run a variant of the script with the recorder, which ends well; return (records, result)."""
    script, folder = variant(tmp_path, base, changes), tmp_path / "records"
    folder.mkdir()
    return folder, fork_ranks(
        script,
        *arguments,
        cwd=tmp_path,
        max_restarts=1,
        before=functools.partial(come_in, str(folder), broken),
    ).ok()


def records_of(tmp_path, name, changes):
    """Return the records of a script that ends well.

    If KEPT_RECORDS names a folder, they are made once, and judged again from there: so mutants.py
    tries a rule in seconds.
    """
    base, *arguments = OTHERS.get(name, [BASE])
    place = os.path.join(os.environ.get("KEPT_RECORDS", ""), name.replace(" ", "_"))
    if "KEPT_RECORDS" not in os.environ or not os.path.isdir(place):
        folder, _ = watched(tmp_path, changes, base, *arguments)
        if "KEPT_RECORDS" in os.environ:
            shutil.copytree(folder, place)
        return folder
    variant(tmp_path, base, changes)  # for its lines
    return place


def said(folder, without=None):
    """Return what is said of the records, as the command prints it, and the recorder's failures.

    without: the name of a rule that is left out, or "times": what is said of the time.
    """
    records = reading.read(folder)
    asked = [rule for rule in rules.RULES if rule.name != without]
    found = findings.judge_all(records, asked).findings
    if without != "times" and records.runs:
        run = records.runs[-1]
        steps = times.aligned(run)
        found += report.findings_of_steps(run, steps, times.parts_of_steps(steps))
        found += gaps.findings_of(run, gaps.pauses_of(run))
    words = {findings.Found: "found", findings.Question: "question"}
    text = "\n".join(f"{words[type(each)]}: {each.what}\n  {each.why}" for each in found)
    return text, records.failures


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if plain else LONG) for name, (*_, plain) in MISTAKES.items()],
)
def test_a_mistake_is_named(tmp_path, name):
    """With the line of the script; and by its rule alone."""
    changes, rule, pattern, named, _ = MISTAKES[name]
    base, folder = OTHERS.get(name, [BASE])[0], records_of(tmp_path, name, changes)
    text, failures = said(folder)
    assert re.search(pattern, text) and not failures, (text, failures)
    if named:
        lines = (tmp_path / os.path.basename(base)).read_text().splitlines()
        whole = text[re.search(pattern, text).start() :].partition("\n")[0]
        numbers = map(int, re.findall(r"\w+\.py:(\d+)", whole))
        assert any(named.strip() in lines[n - 1] for n in numbers), (whole, named)
    assert not re.search(pattern, said(folder, without=rule)[0])  # no other rule says it


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("as it is",) else LONG) for name in RIGHT]
)
def test_a_right_script_is_not_accused(tmp_path, name):
    folder = records_of(tmp_path, name, RIGHT[name])
    assert said(folder, without="times") == ("", [])


@pytest.mark.parametrize("rule", sorted({name for name, *_ in CASES}))
def test_what_a_rule_says_of_records(rule):
    """Of those that show its mistake, and of those that look alike, and differ in one thing."""
    [asked] = [each for each in rules.RULES if each.name == rule]
    for place, (name, kind, ranks) in enumerate(CASES):
        if name == rule:
            said = {type(each) for each in findings.judge(ranks, [asked]).findings}
            assert said == {kind} - {None}, place


def paused(exchange, pauses=4, seconds=1.0):
    """Return what is said of three ranks, of which each waits exchange[rank] of so many pauses."""
    ranks = []
    for part in exchange:
        ends = [2.0 * n + step / 100 for n in range(pauses + 2) for step in range(3)]
        records = [StepTimes(end, number, [], end, 0.0) for number, end in enumerate(ends)]
        for begin in range(2, 2 * pauses + 1, 2):
            spans = [Span("exchange", begin + seconds * (1 - part), begin + seconds)]
            records.append(Gap(begin + seconds, begin, begin, begin + seconds, spans))
        ranks.append(records)
    run = run_of(*ranks)
    return [*gaps.findings_of(run, gaps.pauses_of(run))], [*gaps.lines_of(run, gaps.pauses_of(run))]


def test_what_is_said_of_pauses():
    [found], lines = paused([0, 0.9, 1])
    assert type(found) is findings.Found and "ranks 1 and 2 wait while rank 0 is" in found.what
    assert "0.9 s in each of 4 pauses" in found.what and "of 10.0 s" in lines[0]
    for right in [0, 0, 1], [0.9, 0.9, 0.9], [0, 0.4, 0.4]:  # one waits; none does; others are busy
        assert paused(right)[0] == [], right
    assert paused([0, 0.9, 1], pauses=2)[0] == paused([0, 0.9, 1], seconds=0.15)[0] == []


@pytest.mark.parametrize(
    ("exchange", "rest", "pattern"),
    [
        ([0.009, 0.001], 0.001, "rank 0 waits for rank 1 in 80%"),
        ([0.009, 0.009], 0.001, "the GPU is in the exchange for 90%"),
        ([0.001, 0.001], 0.009, "the GPU is in none of the parts for 90%"),
        ([0.001, 0.001], 0.003, "$"),
    ],
)
def test_what_is_said_of_gpus(exchange, rest, pattern):
    parts = [[GpuPart("exchange", seconds), GpuPart("rest", rest)] for seconds in exchange]
    ranks = [[GpuTimes(0.0, n, each) for n in range(25, 105, 10)] for each in parts]
    said = report.findings_of_steps(run_of(*ranks), {}, {0: {}, 1: {}})
    assert re.match(pattern, "".join(each.what for each in said)), said
    assert report.findings_of_steps(run_of(*(each[:7] for each in ranks)), {}, {0: {}, 1: {}}) == []


@pytest.mark.parametrize(("what", "sent", "slow"), LINKS)
def test_a_slow_link_is_one_of_a_machine(what, sent, slow):
    assert links.slow_machine(links.speeds_of(run_of_machines(sent))) == (slow and f"node{slow}")


def test_connections_are_only_looked_at(monkeypatch):
    noted = []
    monkeypatch.setattr(recorder_links, "note", lambda _, links: noted.extend(links))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), 9, ("127.0.0.2", 0))
        ours.sendall(bytes(9000))
        recorder_links.note_links()
        assert len(server.accept()[0].recv(9000, socket.MSG_WAITALL)) == 9000
    assert {each.sent for each in noted if each.local == "127.0.0.2"} & {9000, 9001}


@pytest.mark.parametrize("backwards", [0, 4])
def test_the_loader_of_an_evaluation_is_not_waited_for_in_a_step(backwards):
    """It takes three seconds of four, in a pass without backward() and in one with some."""
    steps = [StepTimes(4.0, 0, [], 4.0, 0.0)]
    for number in range(1, 31):
        end = 4.0 + 4 * number
        load = Span("loading", end - 3, end)
        steps.append(StepTimes(end, number, [Span("forward", end - 4, end - 3), load], end, 0.0))
    start, came = a_pass(0, ddp=False, progress={"backwards": backwards, "gradients": False})
    progress = dataclasses.replace(came, time=200.0, last_batch=200.0, no_grad_forwards=4)
    table = times.parts_of_steps(times.aligned(run_of([*steps, start, progress])))
    said = " ".join(each.what for each in times.findings_of(table))
    assert ("waits for its loader" in said) == bool(backwards), said


def test_the_bits_stay_and_a_recorder_that_fails_steps_aside(tmp_path):
    """The same losses and weights without a recorder, with it, and with one that fails."""
    outputs = []
    for how in "without", "with", "broken":
        (folder := tmp_path / how).mkdir()
        if how == "without":
            result = fork_ranks(BASE, cwd=folder)
        else:
            records, result = watched(folder, {}, broken=how == "broken")
            assert len(reading.read(records).failures) == 2 * (how == "broken")
        weights = torch.load(folder / "model.pt").values()
        bits = hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights)).hexdigest()
        outputs.append((result.status, result.output, bits))
    assert outputs[0][0] == 0 and outputs[0] == outputs[1] == outputs[2]


COUNTED = {
    "def main": """class Counted(torch.utils.data.Sampler):
    def __len__(self):
        return len([each for each in self])

    def __iter__(self):
        yield from torch.randint(1024, (32,))[dist.get_rank() :: 2].tolist()


def main""",
    "DistributedSampler(dataset)": "Counted()",
    "        sampler.set_epoch(epoch)  # another order in each epoch\n": "",
}


def test_a_sampler_that_draws_to_be_counted_draws_no_other_numbers(tmp_path):
    _, result = watched(tmp_path, COUNTED)
    (folder := tmp_path / "without").mkdir()
    assert fork_ranks(variant(folder, BASE, COUNTED), cwd=folder).ok().output == result.output


def test_records_of_machines_with_clocks_of_their_own(tmp_path):
    """An hour apart, one of them faster; and the last record is still being written."""
    folder, _ = watched(tmp_path, {})
    [whole] = reading.read(folder).runs
    [path] = [path for path in folder.glob("*.jsonl") if '"rank": 1,' in path.read_text()]
    records = [lines.read(line) for line in path.read_text().splitlines()]
    for record in records:
        clocks.move_times(record, clocks.Line(3600, 1e-4))
        if isinstance(record, Joined):
            record.machine.key = record.machine.clock = "another, whose host has the same name"
    path.unlink()
    (other := tmp_path / "other").mkdir()
    (other / path.name).write_text("".join(map(lines.written, records))[:-9])
    [run_of_both] = reading.read(folder, other, cut=None).runs
    for rank in 0, 1:
        pairs = zip(whole.ranks[rank].all_records(), run_of_both.ranks[rank].all_records())
        assert max(abs(one.time - moved.time) for one, moved in pairs) < 0.5  # on a busy machine
    said = run(PYTHON, CHECK, "--judge", folder, other, cwd=tmp_path, env=ACTIVE).output
    assert "machine 0 (127.0.0.1): rank 0; machine 1 (127.0.0.1): rank 1\n" in said, said
    assert "as not all ranks have ended: rank 1 (machine 1, 127.0.0.1) in no call" in said, said


def test_ranks_wait_for_a_machine_whose_ranks_come_last_in_turn():
    row = dict.fromkeys([*times.COLUMNS, times.WORKERS], 0.0) | {times.WHOLE: 1.0}
    table = {
        rank: {step: row | {"waiting": rank < 2 or (step + rank) % 2} for step in range(40)}
        for rank in range(4)
    }
    [found] = times.findings_of(table, dict(enumerate(["node1"] * 2 + ["node2"] * 2)))
    assert found.what == "ranks 0 and 1 wait for node2 in 100% of the time of a step"


@LONG
def test_any_launcher_carries_the_recorder(tmp_path):
    """Which is copied into the folder; a later start is judged, too."""
    variant(tmp_path, BASE, MISTAKES["no set_epoch"][0])
    options = {"cwd": tmp_path, "env": ACTIVE}
    exports = run(PYTHON, CHECK, "--records", "my kept", "--print-environment", **options).ok()
    assert all(line.startswith("export ") for line in exports.output.splitlines())
    run("sh", "-euc", f"{exports.output}{' '.join(map(str, TWO))}", **options).ok()
    for seconds, command, status in (0, ["sh", "-c", "exit 3"], 3), (60, TWO, 0):
        called = [PYTHON, CHECK, "--records", "my kept", "--seconds", seconds, "--", *command]
        assert run(*called, **options).status == status
    judged = run(PYTHON, CHECK, "--judge", "my kept", **options)
    assert re.search(r"(?s)set_epoch\(epoch\) is.*ranks 2, starts 2; ", judged.output), judged


@LONG
def test_what_runs_inside_a_step_belongs_to_its_own_part(tmp_path):
    """optimizer.step(closure) runs a forward pass: its time is not the optimizer's, too."""
    changes = RIGHT["LBFGS"] | before(
        DATA,
        "import time",
        "class Slow(nn.GELU):",
        "    def forward(self, x): time.sleep(0.02); return super().forward(x)",
    )
    folder, _ = watched(tmp_path, changes | {GELU: "Slow(),"})
    table = times.parts_of_steps(times.aligned(reading.read(folder).runs[-1]))
    for steps in table.values():
        assert len(steps) > 10
        for parts in steps.values():
            assert parts["forward"] > 0.02
            assert sum(parts.values()) < 2.001 * parts[times.WHOLE]
        assert times.medians_of(steps)["optimizer"] < 0.02


def test_the_line_of_a_trainer_stands_before_the_line_that_starts_it():
    """But not a bar's, which only calls what it stands around."""
    from check_training.recorder.script_lines import where

    names, package = {"where": where}, "/lib/site-packages/fitting/loop.py"
    calls = "def a(): return where()", "def b(): return a()", "def c(): return b()"
    exec(compile("\n".join(calls), package, "exec"), names)  # noqa: S102
    assert re.fullmatch(r"test_check_training.py:\d+", names["b"]())
    whole = r"loop.py:1 of fitting, from test_check_training.py:\d+"
    assert re.fullmatch(whole, names["c"]())


def test_causes_are_judged_before_their_consequences():
    """In the order of the files; each rule heeds subjects of others, and says what it sees."""
    assert findings.in_order(rules.RULES) == rules.RULES
    subjects = {rule.subject for rule in rules.RULES}
    assert all(rule.unless | rule.asks_if <= subjects for rule in rules.RULES)
    assert all(rule.function.__doc__ for rule in rules.RULES)


class Elsewhere:
    """Stands for a tensor of a GPU: nothing of it may be read."""

    layout, is_quantized, is_cuda = torch.strided, False, False
    device = torch.device("xpu")

    def numel(self):
        return 0


def test_no_gpu_is_waited_for_after_the_first_steps(monkeypatch):
    from check_training.recorder import fingerprints

    monkeypatch.setattr(torch, "Tensor", Elsewhere)
    assert fingerprints.readable(Elsewhere(), 0)
    for step in fingerprints.FIRST, 100, 10**9:
        assert not fingerprints.readable(Elsewhere(), step)


def test_what_has_no_memory_is_not_read():
    """FSDP2 frees what it has gathered."""
    from check_training.recorder import fingerprints

    tensor = torch.ones(3)
    assert fingerprints.readable(tensor) and fingerprints.readable(torch.ones(0))
    tensor.untyped_storage().resize_(0)
    assert not fingerprints.readable(tensor)


@pytest.mark.parametrize(("options", "error"), WRONG_CALLS)
def test_wrong_calls(tmp_path, options, error):
    result = run(PYTHON, CHECK, *options, cwd=tmp_path, env=ACTIVE)
    assert result.status == 2 and result.error().startswith(error), result.output


def test_a_folder_that_was_removed(tmp_path):
    command = f'mkdir gone; cd gone; rmdir ../gone; "{PYTHON}" "{CHECK}" -- true'
    result = run("sh", "-c", command, cwd=tmp_path, env=ACTIVE)
    assert result.status == 2 and "has been removed" in result.error(), result.output


@LONG
def test_the_command_with_a_slow_rank(tmp_path):
    """As on the page; through a shell, with another sitecustomize in the way."""
    variant(tmp_path, BASE, MISTAKES["slow rank"][0] | MISTAKES["no set_epoch"][0])
    (tmp_path / "sitecustomize.py").write_text("print('mine, too')\n")
    (tmp_path / "job.sh").write_text(f"{' '.join(map(str, TWO))}\n")
    options = "--picture", "steps.svg", "--json", "found.json", "--seconds", 300
    env = {**ACTIVE, "PYTHONPATH": str(tmp_path)}
    result = run(PYTHON, CHECK, *options, "--", "sh", "job.sh", cwd=tmp_path, env=env)
    assert result.status == 1, result.output
    assert "epoch 4: loss 0.0153" in result.output and "mine, too" in result.output
    assert "\nfound: rank 0 waits for rank 1 in " in result.output
    found = json.loads((tmp_path / "found.json").read_text())
    pages = [os.path.basename(e["read"]) for e in found["said"] if e["level"] == "found"]
    assert (
        pages == ["no_set_epoch.py", "slow_rank.py"]
        and max(map(len, result.output.rpartition(" check_training --")[2].splitlines())) <= 100
    )
    assert (found["status"], found["script_status"]) == (1, 0)
    picture = xml.etree.ElementTree.parse(tmp_path / "steps.svg").getroot()
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "ms", "forward"} <= {*texts}


@LONG
@pytest.mark.parametrize(
    ("command", "changes", "status", "text"),
    [
        ([PYTHON, "-I", "-cprint(1)"], {}, 1, "no process of the command was seen to train: pytho"),
        *((TWO, *case) for case in COMMANDS),
    ],
)
def test_the_command(tmp_path, command, changes, status, text):
    variant(tmp_path, BASE, changes)
    limits = "--seconds", 300, "--stall", 4
    result = run(PYTHON, CHECK, *limits, "--", *command, cwd=tmp_path, env=ACTIVE)
    assert result.status == status and re.search(text, result.output), result.output


@LONG
def test_ctrl_c_ends_all_processes(tmp_path):
    variant(tmp_path, BASE, {"range(5)": "range(10**9)"})
    env = {**ACTIVE, "TMPDIR": str(tmp_path)}
    with running(PYTHON, CHECK, "--", *TWO, cwd=tmp_path, env=env) as process:
        read_until(process, "epoch 3")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and "\nended by Ctrl-C" in output, output
        assert not [name for name in os.listdir(tmp_path) if name.startswith("check")]
