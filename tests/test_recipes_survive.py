"""recipes/ about ranks that are missing: their figures, and that each can fail."""

import runpy

import pytest
from support import ROOT, assert_fails, fork_ranks, numbers

# ---- who_is_missing ----


@pytest.mark.long
def test_who_is_missing(tmp_path):
    """Both faults on three ranks: the ranks, the calls, and the lines, looked up in the file."""
    result = fork_ranks("recipes/who_is_missing.py", cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output
    found = numbers(r"  rank (\d) called (\w+) \[\[(\d)\]\] in (\w+) \(who_is_missing.py,"
                    r" line (\d+)\)", result)  # fmt: skip
    lines = (ROOT / "recipes/who_is_missing.py").read_text().splitlines()
    called = [lines[int(call[-1]) - 1].split("(")[0].strip() for call in found]
    assert [call[:-1] for call in found] == [
        ("0", "all_reduce", "7", "evaluate"), ("1", "broadcast", "9", "evaluate_on_rank_0"),
        ("2", "broadcast", "9", "evaluate_on_rank_0"),
        ("0", "all_reduce", "4", "average_gradients"),
        ("1", "all_reduce", "4", "average_gradients")]  # fmt: skip
    assert called == [f"dist.{kind}" for _, kind, _, _, _ in found]
    assert numbers(r"  rank (\d) made (\d) calls, and no call (\d)", result) == [("2", "3", "4")]


def record(*calls, first=1, group="default_pg"):
    """A record as torch writes it, with calls of (kind, size), numbered from first."""
    frames = [{"filename": "train.py", "name": "main", "line": 1}]
    return {"entries": [{"process_group": ("0", group), "is_p2p": False, "frames": frames,
                         "collective_seq_id": number, "profiling_name": f"gloo:{kind}",
                         "input_sizes": [[size]]} for number, (kind, size) in
                        enumerate(calls, first)]}  # fmt: skip


def test_first_difference():
    """What the recipe's own run does not show: lost records, older calls gone, other groups."""
    script = runpy.run_path(str(ROOT / "recipes/who_is_missing.py"))
    first_difference, describe = script["first_difference"], script["describe"]
    reduce, other, bigger = ("all_reduce", 4), ("broadcast", 4), ("all_reduce", 5)

    assert first_difference([record(reduce, other), record(reduce, other)]) == (None, {})
    number, calls = first_difference([record(reduce), record(bigger)])
    assert number == 1 and [call[1] for call in calls.values()] == ["[[4]]", "[[5]]"]
    number, calls = first_difference([record(reduce, reduce), record(), None])
    assert number == 1 and list(calls.values())[1:] == [0, None]
    assert describe(number, calls)[1:] == [
        "rank 0 called all_reduce [[4]] in main (train.py, line 1)",
        "rank 1 made 0 calls, and no call 1",
        "rank 2 wrote no record: it is dead, or busy outside torch"]  # fmt: skip
    # Of rank 0's record the first two calls are gone. Rank 1 stopped after call 3.
    number, calls = first_difference([record(*4 * [reduce], first=3), record(*3 * [reduce])])
    assert number == 4 and calls[1] == 3
    number, calls = first_difference([record(("scatter", 1)), record(("scatter", 2))])
    assert number is None
    with pytest.raises(RuntimeError, match="no calls of the group 'mine' in the records"):
        first_difference([record(reduce)] * 2, group="mine")


@pytest.mark.parametrize(("message", "old", "new"), [
    ("the call that rank 0 made alone is not found", "if dist.get_rank() == 0:\n        eval",
     "if True:\n        eval"),
    pytest.param("the call that rank 0 made alone is not found",
                 'not frame["filename"].startswith(TORCH)', "frame", marks=pytest.mark.long),
    pytest.param("no calls of the group 'evaluate_on_rank_0' in the records",
                 "def main():\n", 'def main():\n    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"\n',
                 marks=pytest.mark.long),
    pytest.param("the rank that is missing is not found", "            return\n", "",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_who_is_missing_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/who_is_missing.py", {old: new}, message)
