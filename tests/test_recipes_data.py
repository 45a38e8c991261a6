"""Recipes about batches, samplers, random numbers and clipping: their numbers, and that they fail.

test_recipes.py runs each as its docstring shows it.
"""

import itertools
import re
import runpy

import pytest
from support import ROOT, assert_fails, fork_ranks, numbers
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

RANKS = [2, pytest.param(3, marks=pytest.mark.long)]


def figures(result, pattern):
    """{name: figure} of rank 0's lines that match the pattern, which has these two groups."""
    return {name: float(figure) for name, figure in numbers(pattern, result)}


# ---- unequal_micro_batches ----

OFF_BY = r"(\S.*?) +gradient off by (\S+)"
UNEQUAL = "recipes/unequal_micro_batches.py"


@pytest.mark.parametrize("world_size", RANKS)
def test_unequal_micro_batches(tmp_path, world_size):
    off = figures(fork_ranks(UNEQUAL, cwd=tmp_path, world_size=world_size), OFF_BY)
    assert off["sum over all tokens"] < 1e-6
    assert off["mean of means"] > 0.3 and off["sum over own tokens"] > 0.05
    assert off["factor forgotten"] == pytest.approx(1 - 1 / world_size, abs=0.005)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("dist.all_reduce(tokens)  # of all ranks", "# of all ranks", "the sum over all tokens does"),
    ("loss * dist.get_world_size() / tokens).backward()  # DDP", "loss / tokens).backward()  # DDP",
     "the sum over all tokens does"),
    # Rows of one length: then the mistakes are none.
    ("longest = 2 + int((LONGEST - 2) * (number / count) ** 2)", "longest = LONGEST",
     "the mistakes do not show what this file says"),
])  # fmt: skip
def test_unequal_micro_batches_can_fail(tmp_path, old, new, message):
    assert_fails(tmp_path, UNEQUAL, {old: new}, message)


# ---- resume_mid_epoch ----

RESUME = "recipes/resume_mid_epoch.py"


@pytest.mark.parametrize("world_size", RANKS)
def test_resume_mid_epoch(tmp_path, world_size):
    lines = fork_ranks(RESUME, cwd=tmp_path, world_size=world_size).lines(0)
    pattern = r"(\d+) to (\d+) ranks, (.+): +(\d+) items twice, +(\d+) never"
    found = [re.fullmatch(pattern, line) for line in lines]
    found = {(int(m[1]), int(m[2]), m[3]): (int(m[4]), int(m[5])) for m in found if m}
    w = world_size
    assert found == {
        (2 * w, w, "skip on each rank"): (10 * w, 0), (2 * w, w, "go on by the step"): (0, 0),
        (w, 2 * w, "skip on each rank"): (0, 20 * w), (w, 2 * w, "go on by the step"): (0, 0),
    }  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), [
    ("manual_seed(self.seed + self.epoch)", "manual_seed(self.seed + self.rank)", "going on by"),
    ("order[step * self.global_batch :]", "order[step * self.global_batch // 2 :]", "going on by"),
    ("global_batch // old, old, new", "global_batch // new, new, new", "skipping on each rank"),
])  # fmt: skip
def test_resume_mid_epoch_can_fail(tmp_path, old, new, message):
    assert_fails(tmp_path, RESUME, {old: new}, message)


def test_global_batches():
    """Any number of ranks, any step, any size: the same items in each step, the rest left out."""
    sampler = runpy.run_path(str(ROOT / RESUME))["GlobalBatches"]

    def steps(world_size, epoch, first_step):
        ranks = [sampler(103, 10, rank, world_size) for rank in range(world_size)]
        for batches in ranks:
            batches.start_at(epoch, first_step)
        loaders = [DataLoader(range(103), batch_sampler=batches) for batches in ranks]
        assert {len(loader) for loader in loaders} == {10 - first_step}
        return [sorted(itertools.chain(*(share.tolist() for share in shares)))
                for shares in zip(*loaders, strict=True)]  # fmt: skip

    whole = steps(1, 3, 0)
    assert len(set(itertools.chain(*whole))) == 100 and whole != steps(1, 4, 0)
    for world_size, first_step in itertools.product((1, 2, 3, 4, 7), (0, 1, 9, 10)):
        assert steps(world_size, 3, first_step) == whole[first_step:]
    # Where the ranks divide the items, those are the batches of DistributedSampler.
    ours, theirs = sampler(96, 8, 1, 2), DistributedSampler(range(96), 2, 1)
    ours.start_at(3)
    theirs.set_epoch(3)
    assert list(itertools.chain(*ours)) == list(theirs)


# ---- randomness ----

RANDOM = "recipes/randomness.py"


@pytest.mark.parametrize("world_size", RANKS)
def test_randomness(tmp_path, world_size):
    result = fork_ranks(RANDOM, cwd=tmp_path, world_size=world_size)
    w, masks = world_size, r"dropout, (.+?) +(\d+)% equal, .*"
    equal = figures(result, masks)
    assert equal.pop("SEED + step") == 100 and len(equal) == 2
    assert all(40 <= percent <= 60 for percent in equal.values())
    assert figures(result, rf"dropout, (.+?) +\d+% .* (\d+) different masks of {6 * w}") == {
        "SEED + step * world_size + rank": 6 * w, "SEED + step + rank": 5 + w, "SEED + step": 6,
    }  # fmt: skip
    assert figures(result, rf"workers, (.+?) +(\d+) different numbers of {24 * w}") == {
        "SEED + epoch * world_size + rank": 24 * w, "SEED + epoch + rank": 8 * (2 + w),
        "SEED + epoch": 24}  # fmt: skip
    off = figures(result, r"resumed with (.+?) +weights off by (\S+)")
    assert off.pop("seeds by step") == off.pop("each rank's RNG state") == 0
    assert set(off) == {"no RNG state", "rank 0's RNG state"} and min(off.values()) > 0.01


@pytest.mark.parametrize(("old", "new", "message"), [
    ("(SEED + step * world_size + rank)  # step", "(SEED + step * 2 + rank % 2 * 2)  #",
     "the dropout masks do not repeat as this file says"),
    ("epoch: SEED + epoch * world_size + rank),", "epoch: SEED + epoch + rank),",
     "the workers' numbers do not repeat as this file says"),
    ("set_rng_states(states, device)\n    for", "pass\n    for",
     "a resumed run does not repeat the whole one"),
    ("        if by_step:\n            seed_step(step, rank, world_size)\n", "",
     "a resumed run does not repeat the whole one"),
    ("nn.Dropout(0.5)", "nn.Dropout(0)", "lost RNG states do not show what this file says"),
])  # fmt: skip
def test_randomness_can_fail(tmp_path, old, new, message):
    assert_fails(tmp_path, RANDOM, {old: new}, message)


# ---- clip_and_scale ----

CLIP = "recipes/clip_and_scale.py"


@pytest.mark.parametrize("world_size", RANKS)
def test_clip_and_scale(tmp_path, world_size):
    result = fork_ranks(CLIP, cwd=tmp_path, world_size=world_size)
    norms = figures(result, r"(\S.*?) +norm (\S+), step of \S+")
    norms |= figures(result, r"(\S.*?) +norm (\S+), step of .*, off by .*")
    steps = figures(result, r"(\S.*?) +norm .*, step of ([^ ,]+).*")
    off = figures(result, r"(\S.*?) +norm .*, off by (\S+)")
    one, right, each, early = norms
    assert norms[right] == pytest.approx(norms[one], rel=1e-3) and norms[one] > 0.1
    assert norms[early] == pytest.approx(65536 * norms[one], rel=1e-3)
    assert steps[one] == steps[right] == steps[each] == 0.05
    assert steps[early] == pytest.approx(0.05 / 65536, rel=0.05)
    assert off[right] < 1e-3 and off[each] > 0.3 and off[early] == 1
    assert (f"inf on rank {world_size - 1} alone: every rank skips the step, and goes on with 32768"
            " for 65536") in result.lines(0)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), [
    ("scaler.unscale_(optimizer)  # once", "# once", "one process has the norm"),
    ("MAX_NORM)  # the same", "2 * MAX_NORM)  # the same", "clipping after the exchange does not"),
    # Too high a limit: nothing is clipped, so nothing goes wrong.
    ("MAX_NORM = 0.05", "MAX_NORM = 1e9", "the mistakes do not show what this file says"),
    ("(1e6 if", "(1 if", "scale, and whether the weights have moved"),
    ("    if norm.isfinite():\n        optimizer", "    if True:\n        optimizer",
     "nan weights without and with the check"),
])  # fmt: skip
def test_clip_and_scale_can_fail(tmp_path, old, new, message):
    assert_fails(tmp_path, CLIP, {old: new}, message)
