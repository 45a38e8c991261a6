"""04: its tables are those worked out by hand; a section fails when its operation is taken away."""

import re
import textwrap

import pytest
import torch.distributed as dist
from support import ROOT, clocks_differ, fork, fork_ranks, pretend_one_gpu

SCRIPT = "04_collectives.py"

# What three ranks show. Rank r begins with [10 r + 1, 10 r + 2, ...]. Other lines may stand around.
SHOWN = """
== broadcast
           before    after
  rank 0   [1 2]     [1 2]
  rank 1   [11 12]   [1 2]
  rank 2   [21 22]   [1 2]
== scatter
           list on rank 0          after
  rank 0   [1 2] [11 12] [21 22]   [1 2]
  rank 1   -                       [11 12]
  rank 2   -                       [21 22]
== gather
           before    after
  rank 0   [1 2]     [1 2] [11 12] [21 22]
  rank 1   [11 12]   -
  rank 2   [21 22]   -
== reduce
           before    after
  rank 0   [1 2]     [33 36]
  rank 1   [11 12]   [32 34]
  rank 2   [21 22]   [21 22]
== all_reduce
           before    SUM       AVG       MIN     MAX       PRODUCT
  rank 0   [1 2]     [33 36]   [11 12]   [1 2]   [21 22]   [231 528]
  rank 1   [11 12]   [33 36]   [11 12]   [1 2]   [21 22]   [231 528]
  rank 2   [21 22]   [33 36]   [11 12]   [1 2]   [21 22]   [231 528]
== all_gather
           before    all_gather              all_gather_into_tensor
  rank 0   [1 2]     [1 2] [11 12] [21 22]   [1 2 11 12 21 22]
== reduce_scatter
           before       its chunk   all_gather
  rank 0   [1 2 3]      [33]        [33 36 39]
  rank 1   [11 12 13]   [36]        [33 36 39]
== all_to_all
           before       after
  rank 0   [1 2 3]      [1 11 21]
  rank 1   [11 12 13]   [2 12 22]
== barrier
           comes at   goes on at
== monitored_barrier
  rank 0 after a second: Rank 2 failed to pass monitoredBarrier in 1000 ms
== send_recv
           before    after
  rank 0   [1 2]     [1 2]
  rank 1   [11 12]   [1 2]
  rank 2   [21 22]   [21 22]
== isend_irecv
           before    received
  rank 0   [1 2]     [11 12]
  rank 1   [11 12]   [1 2]
== batch_isend_irecv
           before    received
  rank 0   [1 2]     [21 22]
  rank 1   [11 12]   [1 2]
== async_op
           before    read too early   after wait()   matrix products meanwhile
== groups
           group    group rank   before    all_reduce   broadcast from group rank 0
  rank 0   [0, 2]   0            [1 2]     [22 24]      [1 2]
  rank 1   [1]      0            [11 12]   [11 12]      [11 12]
  rank 2   [0, 2]   1            [21 22]   [22 24]      [1 2]
== objects
           before           broadcast_object_list   all_gather_object
  rank 0   [{'lr': 0.03}]   [{'lr': 0.03}]          ['of 0', 'of 1', 'of 2']
  rank 1   [None]           [{'lr': 0.03}]          ['of 0', 'of 1', 'of 2']
== ring
           start        step 1       step 2       step 3       step 4
  rank 0   [1 2 3]      [1 2 26]     [1 36 26]    [33 36 26]   [33 36 39]
  rank 1   [11 12 13]   [12 12 13]   [12 12 39]   [12 36 39]   [33 36 39]
  rank 2   [21 22 23]   [21 34 23]   [33 34 23]   [33 34 39]   [33 36 39]
  sent by each rank: 16384 bytes, 1.33333 times the tensor; 2 (N - 1) / N is 1.33333
== ddp
  a second backward pass, as the CPU of rank 0 sees it:
""".strip().splitlines()


def test_every_section_shows_what_its_operation_does(tmp_path):
    result = fork_ranks(SCRIPT, cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output
    lines = result.lines(0)
    assert [line for line in lines if line in SHOWN] == SHOWN
    assert lines[-1] == "18 of 18 sections passed their checks on 3 ranks"
    to_come = re.findall(r"starts; gradients still to come: (\d+)$", result.output, re.MULTILINE)
    assert to_come == ["12", "8", "4", "0"]  # 16 parameters; two layers fill a bucket
    assert sum(line.startswith("pid ") for line in result.lines()) == 3


# Takes the place of show_sections: goes through sections with other operations than torch's, and
# tells what each section's own check says of that.
BREAK = """
def nothing(*args, **options):
    return []

def half_an_all_reduce(tensor, *args, whole=dist.all_reduce, **options):
    work = whole(tensor, *args, **options)
    tensor.view(-1)[1:] = 0
    return work

def show_sections(names, device):
    vars(dist).update({BROKEN})
    for name in names:
        why = "passed"
        try:
            SECTIONS[name](dist.get_rank(), dist.get_world_size(), device)
        except (AssertionError, RuntimeError) as error:
            why = str(error).partition("\\n")[0]
        log(f"{name}: {sorted(set(gathered(why)) - {'passed'})}")


SECTIONS = {"""
NOTHING = [
    "broadcast", "scatter", "gather", "reduce", "all_gather", "all_gather_into_tensor",
    "reduce_scatter_tensor", "all_to_all_single", "broadcast_object_list", "send", "recv",
    "barrier", "monitored_barrier", "batch_isend_irecv",
]  # fmt: skip
WRONG = "Tensor-likes are not close!"
TAKEN_AWAY = dict.fromkeys([
    "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_to_all",
    "send_recv", "batch_isend_irecv", "ring"], WRONG)  # fmt: skip
TAKEN_AWAY |= {
    "barrier": "a rank went on before the last one had come",
    "monitored_barrier": "monitored_barrier did not name rank 2: no error",
    "objects": "other objects arrived than were sent",
}
HALVED = dict.fromkeys(["all_reduce", "async_op", "groups", "ring"], WRONG)
HALVED |= {"ddp": "the gradients by hand are not those of DistributedDataParallel"}


@pytest.mark.parametrize(("broken", "expected"), [
    (", ".join(f"'{name}': nothing" for name in NOTHING), TAKEN_AWAY),
    ("'all_reduce': half_an_all_reduce", HALVED),
], ids=["operations do nothing", "all_reduce does half"])  # fmt: skip
def test_a_section_fails_without_its_operation(tmp_path, broken, expected):
    text, end = (ROOT / SCRIPT).read_text(), "\nSECTIONS = {"
    assert text.count(end) == 1
    script = tmp_path / SCRIPT
    script.write_text(text.replace(end, BREAK.replace("BROKEN", broken)))
    result = fork_ranks(script, "--only", *expected, cwd=tmp_path, world_size=3)
    for section, message in expected.items():
        assert f"{section}: ['{message}']" in result.lines(0), result.output


def all_to_all_fails():
    """Called in the ranks: as an operation that a backend has not."""
    def fail(*args, **options):
        raise RuntimeError("CUDA error: operation not supported")

    dist.all_to_all_single = fail


def test_an_error_ends_the_job(tmp_path):
    only = ("--only", "broadcast", "all_to_all", "scatter")
    result = fork_ranks(SCRIPT, *only, cwd=tmp_path, before=all_to_all_fails)
    assert result.status == 1 and "RuntimeError: CUDA error: operation not s" in result.output
    assert "== scatter" not in result.output and "passed" not in result.output, result.output


def test_two_clocks_are_not_compared(tmp_path):
    result = fork_ranks(SCRIPT, "--only", "barrier", cwd=tmp_path, nodes=2, before=clocks_differ)
    assert result.status == 0 and "comes at" not in result.output, result.output
    waits = re.findall(r"  rank \d   (\S+) s$", result.output, re.MULTILINE)
    assert len(waits) == 2 and all(0 <= float(wait) < 500 for wait in waits), result.output


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
        dist.destroy_process_group()
    """))
    result = fork_ranks(script, cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output


@pytest.mark.long
def test_benchmark(tmp_path):
    result = fork_ranks(SCRIPT, "--bench", cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output
    factors = re.findall(r"== (\w+), factor (\S+)", result.output)
    assert factors == [("all_reduce", "1.33333"), ("all_gather", "0.666667"),
                       ("reduce_scatter", "0.666667"), ("broadcast", "1"), ("ring", "1.33333")]
    rows = [line.split() for line in result.lines(0) if "GB/s" in line]
    sizes = [f"{4**k} KiB" for k in range(1, 5)] + [f"{4**k} MiB" for k in range(4)]
    assert [" ".join(row[:2]) for row in rows] == sizes * 5
    for row, (_, factor) in zip(rows[7::8], factors, strict=True):
        milliseconds, algbw, busbw = (float(row[n]) for n in (2, 4, 6))
        assert algbw == pytest.approx(64 * 2**20 / milliseconds / 1e6, rel=0.01)
        assert busbw == pytest.approx(algbw * float(factor), rel=0.01)


@pytest.mark.parametrize(("arguments", "options", "message"), [
    ([], {"world_size": 1}, "nobody to talk to.* --nproc-per-node=4"),
    (["--only", "nonsense"], {"world_size": 1}, "invalid choice: 'nonsense'"),
    (["--bench", "--only", "ddp", "ring"], {"world_size": 1}, "--bench has no ddp"),
    ([], {"before": pretend_one_gpu}, "2 processes want a GPU each and there are 1"),
])  # fmt: skip
def test_bad_calls_end_in_one_line(tmp_path, arguments, options, message):
    result = fork_ranks(SCRIPT, *arguments, cwd=tmp_path, **options)
    assert result.status == 2 and re.search(message, result.error()), result.output


def test_started_without_torchrun(tmp_path):
    result = fork(SCRIPT, cwd=tmp_path)
    assert result.status == 2
    assert "torchrun --standalone --nproc-per-node=4 04_collectives.py" in result.error()
