"""recipes/dry_run_1024_ranks.py: its figures, worked out by hand, and that it can fail."""

import re

import pytest
import torch.multiprocessing as mp
from support import fork, numbers, variant

SCRIPT = "recipes/dry_run_1024_ranks.py"
JOB = 'RANKS, JOB = 1024, {"width": 4096, "blocks": 8, "rows": 4096, "tensor_parallel": 8}'
SMALL = 'RANKS, JOB = 16, {"width": 64, "blocks": 2, "rows": 4, "tensor_parallel": 8}'
WAYS = ["DDP", "FSDP2", "root only", "FSDP2 x TP"]


def fork_the_ranks():
    """Called in a child: the real ranks are copies of it, and have torch loaded."""
    start = mp.start_processes

    def fork_instead(*args, start_method, **kwargs):
        assert start_method == "forkserver"
        return start(*args, start_method="fork", **kwargs)

    mp.start_processes = fork_instead


def launch(folder, changes=None):
    script = variant(folder, SCRIPT, changes) if changes else SCRIPT
    return fork(script, cwd=folder, before=fork_the_ranks, timeout=240)


def foretold(result):
    """{way: (weights, grads, Adam in MB, {kind: (calls, MB)}, at once in MB)}"""
    mb, cell = r" +(\d+\.\d)", r" +(\d+): +(\d+\.\d)"
    found = numbers(rf"(\S.+?){mb * 3}{cell * 3}{mb}", result)
    return {way: [float(figure) for figure in figures] for way, *figures in found}


def expected(width, blocks, rows, ranks, tensor_parallel):
    """What foretold() returns, by arithmetic. A weight has 4 bytes."""
    model, block, activation = (4 * n / 1e6 for n in (
        8 * width**2 * blocks, 8 * width**2, rows * width * tensor_parallel))  # fmt: skip
    shard, none = model / ranks, [0, 0]
    part = model / tensor_parallel
    return {
        "DDP": [model, model, 2 * model, 1, model, *none, *none, 0],
        "FSDP2": [shard, shard, 2 * shard, *none, 2 * blocks, 2 * model, blocks, model, block],
        "root only": [shard, shard, 2 * shard, *none, 1, model, 1, model, model],
        # In each block an all-reduce forward and one backward; the inputs need no gradient.
        "FSDP2 x TP": [shard, shard, 2 * shard, 2 * blocks - 1, (2 * blocks - 1) * activation,
                       2 * blocks, 2 * part, blocks, part, block / tensor_parallel],
    }  # fmt: skip


def compared(result):
    """{way: [bytes kept, in the dry run, calls, bytes, in the dry run]}, of rank 0 of the real."""
    found = numbers(r"(\S.+?) +(\d+) +(\d+) +(\d+): +(\d+) +(\d+): +(\d+)", result)
    return {way: [int(figure) for figure in figures] for way, *figures in found}


@pytest.mark.long
def test_dry_run_1024_ranks(tmp_path):
    result = launch(tmp_path)
    assert result.status == 0, result.output
    by_hand = expected(4096, 8, 4096, 1024, 8)
    assert foretold(result) == {way: pytest.approx(row, abs=0.06) for way, row in by_hand.items()}
    found = compared(result)
    assert list(found) == WAYS
    for kept, dry_kept, calls, size, dry_calls, dry_size in found.values():
        assert (kept, calls, size) == (dry_kept, dry_calls, dry_size)
    weights = 4 * 8 * 66**2 * 2
    # Adam's count of the steps is one number of 4 bytes for each of the 4 weights.
    assert found["DDP"] == [4 * weights + 16] * 2 + [1, weights] * 2
    [last] = numbers(r"MB kept: (\S+) with DDP; (\S+) with FSDP2, .* block of (\S+)", result)
    assert last == ("17179.9", "16.8", "536.9")


def test_a_small_dry_run(tmp_path):
    """Also with other numbers of ranks, and with the calls counted by torch's own counter."""
    result = launch(tmp_path, {
        JOB: 'RANKS, JOB = 16, {"width": 1024, "blocks": 2, "rows": 512, "tensor_parallel": 4}',
        "REAL_RANKS, REAL_JOB = 4,": "REAL_RANKS, REAL_JOB = 2,",
        "with CountCollectives() as step:":
            "from torch.distributed.tensor.debug import CommDebugMode\n"
            "            with CommDebugMode() as public, CountCollectives() as step:",
        "traffic.append(step)": "traffic.append(step)\n"
            "            log(f'{public.get_total_counts()} = {step.calls.total()} calls')",
    })  # fmt: skip
    assert result.status == 0, result.output
    by_hand = expected(1024, 2, 512, 16, 4)
    assert foretold(result) == {way: pytest.approx(row, abs=0.06) for way, row in by_hand.items()}
    calls = numbers(r"(\d+) = (\d+) calls", result)
    assert len(calls) == 4 * (3 + 1 + 1) and all(one == other for one, other in calls), calls


@pytest.mark.parametrize(("message", "old", "new"), [
    (r"all_reduce is not counted: add it to KINDS", ', "all_reduce": "all-reduce"', ""),
    pytest.param(r"DDP: rank \d has .*; its dry run says",
                 "    dist.all_reduce(bucket.buffer())\n", "", marks=pytest.mark.long),
    pytest.param(r"FSDP2 x TP: rank \d has .*; its dry run says",
                 "[dry] = train_and_count(way, **REAL_JOB)\n",
                 '[dry] = train_and_count(way, **(REAL_JOB | {"rows": 9}))\n',
                 marks=pytest.mark.long),
    pytest.param(r"FSDP2 does not keep 1/16 of the model, and gather one block",
                 "    for block in model:\n        fully_shard(block, mesh=mesh)\n", "",
                 marks=pytest.mark.long),
    pytest.param(r"the mistake does not show", '"root only": with_fsdp2_root_only',
                 '"root only": with_fsdp2',
                 marks=pytest.mark.long),
    pytest.param(r"FSDP2 x TP: .* in step 1, but .* in step 3", "torch.randn(rows, width)",
                 "torch.randn(rows + len(traffic), width)", marks=pytest.mark.long),
])  # fmt: skip
def test_dry_run_1024_ranks_can_fail(tmp_path, message, old, new):
    result = launch(tmp_path, {JOB: SMALL, old: new})
    assert result.status == 1, result.output
    assert re.search(f"RuntimeError: {message}", result.output), result.output


def test_it_is_not_for_torchrun(tmp_path):
    result = fork(SCRIPT, cwd=tmp_path, env={"RANK": "0"})
    assert result.status == 2 and "start it with: python" in result.error()
