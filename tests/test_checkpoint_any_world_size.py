"""recipes/checkpoint_any_world_size.py: a job killed at any moment loses at most its last save.

What it shows, and that it can fail: test_recipes.py.
"""

import random

import pytest
from forked import fork_ranks, numbers
from started import ROOT

RECIPE = "recipes/checkpoint_any_world_size.py"


# A job that goes on from what there is, and saves every step. It says what it is about to save.
# Some moment after its first save has begun, a rank is killed.
JOB = """
import os, runpy, signal, sys, threading
import torch, torch.distributed as dist

recipe = runpy.run_path(sys.argv[1])
root, way, victim, seconds = sys.argv[2:]
dist.init_process_group("gloo")
group = [dist.new_group(backend="gloo")] * (way == "save_shards_async")
model, optimizer = recipe["new_sharded"]()
folder, log, saved = recipe["newest"](root), recipe["log"], 0
step = recipe["load_folder"](model, optimizer, folder) if folder else 0
log(f"loaded {step} {folder and recipe['checksum'](model, optimizer)}")
killed = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
finish = lambda: None
while True:
    recipe["train"](model, optimizer, step, step + 1, dist.get_rank(), dist.get_world_size())
    finish()  # the save before, if that is one of a thread
    log(f"saved {saved}")
    step += 1
    log(f"saving {step} {recipe['checksum'](model, optimizer)}")
    if dist.get_rank() == int(victim) and not killed.is_alive():
        killed.start()
    finish = recipe[way](model, optimizer, step, root, *group) or (lambda: None)
    saved = step
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["save_shards", "save_shards_async"])
def test_jobs_killed_at_random(tmp_path, way):
    """After each kill, the pointer names one whole step, and at most the last save is lost."""
    (tmp_path / "job.py").write_text(JOB)
    root, saving, reached, in_the_middle = tmp_path / "saves", {}, 0, 0
    for number in range(11):
        moments, ranks = random.Random(number), 2 + number % 2
        result = fork_ranks(tmp_path / "job.py", ROOT / RECIPE, root, way, moments.randrange(ranks),
                            moments.uniform(0, 0.5), cwd=tmp_path, world_size=ranks)
        [(step, digest)] = numbers(r"loaded (\d+) (\w+)", result)
        assert int(step) >= reached, "a save that had ended is lost"
        assert digest == saving.get(step, digest), "loaded something else"
        assert int(step) == 0 or step in saving
        saving = {step: digest, **dict(numbers(r"saving (\d+) (\w+)", result))}
        assert len(saving) > 1, result.output
        reached = max(int(step), *(int(saved) for [saved] in numbers(r"saved (\d+)", result)))
        in_the_middle += any(not (path / ".metadata").exists() for path in root.glob("step_*"))
    assert in_the_middle > 0, "no kill has hit a save"
