"""recipes/checkpoint_any_world_size.py: a job killed at any moment loses at most its last save.

What it shows, and that it can fail: test_recipes.py.
"""

import hashlib
import random

import pytest
import torch
from support import ROOT, fork_ranks, numbers, variant
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

RECIPE = "recipes/checkpoint_any_world_size.py"


@pytest.mark.long
def test_one_folder_by_two_ranks_then_three(tmp_path):
    """Each loads what the one before has saved. Only rank 0 reads the pointer."""
    recipe, before = variant(tmp_path, RECIPE, {
        "def read_pointer(root):\n":
            "def read_pointer(root):\n    assert dist.get_rank() == 0\n"}), []  # fmt: skip
    for ranks, step in ((2, "10"), (3, "20"), (2, "30")):
        result = fork_ranks(recipe, "--folder", "saves", cwd=tmp_path, world_size=ranks)
        assert result.status == 0, result.output
        *loaded, (last, digest), by_one = numbers(r"step (\d+), .*: +sha256 (\w{12})", result)
        assert loaded == before and last == step and by_one == (step, digest)
        assert loaded_from(tmp_path / "saves", tmp_path) == (int(step), digest)
        before = [(step, digest)]
    # After the second "_" the name is random, and may have more of them.
    kept = sorted(path.name.split("_")[1] for path in (tmp_path / "saves").glob("step_*"))
    assert kept == ["20", "30"]


# ---- Jobs that are killed ----

# A job that goes on from what there is, and saves every step. It says what it is about to save.
# Some moment after its first save has begun, a rank is killed.
JOB = """
import os, runpy, signal, sys, threading
import torch, torch.distributed as dist

recipe = runpy.run_path(sys.argv[1])
root, way, victim, seconds = sys.argv[2:]
dist.init_process_group("gloo")
model, optimizer = recipe["new_sharded"](torch.device("cpu"))
folder, step = recipe["newest"](root), 0
log, checksum = recipe["log"], recipe["checksum"]
if folder:
    step = recipe["load_folder"](model, optimizer, folder)
    log(f"loaded {step} {checksum(model, optimizer)}")
group = dist.new_group(backend="gloo")
finish = None
killed = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
while True:
    recipe["train"](model, optimizer, step, step + 1, dist.get_rank(), dist.get_world_size())
    step += 1
    digest = checksum(model, optimizer)
    if way == "save_shards_async" and finish:
        finish()
        log(f"saved {step - 1}")
    log(f"saving {step} {digest}")
    if dist.get_rank() == int(victim) and not killed.is_alive():
        killed.start()
    if way == "save_shards_async":
        finish = recipe[way](model, optimizer, step, root, group)
    else:
        recipe[way](model, optimizer, step, root)
        log(f"saved {step}")
"""


def loaded_from(root, scratch):
    """(step, sha256) of what the pointer names, or None: read by this process, without ranks.

    The recipe computes the sha256 by itself.
    """
    if not (root / "latest").exists():
        return None
    dcp_to_torch_save(root / (root / "latest").read_text(), scratch / "one_file.pt")
    state, digest = torch.load(scratch / "one_file.pt"), hashlib.sha256()
    for name, weight in sorted(state["model"].items()):
        of_adam = state["optimizer"]["state"][name]
        assert sorted(of_adam) == ["exp_avg", "exp_avg_sq", "step"]
        for tensor in (weight, of_adam["exp_avg"], of_adam["exp_avg_sq"], of_adam["step"]):
            digest.update(tensor.numpy().tobytes())
    return state["step"], digest.hexdigest()[:12]


def said(result, word):
    """{step: sha256 or ""}, of the lines with this word."""
    return {int(step): digest for step, digest in numbers(rf"{word} (\d+) ?(\w*)", result)}


@pytest.mark.long
@pytest.mark.parametrize("way", ["save_shards", "save_shards_async"])
def test_jobs_killed_at_random(tmp_path, way):
    """After each kill, the pointer names one whole step, and at most the last save is lost."""
    root, before, in_the_middle = tmp_path / "saves", None, 0
    (tmp_path / "job.py").write_text(JOB)
    for number in range(10):
        moments, ranks = random.Random(number), 2 + number % 2
        result = fork_ranks(tmp_path / "job.py", ROOT / RECIPE, root, way, moments.randrange(ranks),
                            moments.uniform(0, 0.5), cwd=tmp_path, world_size=ranks)  # fmt: skip
        loaded, saving, saved = (said(result, word) for word in ("loaded", "saving", "saved"))
        assert saving, result.output
        assert loaded == (dict([before]) if before else {}), number
        after = loaded_from(root, tmp_path)
        assert after in [before, *saving.items()], (number, after, before, saving)
        reached = max([*saved, before[0] if before else 0])
        assert (after[0] if after else 0) >= reached, "a save that had ended is lost"
        in_the_middle += any(not (path / ".metadata").exists() for path in root.glob("step_*"))
        before = after
    assert in_the_middle > 0, "no kill has hit a save"
