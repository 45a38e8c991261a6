"""who_is_missing names the rank that is missing, and its call; go_on_without ends without it.

What both show, and that they can fail: test_recipes.py.
"""

import runpy

import pytest
import torch.distributed as dist
from support import ROOT, TORCHRUN, fork, numbers, run, variant

# ---- who_is_missing ----


def record(*calls, first=1, group="default_pg", dtype="Float"):
    """A record as torch writes it, with calls of (kind, size), numbered from first."""
    frames = [{"filename": "train.py", "name": "main", "line": 1}]
    return {"entries": [{"process_group": ("0", group), "is_p2p": False, "frames": frames,
                         "collective_seq_id": number, "profiling_name": f"gloo:{kind}",
                         "input_sizes": [[size]], "input_dtypes": [dtype]}
                        for number, (kind, size) in enumerate(calls, first)]}  # fmt: skip


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
                 env={"OMP_NUM_THREADS": "2"})  # fmt: skip
    assert 'job.py", line 21 in <module>' in result.output, result.output
    script = runpy.run_path(str(recipe))
    found = script["first_difference"](script["load_records"](tmp_path, 2))
    assert script["describe"](*found)[1:] == [
        "rank 0 called all_reduce Float[4] in <module> (job.py:21)",
        "rank 1 made 1 calls, and no call 2"]  # fmt: skip


# ---- go_on_without ----

SCRIPT = "recipes/go_on_without.py"
FORK = {'mp.get_context("spawn")': 'mp.get_context("fork")'}  # quicker


@pytest.mark.long
@pytest.mark.parametrize("kill", [0, 2])
def test_whichever_rank_dies_the_others_train_on(tmp_path, kill):
    """As one process does, which the recipe itself checks."""
    result = fork(variant(tmp_path, SCRIPT, FORK), "--kill", kill, cwd=tmp_path)
    assert result.status == 0, result.output
    assert f"rank {kill} of 3 died in step 5" in result.output


@pytest.mark.long
def test_a_rank_that_hangs_is_left_out(tmp_path):
    """It ends by itself when it comes back, and the others finish without it."""
    script = variant(tmp_path, SCRIPT, FORK | {
        "    os.kill(os.getpid(), signal.SIGKILL)\n": "    time.sleep(20)\n",
        "TIMEOUT = timedelta(seconds=10)": "TIMEOUT = timedelta(seconds=5)"})  # fmt: skip
    result = fork(script, cwd=tmp_path)
    assert result.status == 0, result.output
    assert "process 1 came too late: the others have gone on without it" in result.output
    assert numbers(r".* (\d+) of 60 rows never seen, .*", result) == [("0",), ("20",)]


def test_who_is_here_is_agreed(tmp_path):
    """The newest first; the first list stands; who comes too late finds itself left out."""
    meet = runpy.run_path(str(ROOT / SCRIPT))["meet"]
    meet.__globals__["WINDOW"] = 0.2  # there is nobody to wait for
    store = dist.HashStore()
    store.set("meeting 1/2", "5")
    assert meet(store, 1, 0, 4, [0, 1, 2]) == [2, 0]
    assert meet(store, 1, 1, 5, [0, 1, 2]) == [2, 0]
    assert meet(store, 2, 0, 5, [0]) == [0], "and at once, when all are here"
