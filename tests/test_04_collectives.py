"""04: it shows what the pages show of it; a section fails when its operation is taken away."""

import os
import re
import textwrap
from functools import partial

import pytest
import shown
import torch.distributed as dist
from support import ROOT, clocks_differ, fork, fork_ranks, pretend_one_gpu, variant

SCRIPT = "04_collectives.py"


@pytest.mark.parametrize("world_size", [3, 4])
def test_every_section_shows_what_its_operation_does(tmp_path, world_size):
    result = fork_ranks(SCRIPT, cwd=tmp_path, world_size=world_size)
    assert result.status == 0, result.output
    assert result.lines(0)[-1] == f"18 of 18 sections passed their checks on {world_size} ranks"
    to_come = re.findall(r"starts; gradients still to come: (\d+)$", result.output, re.MULTILINE)
    assert to_come == ["12", "8", "4", "0"]  # 16 parameters; two layers fill a bucket
    moments = re.findall(r"^\[.*\]\s+([\d.]+) ms  ", result.output, re.MULTILINE)
    assert len(moments) == 6 and moments == sorted(moments, key=float), result.output
    if world_size == 4:
        tensors = r"   rank \d .*[]-]$|sent by"  # the rows that end with one hold no times
        assert not shown.missing("04_collectives.txt", result, exact=tensors)


# Takes the place of show_sections: goes through sections with other operations than torch's, and
# tells what each section's own check says of that.
BREAK = """
def nothing(*args, **options):
    return []

def half_an_all_reduce(tensor, *args, whole=dist.all_reduce, **options):
    work = whole(tensor, *args, **options)
    tensor.view(-1)[1:] = 0
    return work

def send_more(tensor, steps=None, enough=ring_all_reduce):
    return enough(tensor, steps) + 4

def show_sections(names, device):
    whole, broken = dict(vars(dist)), {"nothing": dict.fromkeys(NOTHING, nothing),
                                       "half": {"all_reduce": half_an_all_reduce}, "more": {}}
    for case in CASES:
        what, name = case.split()
        vars(dist).update(whole | broken[what])
        globals()["ring_all_reduce"] = send_more if what == "more" else send_more.__defaults__[1]
        why = "passed"
        try:
            SECTIONS[name](dist.get_rank(), dist.get_world_size(), device)
        except (AssertionError, RuntimeError) as error:
            why = str(error).partition("\\n")[0]
        log(f"{case}: {sorted(set(gathered(why)) - {'passed'})}")


SECTIONS = {"""
NOTHING = [
    "broadcast", "scatter", "gather", "reduce", "all_gather", "all_gather_into_tensor",
    "reduce_scatter_tensor", "all_to_all_single", "broadcast_object_list", "send", "recv",
    "barrier", "monitored_barrier", "batch_isend_irecv"]
# {what the operation does, and the section: what the section's check says}
EMPTIED = [
    "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_to_all",
    "send_recv", "batch_isend_irecv", "ring"]
HALVED = ["half all_reduce", "half async_op", "half groups", "half ring"]
CASES = dict.fromkeys([*(f"nothing {section}" for section in EMPTIED), *HALVED],
                      "Tensor-likes are not close!")
CASES |= {
    "nothing barrier": "a rank went on before the last one had come",
    "nothing monitored_barrier": "monitored_barrier did not name rank 2: no error",
    "nothing objects": "other objects arrived than were sent",
    "more ring": "sent 16388 bytes, not 2 (N - 1) / N of 12288",
    "half ddp": "the gradients by hand are not those of DistributedDataParallel",
}


def test_a_section_fails_without_its_operation(tmp_path):
    changed = f"\nNOTHING, CASES = {NOTHING}, {list(CASES)}\n{BREAK}"
    script = variant(tmp_path, SCRIPT, {"\nSECTIONS = {": changed})
    result = fork_ranks(script, cwd=tmp_path, world_size=3)
    for case, message in CASES.items():
        assert f"{case}: ['{message}']" in result.lines(0), result.output


def report_errors():
    """Called in a child: what torchrun would read of its error is to be in a file of its own."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.abspath(f"report {os.environ['RANK']}.json")


def tell_interface():
    """Called in a child: it prints where Gloo is to listen, if not on the machine's own address."""
    def join_and_tell(*args, **options):
        print(f"listens on {os.environ.get('GLOO_SOCKET_IFNAME')}\n", end="", flush=True)
        return join(*args, **options)

    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # of whoever runs the tests
    join, dist.init_process_group = dist.init_process_group, join_and_tell


def test_an_error_ends_the_job(tmp_path):
    """Rank 1 alone fails, in its last line: rank 0 waits for that, and reports no success."""
    check = "    assert_close(received, rows[:, rank])\n"
    script = variant(tmp_path, SCRIPT, {
        check: f"{check}    if rank == 1:\n        raise RuntimeError('no such call')\n"})
    only = ("--only", "broadcast", "all_to_all")
    result = fork_ranks(script, *only, cwd=tmp_path, before=(report_errors, tell_interface))
    assert result.output.count("listens on lo") == 2, "one machine"
    assert "no such call" in (tmp_path / "report 1.json").read_text(), "for torchrun"
    assert result.status in (1, -6), "rank 0 may abort, as it loses its peer"
    assert "RuntimeError: no such call" in result.output
    assert "== all_to_all" in result.output and "passed" not in result.output, result.output


def test_two_clocks_are_not_compared(tmp_path):
    result = fork_ranks(SCRIPT, "--only", "barrier", cwd=tmp_path, nodes=2,
                        before=(clocks_differ, tell_interface))
    assert result.output.count("listens on None") == 2, "two machines"
    assert result.status == 0 and "comes at" not in result.output, result.output
    waits = re.findall(r"  rank \d   (\S+) s$", result.output, re.MULTILINE)
    assert len(waits) == 2 and all(0 <= float(wait) < 500 for wait in waits), result.output


def test_functions_to_copy(tmp_path):
    """The ring on tensors of any size and shape; the hand-made DDP over several steps."""
    script = tmp_path / "copied.py"
    script.write_text(textwrap.dedent(f"""
        import copy, gc, runpy, torch
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
        assert len(ours.buckets) == 2
        both = [*theirs.parameters(), *ours.parameters()]
        optimizer = torch.optim.SGD(both, lr=0.1, momentum=0.9)
        for step in range(5):
            batch = torch.randn(4, 5)
            optimizer.zero_grad()
            for replica in (theirs, ours):
                replica(batch).square().sum().backward()
            ours.wait()
            optimizer.step()
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-5, (a - b).abs().max()
        names["show_overlap"](ours, batch, torch.zeros(4, 3))
        own = torch.cat([p.grad.flatten() for p in ours.parameters()])
        of_rank_0 = own.clone()
        dist.broadcast(of_rank_0, src=0)
        assert torch.equal(own, of_rank_0), "a mean of all ranks when it returns"
        ours(batch)
        ours.module[2](torch.ones(4, 7)).sum().backward()  # no gradient for the first layer
        try:
            ours.wait()
            raise SystemExit("wait() did not notice the missing gradients")
        except RuntimeError as error:
            assert "not every parameter" in str(error)
        factors = [3 * names["bus_factor"](name) for name in names["BENCHMARKS"]]
        assert world_size == 3 and [round(factor, 6) for factor in factors] == [4, 2, 2, 3, 4]
        del theirs, replica
        gc.collect()  # DDP would hold the group, and torch 2.11 stands still at the end
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
        assert algbw == pytest.approx(64 * 2**20 / milliseconds / 1e6, rel=0.01, abs=0.001)
        assert busbw == pytest.approx(algbw * float(factor), rel=0.01, abs=0.002)


ALONE = partial(fork_ranks, world_size=1)


@pytest.mark.parametrize(("launch", "call", "message"), [
    (fork, "", "torchrun --standalone --nproc-per-node=4 04_collectives.py"),
    (ALONE, "", "nobody to talk to.* --nproc-per-node=4"),
    (ALONE, "--only nonsense", "invalid choice: 'nonsense'"),
    (ALONE, "--bench --only ddp ring", "--bench has no ddp"),
    (partial(fork_ranks, before=pretend_one_gpu), "", "2 processes want a GPU each and there are"),
])
def test_bad_calls_end_in_one_line(tmp_path, launch, call, message):
    result = launch(SCRIPT, *call.split(), cwd=tmp_path)
    assert result.status == 2 and re.search(message, result.error()), result.output
