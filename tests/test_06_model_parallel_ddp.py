"""06: both ways train as the unsplit model does, and what is drawn is what happened."""

import gc
import re
import runpy
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import shown
import torch
import torch.distributed as dist
from forked import fork, fork_ranks, pretend_gpus, report_errors, variant
from mistakes.split_model import BROKEN
from started import ROOT, files

SCRIPT = "06_model_parallel_ddp.py"


def is_part(short, whole):
    """Whether the letters of short stand in whole in the same order."""
    rest = iter(whole)
    return all(letter in rest for letter in short)


def assert_drawn(result, *orders):
    """What each drawn stage did: the micro-batches, each once, forward 0 1 2, backward a b c."""
    drawn = [line for (line,) in result.numbers(r"stage . \|(.{70})\|")]
    short = [re.sub(r"(.)\1+", r"\1", line.replace(".", "")) for line in drawn]
    # On a loaded machine a short stretch can vanish between two columns, and most of a stage.
    assert all(map(is_part, short, orders)), drawn
    assert len(short) == len(orders) and len("".join(short)) >= 4 * len(orders), drawn


def watch():
    """Called in each process: what torchrun would report; a line when the group is closed."""
    report_errors()
    close, collect, done = dist.destroy_process_group, gc.collect, []
    gc.collect = lambda: done.append("closed") or collect()
    dist.destroy_process_group = lambda: print(f"{done.pop()}\n", end="", flush=close())


def test_both_ways_train_alike_and_show_what_the_pages_show(tmp_path):
    """The script itself compares both with the unsplit model, and the replicas with each other."""
    half = (
        "make_data = lambda old=make_data: [one[:512] for one in old()]\n"  # and tell of each
        "make_optimizer = lambda *args, old=make_optimizer: print('made') or old(*args)"
    )
    result = fork_ranks(variant(tmp_path, SCRIPT, half), cwd=tmp_path, world_size=4, before=watch)
    assert result.status == 0 and "Warning" not in result.output, result.output
    assert result.output.count("made") == 13, "4 ranks train in 3 ways, and one of them once more"
    assert result.output.count("closed") == 4 and files(tmp_path) == [SCRIPT]
    assert not shown.missing("06_model_parallel_ddp.txt", result, exact="<->|MiB")
    losses = [float(loss) for (loss,) in result.numbers(r"epoch \d/3 \| loss ([\d.]+)")]
    assert losses[:3] * 2 == pytest.approx(losses[3:], abs=2e-3) and losses[0] > 2 * losses[2]
    off = result.numbers(r".* weights off by (\S+) of their largest change")
    assert len(off) == 3 and all(1e-8 < float(figure) < 1e-5 for (figure,) in off), off  # rounding
    # GPipe: all forwards, then all backwards. 1F1B: as soon as one is through, in turns.
    assert_drawn(result, "0123abcd", "0123abcd", "01a2b3cd", "0a1b2c3d")
    assert result.numbers(r".* alone 20%; .* of (\d) micro-batches") == [("4",), ("2",)]


def test_the_shortest_step_is_drawn():
    def steps(stage, *starts):
        return [
            [
                (stage, mark, speed * start, speed * (start + 1))
                for mark, start in zip("01ab", starts, strict=True)
            ]
            for speed in (4, 2, 3)
        ]

    draw, lines = runpy.run_path(str(ROOT / SCRIPT))["draw"], []
    draw.__globals__.update(
        log=lines.append,
        gathered=lambda own: [own, steps(1, 11, 12, 13, 14), "those of another replica"],
    )
    draw("GPipe", [*chain(*steps(0, 10, 11, 14, 15))], microbatches=2, columns=12)
    says = "idle 33%, the bubble alone 33%; stage 0 kept the activations of 2 micro-batches"
    assert lines == ["stage 0 |0011....aabb|", "stage 1 |..0011aabb..|", f"GPipe: {says}"]


def test_the_proof_is_relative_and_the_order_depends_on_nothing_else(monkeypatch):
    names, lines = runpy.run_path(str(ROOT / SCRIPT)), []
    monkeypatch.setattr(dist, "get_rank", int)
    before, after, own = torch.tensor([[1, 1], [3, 1], [3, 1 + 2**-20]])  # 2**-20 of a change of 2
    names["log"].__globals__.update(
        log=lines.append,
        gathered=lambda one: [one],
        vector=lambda _: own,
        train_unsplit=lambda _: (before, after),
    )
    names["compare_with_unsplit"](None, 1, SimpleNamespace(epochs=1))
    assert lines == ["against the unsplit model: weights off by 4.8e-07 of their largest change"]
    orders = [
        torch.cat([labels for _, labels in names["batches"](names["make_data"](), epoch)])
        for epoch in (1, 1, 2)
        if torch.rand(()) < 1
    ]  # a number is drawn before each
    assert torch.equal(*orders[:2]) and not torch.equal(*orders[1:])


@pytest.mark.long
def test_other_micro_batches_and_numbers_of_ranks(tmp_path):
    alone = ("1", "--mode", "devices", "--microbatches", "1")
    result = fork_ranks(SCRIPT, *alone, cwd=tmp_path, world_size=1)
    assert result.status == 0 and "weights off by" in result.lines(0)[-1], result.output
    result = fork_ranks(SCRIPT, "1", "--mode", "pipeline", "--microbatches", "8", cwd=tmp_path)
    assert result.status == 0 and "alone 11%" in result.output, result.output
    assert_drawn(result, *["01234567abcdefgh"] * 2, "01a2b3c4d5e6f7gh", "0a1b2c3d4e5f6g7h")


@pytest.mark.parametrize(("mode", "old", "new", "message"), BROKEN.values(), ids=BROKEN)
def test_the_proofs_can_fail(tmp_path, mode, old, new, message):
    script = variant(tmp_path, SCRIPT, {old: new})
    result = fork_ranks(script, "1", "--mode", mode, cwd=tmp_path, before=watch)
    reports = [path.read_text() for path in tmp_path.glob("report*")]
    assert result.status == 1 and any(message in text for text in reports), result.output


ALONE, PAIR = partial(fork_ranks, world_size=1), fork_ranks


@pytest.mark.parametrize(
    ("launch", "call", "status", "message"),
    [
        (fork, "", 2, "start it with: torchrun .*-node=4"),
        (partial(fork_ranks, world_size=3), "", 2, "3 processes make no grid of 2 stages"),
        (PAIR, "--microbatches 3", 2, "a multiple of processes x micro-batches"),
        (ALONE, "0 --mode devices", 2, "must be 1 or more"),
        (PAIR, "--microbatches 1", 2, "2 stages need 2 micro-batches"),
        (
            partial(ALONE, before=partial(pretend_gpus, 0)),
            "--mode devices",
            1,
            "process needs a GPU",
        ),
        (partial(PAIR, before=partial(pretend_gpus, 2)), "", 1, "on GPUs, choose --mode devices"),
    ],
)
def test_bad_calls_end_in_one_line(tmp_path, launch, call, status, message):
    result = launch(SCRIPT, *call.split(), cwd=tmp_path)
    assert result.status == status and re.search(message, result.output), result.output
    assert "Traceback" not in result.output
