"""pitfalls/ that hang or fail: each shows its symptom, and with --fixed the cure."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from pitfall_runs import both, show, show_alone

TIMEOUT = "Timed out waiting 3000ms for {} operation to complete"


def debug_info():
    """Called in a child: TORCH_DISTRIBUTED_DEBUG=INFO, in front of the command."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    dist.set_debug_level_from_env()  # torch, loaded already, has read it


def debug_detail():
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """{name: future of (broken, fixed)} of those that wait some seconds: three at a time."""
    ways = dict.fromkeys(["collective_on_one_rank", "mismatched_shapes", "uneven_inputs",
                          "wrapper_on_rank_0", "slow_rank"], show)  # fmt: skip
    ways["rank_never_arrives"] = show_alone
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(both, name, tmp_path_factory.mktemp(name), run=way)
               for name, way in ways.items()}  # fmt: skip


def test_a_collective_on_one_rank(waiting):
    broken, fixed = waiting["collective_on_one_rank"].result()
    assert "step 1: losses add up to 101, gradients to 200" in broken.lines(0)
    assert "step 1: losses add up to 1, gradients to 101" in broken.lines(1)
    assert broken.lines(0)[-1] == f"symptom: all_reduce failed: {TIMEOUT.format('recv')}"
    right = [f"step {step}: losses add up to 2, gradients to 200" for step in (1, 2)]
    assert fixed.lines(1) == right
    assert fixed.lines(0) == [*right, "cured: both ranks have the right sums in both steps"]


def test_mismatched_shapes(waiting):
    broken, fixed = waiting["mismatched_shapes"].result()
    own = ["own labels: [1, 2, 1, 3]", "own labels: [2, 3, 2]"]
    assert broken.lines(0) == [own[0], f"symptom: all_reduce failed: {TIMEOUT.format('recv')}"]
    assert broken.lines(1) == [own[1], "no error: together [3, 3, 3], 9 of 14 labels"]
    cured = "cured: together [3, 5, 3, 3], 14 of 14 labels"
    assert fixed.lines(0) == [own[0], cured]
    assert fixed.lines(1) == ["own labels: [2, 3, 2, 0]", cured]


def test_mismatched_shapes_are_found_by_torch(tmp_path):
    """The docstring says what TORCH_DISTRIBUTED_DEBUG=DETAIL reports."""
    found = show("mismatched_shapes", tmp_path, before=debug_detail).lines(0)[-1]
    assert "symptom: all_reduce failed: Detected mismatch between collectives on ranks" in found
    assert "TensorShape=[4]" in found and "TensorShape=[3]" in found


def test_uneven_inputs(waiting):
    broken, fixed = waiting["uneven_inputs"].result()
    steps = [f"step {step} done" for step in range(1, 6)]
    symptom = f"symptom: backward() failed: {TIMEOUT.format('recv')}"
    assert broken.lines(0) == [*steps[:3], symptom]
    cured = "cured: both ranks have trained on all their batches; replicas identical"
    assert fixed.lines(0) == [*steps, cured]
    assert broken.lines(1) == fixed.lines(1) == steps[:3]


def test_unused_parameters(tmp_path):
    error = "symptom: step 2: Expected to have finished reduction in the prior iteration"
    broken, fixed = both("unused_parameters", tmp_path)
    assert broken.lines(0) == ["step 1: gradient 1.0", f"{error} (parameters 2 3)"]
    assert broken.lines(1) == ["step 1: gradient 2.0"]
    named = show("unused_parameters", tmp_path, before=debug_info)
    assert named.lines(0)[-1] == f"{error} (parameters idle.bias, idle.weight)"
    assert fixed.lines(1) == ["step 1: gradient 1.5", "step 2: gradient 1.5"]
    assert fixed.lines(0) == [
        *fixed.lines(1), "cured: the gradients 1 and 2 averaged to 1.5 in both steps"
    ]  # fmt: skip


def test_wrapper_on_rank_0(waiting):
    alone = [f"{name}: rank 0 has evaluated alone" for name in ("Linear", "BatchNorm1d")]
    broken, fixed = waiting["wrapper_on_rank_0"].result()
    assert broken.lines(0)[:-1] == alone[:1]
    # torch says one or the other: the pair of sockets is closed when the first operation times out.
    reason = rf"({TIMEOUT.format('send')}|Application timeout caused pair closure)"
    assert re.fullmatch(rf"symptom: BatchNorm1d: model\(x\) failed: {reason}", broken.lines(0)[-1])
    assert fixed.lines(0)[:-1] == alone and fixed.lines(0)[-1].startswith("cured: rank 0 has")


def test_slow_rank(waiting):
    broken, fixed = waiting["slow_rank"].result()
    back = "back from a pause of 5 s"
    assert broken.lines(0) == [f"symptom: all_reduce failed: {TIMEOUT.format('recv')}"]
    assert broken.lines(1)[0] == back
    assert re.match(r"symptom: all_reduce failed: Connection", broken.lines(1)[1])
    assert fixed.lines(1) == [back]
    # Rank 0 has waited without an error, for longer than the timeout that ended it above.
    cured = "cured: all_reduce over 2 ranks, after a pause that is longer than the timeout"
    assert fixed.lines(0) == [cured]


def test_rank_never_arrives(waiting):
    broken, fixed = waiting["rank_never_arrives"].result()
    for rank in (0, 1):
        error = f"[rank {rank}/3] wait timeout after 5000ms, keys: "
        assert [line.startswith(error) for line in broken].count(True) == 1, broken
    assert broken[-1] == "symptom: 2 of 3 processes started, 2 gave up; missing ranks: [2]"
    assert fixed == ["cured: 3 of 3 processes started, 0 gave up; missing ranks: []"]


def test_fixed_port(tmp_path):
    broken, fixed = both("fixed_port", tmp_path, run=show_alone)
    error = r"second job, rank 0: The server socket .* EADDRINUSE, message: address already in use"
    assert [bool(re.fullmatch(error, line)) for line in broken].count(True) == 1, broken
    mixed = ["first job, rank 0", "second job, rank 1"]
    for member in mixed:
        assert f"{member}: my group is {mixed}" in broken
    assert broken[-1] == f"symptom: the first job's group is {mixed}"
    for job in ("first", "second"):
        members = [f"{job} job, rank {rank}" for rank in (0, 1)]
        for member in members:
            assert f"{member}: my group is {members}" in fixed
    [first, second] = re.findall(r"(?:first|second) job on port (\d+)", fixed[-1])
    assert fixed[-1].startswith("cured: ") and first != second
