"""who_is_missing names the rank that is missing, and its call; go_on_without ends without it.

What both show, and that they can fail: test_recipes.py.
"""

import runpy

import pytest
from forked import fork, numbers, variant, wait_before_forks
from started import ROOT, TORCHRUN, run

# ---- who_is_missing ----

TERMINATED = """
import os, runpy, signal, sys, threading, time
import torch, torch.distributed as dist

save_record_at_sigterm = runpy.run_path(sys.argv[1])["save_record_at_sigterm"]
save_record_at_sigterm(".")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
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
                 env={"OMP_NUM_THREADS": "2"})
    assert 'job.py", line 11 in <module>' in result.output, result.output
    script = runpy.run_path(str(recipe))
    found = script["first_difference"](script["load_records"](tmp_path, 2))
    assert script["describe"](*found)[1:] == [
        "rank 0 called all_reduce Float[4] in <module> (job.py:11)",
        "rank 1 made 1 calls, and no call 2"]


# ---- go_on_without ----

SCRIPT = "recipes/go_on_without.py"
FORK = {'mp.get_context("spawn")': 'mp.get_context("fork")'}  # as these processes are forked, too


HANGS = {"os.kill(os.getpid(), signal.SIGKILL)\n": "time.sleep(20)\n",
         "TIMEOUT = timedelta(seconds=10)": "TIMEOUT = timedelta(seconds=5)"}


@pytest.mark.long
@pytest.mark.parametrize(("changes", "said"), [
    ({"KILLED, KILL_STEP = 1": "KILLED, KILL_STEP = 0"}, "rank 0 of 3 died in step 5"),
    (HANGS, "process 1 came too late: the others have gone on without it"),
], ids=["rank 0", "hangs"])
def test_the_others_train_on(tmp_path, changes, said):
    """As one process does, which the recipe itself checks, of rank 1 that dies."""
    script = variant(tmp_path, SCRIPT, FORK | changes)
    result = fork(script, cwd=tmp_path, before=wait_before_forks)
    assert result.status == 0 and said in result.output, result.output
    assert numbers(r".* (\d+) of 60 rows never seen, .*", result) == [("0",), ("20",)]
