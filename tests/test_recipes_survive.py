"""recipes/ about ranks that are missing: their figures, and that each can fail."""

import re
import runpy

import pytest
import torch.distributed as dist
from support import ROOT, TORCHRUN, assert_fails, fork, fork_ranks, numbers, run, variant

# ---- who_is_missing ----


@pytest.mark.long
def test_who_is_missing(tmp_path):
    """Both faults on three ranks: the ranks, the calls, and the lines, looked up in the file."""
    result = fork_ranks("recipes/who_is_missing.py", cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output
    found = numbers(r"  rank (\d) called (\w+) Float\[(\d)\] in (\w+) \(who_is_missing.py:(\d+)\)",
                    result)  # fmt: skip
    lines = (ROOT / "recipes/who_is_missing.py").read_text().splitlines()
    called = [lines[int(call[-1]) - 1].split("(")[0].strip() for call in found]
    assert [call[:-1] for call in found] == [
        ("0", "all_reduce", "7", "validate"), ("1", "broadcast", "9", "validate_on_rank_0"),
        ("2", "broadcast", "9", "validate_on_rank_0"),
        ("0", "all_reduce", "4", "average_gradients"),
        ("1", "all_reduce", "4", "average_gradients")]  # fmt: skip
    assert called == [f"dist.{kind}" for _, kind, _, _, _ in found]
    assert numbers(r"  rank (\d) made (\d) calls, and no call (\d)", result) == [("2", "3", "4")]


def record(*calls, first=1, group="default_pg", dtype="Float"):
    """A record as torch writes it, with calls of (kind, size), numbered from first."""
    frames = [{"filename": "train.py", "name": "main", "line": 1}]
    return {"entries": [{"process_group": ("0", group), "is_p2p": False, "frames": frames,
                         "collective_seq_id": number, "profiling_name": f"gloo:{kind}",
                         "input_sizes": [[size]], "input_dtypes": [dtype]}
                        for number, (kind, size) in enumerate(calls, first)]}  # fmt: skip


def test_the_lines_that_who_is_missing_shows():
    """Those of its docstring are the lines of the calls, as the file stands today."""
    source = (ROOT / "recipes/who_is_missing.py").read_text()
    shown = re.findall(r"called (\w+) .* in (\w+) \(who_is_missing.py:(\d+)\)", source)
    assert len(shown) == 3
    for kind, function, line in shown:
        assert f"dist.{kind}(" in source.splitlines()[int(line) - 1]
        assert f"def {function}(" in "\n".join(source.splitlines()[int(line) - 12 : int(line)])


def test_first_difference():
    """What the recipe's own run does not show: lost records, older calls gone, other groups."""
    script = runpy.run_path(str(ROOT / "recipes/who_is_missing.py"))
    first_difference, describe = script["first_difference"], script["describe"]
    reduce, other, bigger = ("all_reduce", 4), ("broadcast", 4), ("all_reduce", 5)

    assert first_difference([record(reduce, other), record(reduce, other)]) == (None, {})
    number, calls = first_difference([record(reduce), record(bigger)])
    assert number == 1 and [call.sizes for call in calls.values()] == ["Float[4]", "Float[5]"]
    number, calls = first_difference([record(reduce, reduce), record(), None])
    assert number == 1 and calls[1].made == 0 and calls[2] is None
    assert describe(number, calls)[1:] == [
        "rank 0 called all_reduce Float[4] in main (train.py:1)",
        "rank 1 made 0 calls, and no call 1",
        "rank 2 wrote no record: it is dead, or busy outside torch"]  # fmt: skip
    number, calls = first_difference([record(reduce), record(reduce, dtype="Double")])
    assert number == 1 and calls[1].sizes == "Double[4]"
    # Of rank 0's record the first two calls are gone. Rank 1 stopped after call 3.
    number, calls = first_difference([record(*4 * [reduce], first=3), record(*3 * [reduce])])
    assert number == 4 and calls[1].made == 3
    number, calls = first_difference([record(("scatter", 1)), record(("scatter", 2))])
    assert number is None
    with pytest.raises(RuntimeError, match="no calls of the group 'mine' in the records"):
        first_difference([record(reduce)] * 2, group="mine")


TERMINATED = """
import os, runpy, signal, sys, threading, time
import torch, torch.distributed as dist

recipe = runpy.run_path(sys.argv[1])
recipe["save_record_at_sigterm"](".")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.fork() == 0:  # a child's SIGTERM is its own
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert os.wait()[1] == signal.SIGTERM
if os.fork() == 0:  # no record can be saved there: it must end all the same
    recipe["save_record_at_sigterm"]("/dev/null/records")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 128 + signal.SIGTERM
if dist.get_rank() == 0:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    dist.all_reduce(torch.ones(4))  # rank 1 does not come: until the timeout of 30 minutes
while not os.path.exists("rank0"):
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.long
def test_sigterm_writes_the_record_of_a_rank_that_waits_in_a_call(tmp_path):
    """Started as torchrun does: with a thread of numpy's, which is in no forked process."""
    (tmp_path / "job.py").write_text(TERMINATED)
    recipe = ROOT / "recipes/who_is_missing.py"
    result = run(*TORCHRUN, "--standalone", "--nproc-per-node=2", "job.py", recipe, cwd=tmp_path,
                 timeout=60, env={"OMP_NUM_THREADS": "2"})  # fmt: skip
    assert 'job.py", line 21 in <module>' in result.output, result.output
    script = runpy.run_path(str(recipe))
    found = script["first_difference"](script["load_records"](tmp_path, 2))
    assert script["describe"](*found)[1:] == [
        "rank 0 called all_reduce Float[4] in <module> (job.py:21)",
        "rank 1 made 1 calls, and no call 2"]  # fmt: skip


@pytest.mark.parametrize(("message", "old", "new"), [
    ("the call that rank 0 made alone is not found", "if dist.get_rank() == 0:\n        val",
     "if True:\n        val"),
    pytest.param("the call that rank 0 made alone is not found",
                 'not frame["filename"].startswith(TORCH)', "frame", marks=pytest.mark.long),
    pytest.param("no calls of the group 'validate_on_rank_0' in the records",
                 "def main():\n", 'def main():\n    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"\n',
                 marks=pytest.mark.long),
    pytest.param("the rank that is missing is not found", "            return\n", "",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_who_is_missing_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/who_is_missing.py", {old: new}, message)


# ---- go_on_without ----

SCRIPT = "recipes/go_on_without.py"
# Process 0 gets an error in the step that the other two have taken: it is then one step behind.
BEHIND = {
    "        # No collective call from here to the end":
    "        if (me, job.step, len(members)) == (0, 4, 3):\n"
    '            [job.store.get(f"{other} is ahead") for other in (1, 2)]\n'
    '            raise RuntimeError("as if")\n        # No collective call from here to the end',
    "        job.step += 1\n":
    '        job.step += 1\n        job.store.set(f"{me} is ahead", "")'
    " if job.step == 5 else None\n",
}  # fmt: skip


def go_on(folder, changes=None, kill=1):
    """Run the recipe, changed like this; return its result, and the figures of both ways."""
    # Forked: test_recipes.py starts it as it stands.
    spawn, quick = 'mp.get_context("spawn")', 'mp.get_context("fork")'
    script = variant(folder, SCRIPT, {spawn: quick} | (changes or {}))
    result = fork(script, "--kill", kill, cwd=folder)
    return result, numbers(r"(\w+ \w+ \w+) +(\d+) of (\d+) rows never seen, weights off by (\S+)",
                           result)  # fmt: skip


@pytest.mark.parametrize(("kill", "changes"), [
    (0, {}), pytest.param(2, {}, marks=pytest.mark.long),
    pytest.param(1, BEHIND, marks=pytest.mark.long),
    pytest.param(2, BEHIND, marks=pytest.mark.long),
])  # fmt: skip
def test_go_on_without(tmp_path, kill, changes):
    result, ways = go_on(tmp_path, changes, kill)
    assert result.status == 0, result.output
    [(died, step)] = numbers(r"rank (\d) of 3 died in step 5; .* 2 ranks go on in step (\d), .*",
                             result)  # fmt: skip
    assert (died, step) == (str(kill), "5")
    (dealt, anew), (kept, old) = [(way[:3], float(way[3])) for way in ways]
    assert dealt == ("shares dealt anew", "0", "60") and anew < 1e-6
    assert kept == ("old shares kept", "20", "60") and old > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(("message", "changes"), [
    ("RuntimeError: the survivors did not train as one process does",
     {"    take_steps(model, me, members, job, share)":
      "    take_steps(model, me, members, job, old_share)"}),
    ("RuntimeError: the survivors did not train as one process does", BEHIND | {
        "    optimizer.load_state_dict(of_optimizer)\n": ""}),
    ("RuntimeError: the mistake does not show",
     {"members, wrong, old_share)": "members, wrong, share)"}),
    ("ValueError: a fault",
     {"            die(job.store, job.step)": '            raise ValueError("a fault")'}),
    ('RuntimeError: no rank has died, but:\nTraceback',
     {"            die(job.store, job.step)": '            raise RuntimeError("a fault")',
      "WINDOW = 2 ": "WINDOW = 20 "}),  # on a slow machine the others notice it late
])  # fmt: skip
def test_go_on_without_can_fail(tmp_path, message, changes):
    result, _ = go_on(tmp_path, changes)
    assert result.status == 1, result.output
    assert message in result.output, result.output
    assert "error: a process has failed, see above" in result.output


@pytest.mark.long
def test_a_rank_that_hangs_is_left_out(tmp_path):
    """It ends by itself when it comes back, and the others finish without it."""
    result, ways = go_on(tmp_path, {
        "    os.kill(os.getpid(), signal.SIGKILL)\n": "    time.sleep(20)\n",
        "TIMEOUT = timedelta(seconds=10)": "TIMEOUT = timedelta(seconds=5)"})  # fmt: skip
    assert result.status == 0, result.output
    assert "process 1 came too late: the others have gone on without it" in result.output
    assert [way[1] for way in ways] == ["0", "20"]


def test_who_is_here_is_agreed(tmp_path):
    """The newest first; the first list stands; who comes too late finds itself left out."""
    meet = runpy.run_path(str(ROOT / SCRIPT))["meet"]
    meet.__globals__["WINDOW"] = 0.2  # there is nobody to wait for
    store = dist.HashStore()
    store.set("meeting 1/2", "5")
    assert meet(store, 1, 0, 4, [0, 1, 2]) == [2, 0]
    assert meet(store, 1, 1, 5, [0, 1, 2]) == [2, 0]
    assert meet(store, 2, 0, 5, [0]) == [0], "and at once, when all are here"
