"""04: it shows what the pages show of it; a section fails when its operation is taken away."""

import copy
import gc
import os
import re
import runpy
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import shown
import torch
import torch.distributed as dist
from forked import fork, fork_ranks, fork_workers, report_errors
from started import ROOT
from torch.nn.parallel import DistributedDataParallel as DDP

SCRIPT = "04_collectives.py"


def tell_the_ends():
    """Called in a child: it prints where Gloo listens, and how the job ends; rank 0 is slow."""

    def told(function, what):
        def call(*args, **options):
            print(f"{what()}\n", end="", flush=True)
            return function(*args, **options)

        return call

    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # of whoever runs the tests
    dist.init_process_group = told(
        dist.init_process_group, lambda: f"listens on {os.environ.get('GLOO_SOCKET_IFNAME')}"
    )
    gc.collect = told(gc.collect, lambda: "frees DDP")
    dist.destroy_process_group = told(dist.destroy_process_group, lambda: "leaves")

    def all_reduce(*args, all_reduce=dist.all_reduce, async_op=False, **options):
        time.sleep(0.1 * (async_op and os.environ["RANK"] == "0"))  # the others compute meanwhile
        return all_reduce(*args, async_op=async_op, **options)

    dist.all_reduce = all_reduce


@pytest.mark.parametrize("world_size", [pytest.param(3, marks=pytest.mark.long), 4])
def test_every_section_shows_what_its_operation_does(tmp_path, world_size):
    result = fork_ranks(SCRIPT, cwd=tmp_path, world_size=world_size, before=tell_the_ends)
    assert result.status == 0 and "Warning" not in result.output, result.output
    for line in ("listens on lo", "frees DDP", "leaves"):
        assert result.output.splitlines().count(line) == world_size, line
    passed = f"18 sections passed their checks on {world_size} ranks, by gloo"
    assert result.lines(0)[-1] == passed
    to_come = re.findall(r"starts; gradients still to come: (\d+)$", result.output, re.MULTILINE)
    assert to_come == ["12", "8", "4", "0"]  # 16 parameters; two layers fill a bucket
    moments = re.findall(r"^\[.*\]\s+([\d.]+) ms  ", result.output, re.MULTILINE)
    assert len(moments) == 6 and moments == sorted(moments, key=float), result.output
    times = [
        (float(came), float(left))
        for came, left in re.findall(r"rank \d   (\S+) s +(\S+) s$", result.output, re.MULTILINE)
    ]
    assert len(times) == world_size and min(times)[0] == 0 and max(times)[0] < 60
    assert all(max(times)[0] <= left < 60 for _, left in times), "a barrier waits for the last"
    products = re.findall(r"rank \d   \[.*\] +(\d+)$", result.output, re.MULTILINE)
    assert len(products) == world_size and any(map(int, products)), "computed meanwhile"
    if world_size == 4:
        tensors = r"   rank \d .*(\]|\}|None)$|each of N ranks sent"  # rows without times
        assert not shown.missing("04_collectives.txt", result, exact=tensors)


def worker(rank, world_size, meeting_point, args):
    """Called in each forked process: one of the checks below, with the script's names."""
    names = runpy.run_path(str(ROOT / SCRIPT))["log"].__globals__
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world_size)
    globals()[args.check](names, rank, world_size)
    dist.barrier()


def half_an_all_reduce(tensor, *args, whole=dist.all_reduce, **options):
    work = whole(tensor, *args, **options)
    tensor.view(-1)[1:] = 0
    return work


# What takes the place of operations, and of functions of the script.
NOTHING = dict.fromkeys(
    [
        "broadcast",
        "scatter",
        "gather",
        "reduce",
        "all_gather",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "broadcast_object_list",
        "send",
        "recv",
        "barrier",
        "monitored_barrier",
        "batch_isend_irecv",
    ],
    lambda *args, **options: [],
)
NO_WORK = dict.fromkeys(["isend", "irecv"], lambda *_, **to: SimpleNamespace(wait=lambda: None))
HALF = {"all_reduce": half_an_all_reduce}
NOT_CLOSE = "Tensor-likes are not close!"
BROKEN = [  # (the replacement, the section, what its check says)
    *[
        (NOTHING, section, NOT_CLOSE)
        for section in (
            "broadcast",
            "scatter",
            "gather",
            "reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "send_recv",
            "batch_isend_irecv",
            "ring",
        )
    ],
    *[(HALF, section, NOT_CLOSE) for section in ("all_reduce", "async_op", "groups")],
    (NO_WORK, "isend_irecv", NOT_CLOSE),
    (NOTHING, "barrier", "this rank went on before the last one had come"),
    (NOTHING, "monitored_barrier", "monitored_barrier did not name rank 2: no error"),
    (NOTHING, "objects", "other objects arrived than were sent"),
    (HALF, "ddp", "the gradients by hand are not those of DDP"),
]


def a_section_fails_when_broken(names, rank, world_size):
    ring_all_reduce, by_hand = names["ring_all_reduce"], names["BucketedDDP"]
    send_more = {"ring_all_reduce": lambda *args: ring_all_reduce(*args) + 1}
    one_bucket = {"BucketedDDP": lambda model, bucket_bytes: by_hand(model, 2**40)}
    for broken, section, message in [
        *BROKEN,
        (send_more, "ring", "this rank sent 17 bytes, not 16"),
        (one_bucket, "ddp", "no all_reduce started before the last gradient had come"),
    ]:
        call, why = names["SECTIONS"][section], "passed"
        with patch.dict(vars(dist), broken), patch.dict(names, broken):
            try:
                call(rank, world_size)
            except (AssertionError, RuntimeError) as error:
                why = str(error).partition("\n")[0]
        assert set(names["gathered"](why)) - {"passed"} == {message}, (section, why)


def functions_to_copy(names, rank, world_size):
    """The ring on tensors of any size and shape; the hand-made DDP over several steps."""
    for shape in ((1,), (2,), (world_size + 1,), (7, 3), (1000, 11)):
        torch.manual_seed(rank)
        mine = torch.randn(shape)
        expected = mine.clone()
        dist.all_reduce(expected)
        names["ring_all_reduce"](mine)
        torch.testing.assert_close(mine, expected)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    theirs, ours = DDP(copy.deepcopy(model)), names["BucketedDDP"](model, bucket_bytes=100)
    assert len(ours.buckets) == 2
    optimizer = torch.optim.SGD([*theirs.parameters(), *ours.parameters()], lr=0.1, momentum=0.9)
    for _ in range(5):
        batch = torch.randn(4, 5)
        optimizer.zero_grad()
        for replica in (theirs, ours):
            replica(batch).square().sum().backward()
        ours.wait()
        optimizer.step()
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-5, (a - b).abs().max()
    ours(batch)
    ours.module[2](torch.ones(4, 7)).sum().backward()  # no gradient for the first layer
    with pytest.raises(RuntimeError, match="not every parameter"):
        ours.wait()


@pytest.mark.parametrize("check", [a_section_fails_when_broken, functions_to_copy])
def test_the_functions(tmp_path, check):
    fork_workers(__file__, tmp_path, 3, check=check.__name__).ok()


def fail_on_rank_1():
    """Called in a child: rank 1 alone fails, in the last line of a section."""

    def fail(*_):
        raise RuntimeError("not what was sent")

    report_errors()
    if os.environ["RANK"] == "1":
        torch.testing.assert_close = fail


def test_an_error_ends_the_job(tmp_path):
    """Rank 0 waits for the others' last checks, and reports no success."""
    result = fork_ranks(SCRIPT, "--only", "all_to_all", cwd=tmp_path, before=fail_on_rank_1)
    assert "not what was sent" in (tmp_path / "report1.json").read_text(), "for torchrun"
    assert result.status in (1, -6), "rank 0 may abort, as it loses its peer"
    assert "== all_to_all" in result.output and "passed" not in result.output, result.output


@pytest.mark.parametrize(
    ("launch", "words", "message"),
    [
        (fork, [], "start it with: torchrun --standalone --nproc-per-node=4 04_collectives.py\n"),
        (partial(fork_ranks, world_size=1), [], "start it with: torchrun --standalone "),
        (fork_ranks, ["--only", "nonsense"], "argument --only: invalid choice: 'nonsense'"),
    ],
)
def test_wrong_calls(tmp_path, launch, words, message):
    result = launch(SCRIPT, *words, cwd=tmp_path)
    assert result.status == 2 and f"error: {message}" in result.output, result.output
