"""pitfalls/ that hang or fail: each shows its symptom, and with --fixed the cure."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from support import fork, fork_ranks

TIMEOUT = "Timed out waiting 3000ms for {} operation to complete"


def show(name, cwd, *arguments, status=0, **options):
    """Run a pitfall on two ranks; return what it printed."""
    result = fork_ranks(f"pitfalls/{name}.py", *arguments, cwd=cwd, **options)
    assert result.status == status, result.output
    return result


def both(name, cwd, run=show):
    """Run a pitfall without and with --fixed, at the same time: mostly they wait."""
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run, name, cwd, *arguments) for arguments in ([], ["--fixed"])]
        return [run.result() for run in runs]


def show_without_launcher(name, cwd, *arguments):
    """Run a pitfall that starts its processes itself; return the lines it printed."""
    result = fork(f"pitfalls/{name}.py", *arguments, cwd=cwd)
    assert result.status == 0, result.output
    return result.output.split("\n")


def debug_info():
    """Called in a child: TORCH_DISTRIBUTED_DEBUG=INFO, in front of the command."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    dist.set_debug_level_from_env()  # torch, loaded already, has read it


def debug_detail():
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()


def test_a_collective_on_one_rank(tmp_path):
    broken = show("collective_on_one_rank", tmp_path)
    assert "step 1: losses add up to 101, gradients to 200" in broken.lines(0)
    assert "step 1: losses add up to 1, gradients to 101" in broken.lines(1)
    timeout = "symptom: all_reduce failed: Timed out waiting 3000ms for recv operation to complete"
    assert broken.lines(0)[-1] == timeout
    fixed = show("collective_on_one_rank", tmp_path, "--fixed")
    right = [f"step {step}: losses add up to 2, gradients to 200" for step in (1, 2)]
    assert fixed.lines(0) == fixed.lines(1) == right


def test_mismatched_shapes(tmp_path):
    broken, fixed = both("mismatched_shapes", tmp_path)
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


def test_uneven_inputs(tmp_path):
    broken, fixed = both("uneven_inputs", tmp_path)
    assert broken.lines(0) == [f"symptom: step 4 failed: {TIMEOUT.format('recv')}"]
    assert broken.lines(1) == ["trained on 3 batches"]
    cured = "cured: 5 + 3 batches trained on, replicas identical"
    assert fixed.lines(0) == ["trained on 5 batches", cured]
    assert fixed.lines(1) == ["trained on 3 batches"]


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


def test_wrapper_on_rank_0(tmp_path):
    alone = [f"{name}: rank 0 has evaluated alone" for name in ("Linear", "BatchNorm1d")]
    broken, fixed = both("wrapper_on_rank_0", tmp_path)
    assert broken.lines(0)[:-1] == alone[:1]
    # torch says one or the other: the pair of sockets is closed when the first operation times out.
    reason = rf"({TIMEOUT.format('send')}|Application timeout caused pair closure)"
    assert re.fullmatch(rf"symptom: BatchNorm1d: model\(x\) failed: {reason}", broken.lines(0)[-1])
    assert fixed.lines(0)[:-1] == alone and fixed.lines(0)[-1].startswith("cured: rank 0 has")


def test_slow_rank(tmp_path):
    broken, fixed = both("slow_rank", tmp_path)
    back = "back from a pause of 5 s"
    assert broken.lines(0) == [f"symptom: all_reduce failed: {TIMEOUT.format('recv')}"]
    assert broken.lines(1)[0] == back
    assert re.match(r"symptom: all_reduce failed: Connection", broken.lines(1)[1])
    assert fixed.lines(1) == [back]
    assert fixed.lines(0) == ["cured: all_reduce over 2 ranks, 5 s after the start"]


@pytest.mark.long  # starts torch in new processes
def test_rank_never_arrives(tmp_path):
    broken, fixed = both("rank_never_arrives", tmp_path, run=show_without_launcher)
    for rank in (0, 1):
        assert f"[rank {rank}/3] wait timeout after 5000ms, keys: /0//cpu//0/2" in broken
    symptom = "symptom: 2 of 3 processes started, 2 gave up; missing ranks: [2]"
    assert symptom in broken
    assert fixed[0] == "cured: 3 of 3 processes started, 0 gave up; missing ranks: []"


@pytest.mark.long  # starts torch in new processes
def test_fixed_port(tmp_path):
    broken, fixed = both("fixed_port", tmp_path, run=show_without_launcher)
    error = r"second job, rank 0: The server socket .* EADDRINUSE, message: address already in use"
    assert any(re.fullmatch(error, line) for line in broken), broken
    mixed = ["first job, rank 0", "second job, rank 1"]
    assert f"second job, rank 1: my group is {mixed}" in broken
    assert f"symptom: the first job's group is {mixed}" in broken
    together = ["second job, rank 0", "second job, rank 1"]
    for rank in (0, 1):
        assert f"second job, rank {rank}: my group is {together}" in fixed
    cured = r"cured: second job on port (\d+), first job on port (\d+)"
    [(second, first)] = re.findall(cured, "\n".join(fixed))
    assert first != second
