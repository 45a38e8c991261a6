"""04: every table against numbers worked out here; every check of the script fails when it should.

The tables are computed a second time, in plain Python, from the rule that rank r begins with
[10 r + 1, 10 r + 2, ...]. The script's own checks are tested by taking the operations away.
"""

import re
import textwrap
from itertools import chain, combinations
from math import prod

import pytest
import torch.distributed as dist
from support import ROOT, clocks_differ, fork, fork_ranks, pretend_one_gpu

SCRIPT = "04_collectives.py"
SECTIONS = [
    "broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all", "barrier", "monitored_barrier", "send_recv", "isend_irecv", "batch_isend_irecv",
    "async_op", "groups", "objects", "ring", "ddp",
]  # fmt: skip


def sections(result):
    """{name: the lines that rank 0 printed under its heading}."""
    found, name = {}, None
    for line in result.lines(0):
        if line.startswith("== "):
            name = line[3:]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def column(lines, heading):
    """The cells under a heading, from rank 0's row to the last, in the first table that has it."""
    for n, line in enumerate(lines):
        if re.search(rf"^ {{5,}}.*(?<= ){re.escape(heading)}(   |$)", line):
            starts = [m.start() for m in re.finditer(r"(?<=   )\S", line)] + [None]
            first = re.search(rf"(?<=   ){re.escape(heading)}(   |$)", line).start()
            end = starts[starts.index(first) + 1]
            rows = []
            for row in lines[n + 1 :]:
                if not row.startswith("  rank "):
                    break
                rows.append(row[first:end].strip())
            return rows
    raise AssertionError(f"no column {heading!r} in {lines}")


def numbers(text):
    return [float(number) for number in re.findall(r"-?[\d.]+(?:e[+-]\d+)?", text)]


def first(rank, length=2):
    return [10.0 * rank + n for n in range(1, length + 1)]


def total(ranks, length=2):
    return [sum(column) for column in zip(*(first(r, length) for r in ranks), strict=True)]


@pytest.fixture(scope="module", params=[2, 3, 4])
def shown(request, tmp_path_factory):
    """(world size, result, lines of each section) of one run of everything."""
    result = fork_ranks(SCRIPT, cwd=tmp_path_factory.mktemp("04"), world_size=request.param)
    assert result.status == 0, result.output
    return request.param, result, sections(result)


def test_all_sections_run_and_fit_the_terminal(shown):
    world_size, result, found = shown
    assert list(found) == SECTIONS
    assert result.lines(0)[-1] == f"18 of 18 sections passed their checks on {world_size} ranks"
    wide = [line for line in result.output.splitlines() if len(line) > 100 and "[E" not in line]
    assert not [line for line in wide if line.startswith("[rank ")]


def test_collectives(shown):
    size, _, found = shown
    ranks, before = range(size), [first(r) for r in range(size)]

    def cells(section, heading):
        return [numbers(cell) for cell in column(found[section], heading)]

    for section in ("broadcast", "gather", "reduce", "all_reduce", "all_gather", "send_recv"):
        assert cells(section, "before") == before
    everything = [number for rank in ranks for number in first(rank)]
    assert cells("broadcast", "after") == [first(0)] * size
    assert cells("scatter", "list on rank 0") == [everything] + [[]] * (size - 1)
    assert cells("scatter", "after") == before
    assert cells("gather", "after") == [everything] + [[]] * (size - 1)
    ops = {"SUM": sum, "AVG": lambda v: sum(v) / size, "MIN": min, "MAX": max, "PRODUCT": prod}
    for op, function in ops.items():
        expected = [function(values) for values in zip(*before, strict=True)]
        assert cells("all_reduce", op) == [expected] * size
    assert cells("all_gather", "all_gather") == [everything] * size
    assert cells("all_gather", "all_gather_into_tensor") == [everything] * size
    chunked = total(ranks, size)
    assert cells("reduce_scatter", "before") == [first(r, size) for r in ranks]
    assert cells("reduce_scatter", "its chunk") == [[value] for value in chunked]
    assert cells("reduce_scatter", "all_gather") == [chunked] * size
    assert cells("all_to_all", "after") == [[10.0 * r + rank + 1 for r in ranks] for rank in ranks]


def test_reduce_leaves_partial_sums_on_the_other_ranks(shown):
    size, _, found = shown
    after = [numbers(cell) for cell in column(found["reduce"], "after")]
    assert after[0] == total(range(size))
    # Gloo: the sums travel from the last rank towards rank 0.
    assert after[1:] == [total(range(rank, size)) for rank in range(1, size)]


def test_barriers(shown):
    size, _, found = shown
    came = [numbers(cell)[0] for cell in column(found["barrier"], "comes at")]
    left = [numbers(cell)[0] for cell in column(found["barrier"], "goes on at")]
    assert min(left) >= max(came) > min(came)
    line = f"Rank {size - 1} failed to pass monitoredBarrier in 1000 ms"
    assert found["monitored_barrier"][-1].endswith(line)


def test_point_to_point(shown):
    size, _, found = shown
    after = [numbers(cell) for cell in column(found["send_recv"], "after")]
    assert after == [first(0), first(0), *(first(r) for r in range(2, size))]
    swapped = [numbers(cell) for cell in column(found["isend_irecv"], "received")]
    assert swapped == [first(1), first(0), *[[0.0, 0.0]] * (size - 2)]
    shifted = [numbers(cell) for cell in column(found["batch_isend_irecv"], "received")]
    assert shifted == [first((rank - 1) % size) for rank in range(size)]


def test_async_groups_and_objects(shown):
    size, _, found = shown
    ranks = range(size)
    after = [numbers(cell) for cell in column(found["async_op"], "after wait()")]
    assert after == [total(range(size))] * size
    # Old numbers, new ones or any on the way: the sum over this rank's and some of the others'.
    sums_of_some = [{sum(some) for some in chain(*(combinations(values, n + 1) for n in ranks))}
                    for values in zip(*map(first, ranks), strict=True)]  # fmt: skip
    early = [numbers(cell) for cell in column(found["async_op"], "read too early")]
    assert len(early) == size and all(len(cell) == 2 for cell in early)
    assert all(cell[n] in sums_of_some[n] for cell in early for n in (0, 1)), early
    groups = [list(range(rank % 2, size, 2)) for rank in range(size)]
    assert [numbers(cell) for cell in column(found["groups"], "group")] == groups
    assert column(found["groups"], "group rank") == [str(rank // 2) for rank in range(size)]
    sums = [numbers(cell) for cell in column(found["groups"], "all_reduce")]
    assert sums == [total(group) for group in groups]
    leaders = [numbers(cell) for cell in column(found["groups"], "broadcast from group rank 0")]
    assert leaders == [first(rank % 2) for rank in range(size)]
    assert column(found["objects"], "before") == ["[{'lr': 0.03}]"] + ["[None]"] * (size - 1)
    assert column(found["objects"], "broadcast_object_list") == ["[{'lr': 0.03}]"] * size
    everyone = str([f"of {rank}" for rank in range(size)])
    assert column(found["objects"], "all_gather_object") == [everyone] * size


def test_ring_step_by_step(shown):
    size, _, found = shown
    state = [first(rank, size) for rank in range(size)]
    steps = 2 * (size - 1)
    for step in range(steps + 1):
        if step:
            sent = [(rank, (rank - step + 1) % size) for rank in range(size)]
            values = [state[rank][chunk] for rank, chunk in sent]
            for (rank, chunk), value in zip(sent, values, strict=True):
                old = state[(rank + 1) % size][chunk] if step < size else 0.0
                state[(rank + 1) % size][chunk] = old + value
        cells = column(found["ring"], f"step {step}" if step else "start")
        assert [numbers(cell) for cell in cells] == state, f"step {step}"
    assert state == [total(range(size), size)] * size
    [bytes_line] = [line for line in found["ring"] if "bytes" in line]
    sent, times, bound = numbers(bytes_line.replace("2 (N - 1) / N", ""))
    assert sent == 4 * 1024 * size * 2 * (size - 1) / size
    assert times == bound == pytest.approx(2 * (size - 1) / size, rel=1e-4)


def test_ddp_by_hand(shown):
    _, _, found = shown
    own, by_hand = (float(re.search(r"off by (\S+)", line)[1])
                    for line in found["ddp"] if "off by" in line)
    assert by_hand < 1e-6 and own > 0.1
    starts = [line for line in found["ddp"] if re.search("ms  bucket", line)]
    to_come = [int(line.rpartition(" ")[2]) for line in starts]
    assert to_come == [12, 8, 4, 0]  # 16 parameters, two layers of weight and bias a bucket
    moments = [numbers(line)[0] for line in found["ddp"] if re.match(r" +[\d.]+ ms ", line)]
    assert len(moments) == 6 and moments == sorted(moments)


# Called in the ranks before the script: operations that fail, do nothing, or do half of it.


def broken_all_to_all():
    def broken(*args, **options):
        raise RuntimeError("CUDA error: operation not supported")

    dist.all_to_all_single = broken


def half_an_all_reduce():
    whole = dist.all_reduce

    def half(tensor, *args, **options):
        work = whole(tensor, *args, **options)
        tensor.view(-1)[1:] = 0
        return work

    dist.all_reduce = half


def take_operations_away():
    for name in (
        "broadcast", "scatter", "gather", "reduce", "all_gather", "all_gather_into_tensor",
        "reduce_scatter_tensor", "all_to_all_single", "broadcast_object_list", "send", "recv",
        "barrier", "monitored_barrier",
    ):  # fmt: skip
        setattr(dist, name, lambda *args, **options: None)
    dist.batch_isend_irecv = lambda operations: []


# What a section's own check says of it: any other crash would end with status 1, too.
OTHER_NUMBERS = "AssertionError: Tensor-likes are not close!"
SAID = {
    "barrier": "RuntimeError: a rank went on before the last one had come",
    "monitored_barrier": "RuntimeError: monitored_barrier did not name rank 1: no error",
    "objects": "RuntimeError: other objects arrived than were sent",
    "ddp": "RuntimeError: the gradients by hand are not those of DistributedDataParallel",
}


@pytest.mark.parametrize("section", [
    "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_to_all",
    "barrier", "monitored_barrier", "send_recv", "batch_isend_irecv", "objects", "ring"])
def test_a_section_fails_without_its_operation(tmp_path, section):
    result = fork_ranks(SCRIPT, "--only", section, cwd=tmp_path, before=take_operations_away)
    assert result.status == 1 and "passed" not in result.output, result.output
    assert f"\n{SAID.get(section, OTHER_NUMBERS)}" in result.output, result.output


@pytest.mark.parametrize("section", ["all_reduce", "async_op", "groups", "ring", "ddp"])
def test_a_section_fails_with_a_wrong_all_reduce(tmp_path, section):
    result = fork_ranks(
        SCRIPT, "--only", section, cwd=tmp_path, world_size=4, before=half_an_all_reduce)
    assert result.status == 1 and "passed" not in result.output, result.output
    assert f"\n{SAID.get(section, OTHER_NUMBERS)}" in result.output, result.output


def test_an_error_ends_the_job(tmp_path):
    only = ("--only", "broadcast", "all_to_all", "scatter")
    result = fork_ranks(SCRIPT, *only, cwd=tmp_path, before=broken_all_to_all)
    assert result.status == 1 and "RuntimeError: CUDA error: operation not s" in result.output
    assert "== scatter" not in result.output and "passed" not in result.output, result.output


def test_two_clocks_are_not_compared(tmp_path):
    result = fork_ranks(
        SCRIPT, "--only", "barrier", cwd=tmp_path, world_size=4, nodes=2, before=clocks_differ)
    assert result.status == 0 and "comes at" not in result.output, result.output
    waits = column(sections(result)["barrier"], "waits")
    assert len(waits) == 4 and all(0 <= numbers(wait)[0] < 500 for wait in waits), waits


def test_functions_to_copy(tmp_path):
    """The ring on tensors of any size and shape; the hand-made DDP over several steps."""
    script = tmp_path / "copied.py"
    script.write_text(textwrap.dedent(f"""
        import copy, runpy, torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        names = runpy.run_path({str(ROOT / SCRIPT)!r})
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for shape in ((1,), (2,), (world_size + 1,), (7, 3), (1000, 11)):
            mine = torch.full(shape, rank + 1.0)
            names["ring_all_reduce"](mine)
            assert torch.equal(mine, torch.full(shape, world_size * (world_size + 1) / 2)), shape
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        theirs, ours = DDP(copy.deepcopy(model)), names["BucketedDDP"](model, bucket_bytes=100)
        assert len(ours.buckets) == 2 and sum(map(len, ours.buckets)) == 4
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (theirs, ours)]
        for step in range(5):
            batch = torch.randn(4, 5)
            for replica, optimizer in zip((theirs, ours), optimizers):
                optimizer.zero_grad()
                replica(batch).square().sum().backward()
                if replica is ours:
                    ours.wait()
                optimizer.step()
        ours(batch)
        ours.module[2](torch.ones(4, 7)).sum().backward()  # no gradient for the first layer
        try:
            ours.wait()
            raise SystemExit("wait() did not notice the missing gradients")
        except RuntimeError as error:
            assert "not every parameter" in str(error)
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-5, (a - b).abs().max()
        print(f"[rank {{rank}}/{{world_size}}] fine\\n", end="", flush=True)
        dist.destroy_process_group()
    """))
    result = fork_ranks(script, cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output
    assert result.lines() == ["fine"] * 3


@pytest.mark.long
def test_benchmark(tmp_path):
    result = fork_ranks(SCRIPT, "--bench", "--only", "broadcast", "ring", cwd=tmp_path)
    assert result.status == 0, result.output
    found = sections(result)
    assert list(found) == ["broadcast, factor 1", "ring, factor 1"]
    for lines in found.values():
        sizes = [" ".join(line.split()[:2]) for line in lines[1:]]
        kib, mib = [f"{4**k} KiB" for k in range(1, 5)], [f"{4**k} MiB" for k in range(4)]
        assert sizes == kib + mib
        time, algbw, busbw = re.findall(r"([\d.]+) (?:ms|GB/s)", lines[-1])
        assert float(algbw) == pytest.approx(64 * 2**20 / float(time) / 1e6, rel=0.01)
        assert busbw == algbw
    result = fork_ranks(SCRIPT, "--bench", "--only", "all_reduce", cwd=tmp_path, world_size=3)
    assert "== all_reduce, factor 1.33333" in result.lines(0), result.output


def test_bad_calls(tmp_path):
    def error(*arguments, **options):
        result = fork_ranks(SCRIPT, *arguments, cwd=tmp_path, **options)
        assert result.status == 2, result.output
        return result.error()

    one = error(world_size=1)
    assert "nobody to talk to" in one and "--nproc-per-node=4" in one
    assert "invalid choice: 'nonsense'" in error("--only", "nonsense", world_size=1)
    assert "--bench has no ddp" in error("--bench", "--only", "ddp", "ring", world_size=1)
    assert "2 processes want a GPU each and there are 1" in error(before=pretend_one_gpu)
    result = fork(SCRIPT, cwd=tmp_path)
    assert result.status == 2
    assert "torchrun --standalone --nproc-per-node=4 04_collectives.py" in result.error()
