"""Recipes about batches, samplers, random numbers and clipping: their numbers, and that they fail.

test_recipes.py runs each as its docstring shows it.
"""

import re

import pytest
from support import fork_ranks, variant


def figures(result, pattern):
    """{name: figure} of rank 0's lines that match the pattern, which has these two groups."""
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return {m[1]: float(m[2]) for m in found if m}


def assert_fails(tmp_path, script, changes, message, world_size=2):
    """The script says so, in its own words, when it is changed like this."""
    result = fork_ranks(variant(tmp_path, script, changes), cwd=tmp_path, world_size=world_size)
    assert result.status == 1
    assert f"RuntimeError: {message}" in result.output


# ---- unequal_micro_batches ----

OFF_BY = r"(\S.*?) +gradient off by (\S+)"
UNEQUAL = "recipes/unequal_micro_batches.py"


@pytest.mark.parametrize("world_size", [2, 3])
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
