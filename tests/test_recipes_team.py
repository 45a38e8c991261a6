"""recipes/ that concern what all ranks do together: their figures, and that each can fail."""

import multiprocessing
import re

import pytest
from support import fork_ranks, variant


def numbers(pattern, result):
    """The groups of each line of rank 0 that matches as a whole."""
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return [match.groups() for match in found if match]


def start_workers_plainly():
    """Called in a child: its DataLoader starts workers as in a process that no server has forked.

    Else it would start a server of its own first, which imports torch anew.
    """
    multiprocessing.set_start_method(None, force=True)


def fails_with(message, tmp_path, name, old, new):
    """The recipe with old replaced by new ends with its own error."""
    script = variant(tmp_path, f"recipes/{name}.py", {old: new})
    result = fork_ranks(script, cwd=tmp_path, before=start_workers_plainly)
    assert result.status == 1, result.output
    assert f"RuntimeError: {message}" in result.output, result.output


# ---- agree ----


def test_agree(tmp_path):
    result = fork_ranks("recipes/agree.py", cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output
    assert numbers(r"alone: .* rank (\d) left after epoch (\d); the others failed in epoch (\d)",
                   result) == [("0", "3", "4")]
    agreed = numbers(r"agreed: (.*?) +wanted by rank (\d); all left after epoch (\d)", result)
    assert agreed == [("early stopping", "0", "3"), ("stop file", "0", "2"),
                      ("time limit", "2", "4"), ("loss is nan", "2", "1")]


@pytest.mark.parametrize(("message", "old", "new"), [
    ("not all left together: early stopping, epochs [3, 3], errors ['', 'Timed out",
     "    dist.all_reduce(flag, op=dist.ReduceOp.MAX)\n    return flag.item() > 0  # waits",
     "    return flag.item() > 0  # waits"),
    ("one rank left alone, but: epochs [6, 6], errors ['', '']",
     "        if wants_to_stop(epoch):\n            break\n", ""),
])  # fmt: skip
def test_agree_can_fail(tmp_path, message, old, new):
    fails_with(message, tmp_path, "agree", old, new)
