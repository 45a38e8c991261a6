"""template/: killed anywhere, on one machine or several, it ends with an unbroken run's bits.

More of it: test_swap.py (another model and other data), test_faults.py (killed at other moments, a
second job), test_lab.py (machines that are apart), test_slurm.py, test_kill_test.py.
"""

import argparse
import copy
import functools
import importlib
import itertools
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import zipfile

import numpy
import pytest
import shown
import started
import torch
import torch.distributed as dist
from digits import digest, flipped_byte, load, pickle_in_an_archive, tensors
from forked import fork, fork_ranks, limit_file_size, own_disk, play_machine, report_errors, variant
from lab import Lab
from mistakes.counting import COUNT
from started import ACTIVE, PYTHON, ROOT, family, files, free_port, read_until, running, wait_until
from torch import nn
from torch.optim import optimizer
from torch.utils.data import BatchSampler

SCRIPT = "template/train.py"
# 13 windows: neither 2 nor 3 ranks nor 2 micro-batches divide them.
SMALL = ("--batch-size", 13)
NO_WORKERS = "import os\nWORKERS = 0\n"  # quicker
# So that each validation is worse than the last, and each step is reported.
WORSE = "LEARNING_RATE, REPORT_EVERY = 9.0, 1\n"
STILL = "LEARNING_RATE = 0.0\n"  # no validation is better than the first
KEPT = ["snapshot.csv", "snapshot.pt", "snapshot_best.pt"]


def train(folder, *arguments, changes="", status=0, **options):
    """Run a variant of the template, which goes beside folder; it must end with that status."""
    folder.mkdir(exist_ok=True)
    script = variant(folder.parent, SCRIPT, NO_WORKERS + changes)
    result = fork_ranks(script, "--snapshot-path", "snapshot.pt", *arguments, cwd=folder, **options)
    assert result.status == status, result.output
    return result


@pytest.fixture(scope="module")
def survive():
    """Not imported above: a rank that calls a function of this file would have it too early."""
    sys.path.insert(0, str(ROOT / "template"))
    return importlib.import_module("survive")


@pytest.fixture(scope="module")
def names(survive):
    """What train.py defines."""
    return runpy.run_path(str(ROOT / SCRIPT))


@pytest.fixture
def alone(tmp_path):
    """This process is the only rank of a group."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reports(result):
    """{step: (loss, learning rate, norm)} as rank 0 reported them, the last report of a step."""
    pattern = r"step +(\d+)/\d+ \| loss (\S+) \| rate (\S+) \| norm +(\S+) \| +\d+ examples/s"
    return {int(step): (*map(float, said),) for step, *said in result.numbers(pattern)}


def validations(result):
    """{step: (training loss, validation loss)}, the last ones of a step."""
    pattern = r"step +(\d+)/\d+ \| training loss (\S+) \| validation loss (\S+) \| best .*"
    return {int(step): (*map(float, said),) for step, *said in result.numbers(pattern)}


def resumed(result):
    """The steps after which it went on."""
    return [int(step) for step in re.findall(r"resumed .* after step (\d+),", result.output)]


def assert_same_state(folder, other):
    mine, its = load(folder), load(other)
    assert all(torch.equal(*pair) for pair in zip(tensors(mine), tensors(its), strict=True))
    plain = ("step", "due", "loss_sum", "best", "rows", "plan", "scheduler")
    assert all(mine[key] == its[key] for key in plain)
    return mine


# ---- Killed and resumed ----

# A worker in attempt 1 alone, for the SIGTERM. In attempt 2, rank 0 is killed while it validates.
KILLED = (
    WORSE
    + """
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]
WORKERS = int(ATTEMPT == "1")

def validate(*args, old=validate):
    if dist.get_rank() == 0 and ATTEMPT == "2":
        os.kill(os.getpid(), 9)
    return old(*args)
"""
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 7 steps on 3 ranks, and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(folder, 7, 3, *SMALL, changes=WORSE, world_size=3, before=clock_of_steps), folder


def clock_of_steps():
    """Called in a child: a step takes half a second, as seen by who waits for a GPU with item()."""
    steps, waited, item = [], [0], torch.Tensor.item
    optimizer.register_optimizer_step_post_hook(lambda *_: steps.append(1))
    torch.Tensor.item = lambda tensor: waited.append(len(steps)) or item(tensor)
    time.perf_counter = lambda: waited[-1] / 2


def test_what_is_printed_is_what_was_done(whole, alone, survive, names):
    result, folder = whole
    said = [
        re.search(r"(\d+)/7 \| (.* (\d+) examples/s|saved in .*)", line) for line in result.lines(0)
    ]
    assert [m[1] for m in said if m and "saved" in m[2]] == ["3", "6", "7"]
    assert [m[3] for m in said if m and m[3]] == ["26"] * 7  # the batch, in half a second
    state = load(folder)
    parts = {name: state[name] for name in ("model", "averaged")}
    assert digest(result) == survive.compare(**parts) and " batch size 13: " in result.output
    rates = [rate for _, rate, _ in reports(result).values()]
    assert rates == [0.9, 1.8, 2.7, 3.6, 4.5, 5.4, 6.3]
    factor = names["warm_up_and_cosine"]
    assert [round(factor(done, 60), 3) for done in (0, 9, 10, 35, 60)] == [0.1, 1, 1, 0.55, 0.1]
    assert factor(10, 10) == 1 and factor(3, 3) == 0.4  # called once more after the last step


def strike(plan):
    """Called in a child: {attempt: (step, signal)} for the last rank; SIGTERM: its workers, too."""
    when, what = plan.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (0, 0))
    steps = itertools.count(1)

    def ask(*_):
        if next(steps) == when:
            workers = [worker.pid for worker in multiprocessing.active_children()]
            if what == signal.SIGTERM and workers:  # torchrun signals the whole process group
                # By another process, as torchrun is one: the rank's own signal would end them.
                subprocess.run(["kill", *map(str, workers)], check=True)
                time.sleep(0.5)  # a worker that ended would end its rank here
            os.kill(os.getpid(), what)

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        optimizer.register_optimizer_step_pre_hook(ask)


def test_killed_and_resumed_is_bit_for_bit_uninterrupted(tmp_path, whole):
    """SIGKILL in step 5, then SIGTERM in step 4, then SIGKILL while it validates after step 6."""
    result, folder = whole
    strikes = functools.partial(strike, {0: (5, signal.SIGKILL), 1: (1, signal.SIGTERM)})
    again = train(
        tmp_path / "run", 7, 3, *SMALL, world_size=3, max_restarts=3, changes=KILLED, before=strikes
    )
    assert resumed(again) == [3, 4, 6] and "leaving (SIGTERM) after step 4" in again.lines(0)
    found = assert_same_state(tmp_path / "run", folder)
    assert len(tensors(found)) == 151  # 30 parameters; of each an average, moments, a count
    assert found["step"] == 7 and found["averaged"]["n_averaged"] == 7
    assert digest(again) == digest(result)
    assert reports(again) == reports(result) and len(reports(result)) == 7
    # Of attempt 0, rank 0 may report the step in which rank 2 is killed.
    assert len(re.findall(r"\| rate ", again.output)) - (4 + 1 + 2 + 1) in (0, 1)
    assert validations(again) == validations(result) and list(validations(result)) == [3, 6, 7]
    losses = [reports(result)[step][0] for step in (4, 5, 6)]
    assert validations(again)[6][0] == pytest.approx(sum(losses) / 3, abs=2e-4) and losses[0] > 0
    best, its = (torch.load(path / "snapshot_best.pt") for path in (folder, tmp_path / "run"))
    assert best["step"] == its["step"] and best["loss"] == its["loss"]
    rows = (folder / "snapshot.csv").read_text()
    assert (tmp_path / "run/snapshot.csv").read_text() == rows
    assert [row.split(",")[0] for row in rows.splitlines()] == ["step", "3", "6", "7"]
    assert files(folder) == files(tmp_path / "run") == KEPT


INF_ON_RANK_1 = (
    "mean_loss = lambda model, batch, step, old=mean_loss: old(model, batch, step) * ("
    "    math.inf if (step, dist.get_rank()) == (2, 1) else 1)"
)


def test_an_inf_on_one_rank_spoils_neither_weights_nor_snapshot(tmp_path):
    """And torchrun hears of it."""
    result = train(
        tmp_path / "run", 4, 1, *SMALL, changes=INF_ON_RANK_1, status=1, before=report_errors
    )
    [report, *_] = (tmp_path / "run").glob("report*.json")
    snapshot = load(tmp_path / "run")
    assert "is non-finite" in result.output and "is non-finite" in report.read_text()
    assert snapshot["step"] == 1 and all(tensor.isfinite().all() for tensor in tensors(snapshot))


# {} takes the place of the training windows.
OTHER_SET = "load_sets = lambda old=load_sets: (TensorDataset(old()[0].tensors[0]{}), *old()[1:])"


def test_epochs_and_patience(tmp_path):
    """Epochs of 4 steps."""
    words = "--epochs", 3, "--patience", 1, *SMALL
    result = train(tmp_path / "run", *words, changes=STILL + OTHER_SET.format("[:53]"))
    assert list(validations(result)) == [4, 8], result.output
    assert "stopped early: no better validation since step 4" in result.lines(0)
    assert load(tmp_path / "run")["step"] == 8
    assert torch.load(tmp_path / "run/snapshot_best.pt")["step"] == 4


# ---- What the ranks share ----


def test_any_number_of_ranks_takes_the_same_steps(names, monkeypatch):
    """Any first step, any size: the same items in each step, the rest left out."""

    def steps(world_size, first_step, micro_batches=1):
        args = argparse.Namespace(batch_size=10, accumulate=micro_batches)
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        shares = []
        for rank in range(world_size):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            shares.append([*names["share_of_steps"](range(first_step, 20), 103, args)])
            assert len(shares[-1]) == (20 - first_step) * micro_batches and all(shares[-1])
        parts = [sorted(itertools.chain(*part)) for part in zip(*shares, strict=True)]
        return [
            sorted(itertools.chain(*parts[i : i + micro_batches]))
            for i in range(0, len(parts), micro_batches)
        ]

    whole = steps(1, 0)
    for epoch, first in (0, 0), (1, 10):
        epochs, places, items = zip(*itertools.chain(*whole[first : first + 10]), strict=True)
        assert {*epochs} == {epoch} and {*places} == {*range(100)} and len({*items}) == 100
        assert max(items) <= 102 and list(items) != sorted(items)
    assert [item for *_, item in whole[0]] != [item for *_, item in whole[10]]
    for world_size, first_step in itertools.product((2, 3, 7), (0, 1, 10, 20)):
        assert steps(world_size, first_step) == whole[first_step:]
    assert steps(3, 4, micro_batches=3) == whole[4:]
    assert names["loader_of"]([], []).timeout == 120  # a batch may get lost


NO_DROPOUT = """
DROPOUT, CLIP = 0.0, 0.125

def DDP(*args, old=DDP, **options):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    model = old(*args, **options)
    model.register_comm_hook(None, lambda state, bucket: (
        log("gradients exchanged") or allreduce_hook(state, bucket)))
    return model
"""


def first_step(folder, *arguments, world_size):
    """Its result, and the gradient as AdamW has seen it: ten times its first moment."""
    result = train(folder, 1, 1, *SMALL, *arguments, changes=NO_DROPOUT, world_size=world_size)
    state = load(folder)["optimizer"]["state"]
    return result, torch.cat([10 * state[i]["exp_avg"].flatten() for i in range(len(state))])


def test_ranks_that_cannot_divide_a_batch_take_the_step_of_one_process(tmp_path, names):
    """3 ranks have 5, 4 and 4 windows, in micro-batches of 3, 2 or 2: the gradient of all 13."""
    result, one = first_step(tmp_path / "one", "--accumulate", 1, world_size=1)
    again, three = first_step(tmp_path / "three", "--accumulate", 2, world_size=3)
    assert (three - one).norm() / one.norm() < 1e-5
    (loss, _, norm), (same_loss, _, same_norm) = reports(result)[1], reports(again)[1]
    assert same_loss == pytest.approx(loss, abs=1e-3) and same_norm == pytest.approx(norm, abs=0.02)
    assert norm > 0.5 and three.norm().item() == pytest.approx(0.125, abs=1e-5)
    # One exchange for a step, and one that settles the order of additions.
    assert again.lines(0).count("gradients exchanged") == 2

    # The validation counts each of 100 windows once, though three ranks cannot share them.
    model, best = names["GPT"]().eval(), torch.load(tmp_path / "three/snapshot_best.pt")
    model.load_state_dict(best["model"])
    _, validation_set, _ = names["load_sets"]()
    with torch.inference_mode():
        expected = names["mean_loss"](model, validation_set.tensors, 0).item()
    assert len(validation_set) == 100 and 4 < expected < 6
    windows = torch.cat([names["load_sets"]()[0].tensors[0], *validation_set.tensors])
    assert torch.equal(windows[1:, 0], windows[:-1, -1])  # each begins where the last one ends
    assert "comparison" in bytes(windows[:, :-1].flatten().tolist()).decode("ascii")
    assert validations(again)[1][1] == pytest.approx(expected, abs=1e-4)
    assert best["loss"] == pytest.approx(expected, rel=1e-5) and best["step"] == 1


# ---- survive.py, function by function ----


def test_seeds_follow_from_all_numbers(survive):
    def drawn(*numbers):
        survive.seed(*numbers)
        return torch.rand(()).item(), numpy.random.rand(), survive.random.random()

    keys = [(0,), (0, 1), (1, 0), (0, 1, 0), (0, 1, "item")]
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]
    for source in zip(*(drawn(*key) for key in keys), strict=True):
        assert len({*source}) == len(keys)


TELL = """
def train(device, args):
    threads, kind = torch.get_num_threads(), os.sched_getscheduler(0) == os.SCHED_BATCH
    log(f"set: {os.environ.get('GLOO_SOCKET_IFNAME')} {threads} {kind}")
    sys.exit()
"""


def six_cores(**variables):
    """Called in a child, which a share of six cores is given by no chance."""
    os.sched_getaffinity = lambda _: {*range(6)}
    os.environ |= variables


@pytest.mark.parametrize(
    ("variables", "nodes", "ranks", "said"),
    [
        ({}, 1, 2, "lo 3 True"),
        ({}, 2, 2, "None 6 True"),
        ({"OMP_NUM_THREADS": "5"}, 1, 2, "lo 5 True"),
        ({"OMP_NUM_THREADS": "1"}, 1, 2, "lo 3 True"),
        ({"OMP_NUM_THREADS": "1"}, 1, 1, "lo 1 True"),
    ],
)
def test_what_a_process_sets_up(tmp_path, variables, nodes, ranks, said):
    """On one machine, it listens on the loopback alone. Its threads: a share, or what you say.
    (torchrun says 1 for several ranks.)"""
    result = train(
        tmp_path / "run",
        changes=f"import sys\n{TELL}",
        nodes=nodes,
        world_size=ranks,
        before=functools.partial(six_cores, **variables),
    )
    assert f"set: {said.replace('lo', socket.if_indextoname(1))}" in result.lines(0), result.output


def test_threads_are_a_share_of_the_cores_that_the_job_may_use(tmp_path, monkeypatch, survive):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)}, raising=False)
    monkeypatch.setattr(survive.pathlib, "Path", lambda _, name: tmp_path / name)
    (tmp_path / "cpu").mkdir()
    for written, count in (
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "9"}, 64),
        ({"cpu/cpu.cfs_quota_us": "27\n", "cpu/cpu.cfs_period_us": "9\n"}, 3),
    ):
        for name, text in written.items():
            (tmp_path / name).write_text(text)
        assert survive.cores() == count
        for name in written:
            (tmp_path / name).unlink()


def test_what_could_not_be_loaded_again_is_named_and_replaces_nothing(tmp_path, capsys, survive):
    path = tmp_path / "state.pt"
    survive.save({"step": 1}, path)
    before = path.read_bytes()
    state = {"step": 2, "best": {"loss": [1.0, numpy.float64(0.5)]}}
    line = refusal(capsys, 1, survive.save, state, path)
    assert "best.loss.1 is a <class 'numpy.float64'>" in line and "stays as it was" in line
    assert path.read_bytes() == before and files(tmp_path) == ["state.pt"]


# Rank 1 moves a weight alone in step 2.
DRIFTS = (
    "add_up_gradients = lambda model, *args, old=add_up_gradients: (old(model, *args), "
    "model.module.head[1].bias.data[5].add_(1e-4 * (args[1] == 2) * dist.get_rank()))[0]"
)
OTHER_BEST = "validate = lambda *_: {'loss': float(dist.get_rank())}"


@pytest.mark.parametrize(
    ("changes", "named", "step"),
    [
        (DRIFTS, "model.head.1.bias", 1),
        (OTHER_BEST, "best.loss", 1),
        (OTHER_SET.format(" + dist.get_rank()"), "training_data.0.0", None),
    ],
    ids=["weights", "numbers", "data"],
)
def test_what_differs_between_the_ranks_is_named_and_not_saved(tmp_path, changes, named, step):
    """Weights that drift, other numbers beside them, another disk."""
    result = train(tmp_path / "run", 4, 1, *SMALL, changes=changes, status=1)
    assert re.search(rf"the ranks differ in {named} \(rank .* alike .* own", result.output)
    assert [load(tmp_path / "run")["step"]] == [step] if step else files(tmp_path / "run") == []


def test_a_checksum_sees_each_bit_and_each_name(alone, survive, monkeypatch):
    one = torch.linspace(0, 1, 20_000)[::2]  # not contiguous
    other = one.clone()
    other[5000] += 1e-7
    assert survive.compare(x=one) == survive.compare(x=one.clone()) != survive.compare(x=other)
    # Layers in another order, as of a set of texts, whose order is each process's own.
    rows = [[("of.a", "", "1"), ("of.b", "", "1")], [("of.b", "", "1"), ("of.a", "", "1")]]
    answers = iter([["one", "two"], rows])
    monkeypatch.setattr(survive, "gathered", lambda _: next(answers))
    with pytest.raises(RuntimeError, match="the ranks differ in of.a .*of.b  1"):
        survive.compare()


class Batch:
    def __init__(self, held):
        self.held = held


def test_equal_data_compare_equal_and_no_others(alone, survive, monkeypatch, capsys):
    """By what arrays and objects hold: their texts leave values out, or have addresses."""
    numbers, seen = numpy.arange(5000.0), []
    monkeypatch.setattr(survive, "gathered", lambda mine: seen.append(mine) or [mine])
    (moved := numbers.copy())[2500] += 1e-9
    different = [
        numbers,
        moved,
        numbers.astype("float32"),
        numbers.reshape(50, 100),
        torch.arange(5000.0),
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int32),
        Batch(numbers),
        Batch(moved),
        Batch(Batch("a")),
        {0, 8},
        {0, 16},
        [],
        {},
        None,
        False,
        0,
        "",
        numpy.array([[1], "a"], object),
        numpy.array([[2], "a"], object),
        random.Random(1),
    ]
    for value in different:  # a set in another order: 0, 8 and 16 have the same place in it
        again = {*[*value][::-1]} if isinstance(value, set) else copy.deepcopy(value)
        survive.compare(x=value), survive.compare(x=again)
        assert seen[-1] == seen[-2], value
    assert len({*seen}) == len(different)
    for value in threading.Lock(), torch.zeros(2).to_sparse(), lambda: None:
        line = refusal(capsys, 1, survive.compare, x=[value])
        assert f"cannot compare x.0, a {type(value).__qualname__} (" in line


def test_a_buffer_that_the_first_forward_makes_is_named(survive, capsys, alone):
    def settle(model):
        with survive.settled(model):
            model.register_buffer("future", torch.zeros(3))

    line = refusal(capsys, 1, settle, nn.Linear(2, 2))
    assert '"future"' in line and "make all buffers in __init__" in line
    (model := nn.Linear(2, 2)).register_buffer("places", torch.zeros(9, 1, 2).transpose(0, 1))
    with pytest.raises(RuntimeError, match="single memory location"):  # a positional encoding
        nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2))
    model.places = model.places.clone(memory_format=torch.contiguous_format)
    nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2))


def test_a_link_to_a_snapshot_stays_one(tmp_path, survive, alone):
    """Also if there is nothing at its end yet. A part: ReduceLROnPlateau, whose counts go on."""

    def new():
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            torch.optim.SGD([nn.Parameter(torch.ones(2))], 1.0), patience=1
        )
        return survive.Snapshot(str(link), "", a=plateau, b=plateau.optimizer), plateau

    (tmp_path / "big").mkdir()
    (link := tmp_path / "snapshot.pt").symlink_to("big/train.pt")
    snapshot, plateau = new()
    for step, loss in (1, 3.0), (2, 4.0):
        plateau.step(loss)
        snapshot.save(step=step)
        assert link.is_symlink() and load(tmp_path)["step"] == step
    snapshot, again = new()
    assert snapshot.load(step=0) == {"step": 2} and files(tmp_path / "big") == ["train.pt"]
    again.step(4.0)
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert len([*tmp_path.rglob("*.lock")]) == len([*tmp_path.glob("big/*.lock")]) == 1


def test_a_metric_that_is_new_has_a_column_of_its_own(tmp_path, names):
    """So has one that takes another's place."""
    rows = [{"step": 1, "loss": 3.5}, {"step": 2, "f1": 0.25, "loss": 3.0}, {"step": 3, "f1": 0.5}]
    names["write_log"](rows, tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text() == "step,loss,f1\n1,3.5,\n2,3.0,0.25\n3,,0.5\n"


# ---- Snapshots and calls that cannot work ----


def edited(**entries):
    """A function that spoils a snapshot so."""
    return lambda path, good: torch.save(torch.load(path, weights_only=True) | entries, path)


def refusal(capsys, status, function, *arguments, **options):
    """The line with which the script's function ends the process."""
    with pytest.raises(SystemExit) as end:
        function(*arguments, **options)
    assert end.value.code == status
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_bad_snapshot_is_refused_by_name_and_stays(tmp_path, monkeypatch, capsys, survive, alone):
    monkeypatch.chdir(tmp_path)
    snapshot = survive.Snapshot("snapshot.pt", "13", model=nn.Linear(30, 30))
    snapshot.save(step=5, best=None)
    path = tmp_path / "snapshot.pt"
    content, refused, there = path.read_bytes(), 0, files(tmp_path)
    for call in snapshot.load, snapshot.save:  # under another name, it would not be found again
        assert "needs step=" in refusal(capsys, 2, call, epoch=5)
    survive.log("two", 2, sep=": ")  # as print does it
    assert capsys.readouterr().out == "[rank 0/1] two: 2\n"
    cut = [
        lambda path, good, length=length: path.write_bytes(good[:length])
        for length in range(0, len(content), len(content) // 15)
    ]
    for spoil, message in (
        (flipped_byte, "cannot continue from snapshot.pt (ValueError('wrong checksum of "),
        (pickle_in_an_archive, "cannot continue from snapshot.pt (UnpicklingError("),
        (edited(model={}), "cannot continue from snapshot.pt ("),
        (
            edited(plan="12 of 14432 examples"),
            "goes on with batches of 12 of 14432 examples, as before: with 13, some would come",
        ),
        *((cut_short, "cannot continue") for cut_short in cut),
    ):
        path.write_bytes(content)
        spoil(path, content)
        before = path.read_bytes()
        assert message in refusal(capsys, 1, snapshot.load, step=0)
        assert path.read_bytes() == before
        assert files(tmp_path) == there, "code in the pickle was executed"
    # A flipped byte may lie where nothing is held (padding).
    for place in range(len(content) // 40, len(content), len(content) // 20):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            assert snapshot.load(step=0, rows=[]) == {"step": 5, "best": None, "rows": []}
        except SystemExit:
            refused += 1
    capsys.readouterr()
    assert refused >= 13  # of 20


BATCH = "--batch-size must be from 4 (an example for each rank in each micro-batch) to 1"


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        ("--batch-size 3", BATCH, 2),
        ("--batch-size 1000000", BATCH, 2),
        (
            "-3 0 --accumulate 0 --epochs 0 --patience -1 --timeout 0",
            "total_steps, save_every, epochs, patience, accumulate, timeout must be 1 or more",
            2,
        ),
        ("--accumulate two", "invalid int value: 'two'", 2),
        ("--snapshot-path no/such.pt", "cannot write no/such.pt", 2),
        ("--snapshot-path lr0.1", "lr0.1 must end in .pt, and not in _best.pt", 2),
        ("--snapshot-path run_best.pt", "must end in .pt, and not in _best.pt", 2),
    ],
)
def test_wrong_calls_end_in_one_line(tmp_path, words, message, status):
    ranks = 2 if status == 2 else 1  # the other rank would show how it has lost that one
    result = train(tmp_path / "run", *words.split(), status=status, world_size=ranks)
    assert message in result.error() and not re.search("Traceback|usage", result.output)
    assert files(tmp_path / "run") == []


def test_a_finished_run_trains_nothing_again_and_a_full_disk_keeps_the_last_snapshot(
    tmp_path, whole
):
    folder = shutil.copytree(whole[1], tmp_path / "run")
    before = [(folder / name).read_bytes() for name in KEPT]
    again = train(folder, 1, 1, *SMALL, world_size=3)
    assert "nothing left to train: ask for more steps, or delete" in again.output
    assert digest(again) == digest(whole[0])
    assert [(folder / name).read_bytes() for name in KEPT] == before
    # Validated: otherwise the run begins with a validation, and the best model is written first.
    torch.save(load(folder) | {"due": False}, folder / "snapshot.pt")
    before = (folder / "snapshot.pt").read_bytes()
    result = train(folder, 8, 1, *SMALL, world_size=1, before=limit_file_size, status=1)
    assert "cannot write snapshot.pt, which stays as it was" in result.error()
    assert (folder / "snapshot.pt").read_bytes() == before and files(folder) == KEPT


# ---- Several machines, played by processes ----


def shared(folder, *arguments, nodes=2, before=(), **options):
    return train(folder, *arguments, *SMALL, nodes=nodes, before=(play_machine, *before), **options)


apart = functools.partial(shared, before=(own_disk,))


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    """(result, folder) of six steps of two ranks on one machine."""
    folder = tmp_path_factory.mktemp("one_machine") / "run"
    return train(folder, 6, 2, *SMALL), folder


WRITES = (
    "os.replace = lambda source, target, old=os.replace: ("
    "    log(f'writes {target}', every_rank=True) or old(source, target))"
)


def test_two_machines_train_as_one_does_and_show_who_is_who(tmp_path, one_machine):
    """With one disk, on which one rank saves."""
    result = shared(tmp_path / "run", 6, 2, changes=WRITES, max_restarts=1)
    written = re.findall(r"(rank \d)/2\] writes .*snapshot.pt", result.output)
    assert written == ["rank 0"] * 3 and files(tmp_path / "run") == KEPT
    who = [re.sub(r"pid \d+", "pid", line) for line in result.lines(0)[:2]]
    assert who == [f"attempt 0, gloo: node{1 + rank} has rank {rank} (cpu, pid)" for rank in (0, 1)]
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in result.lines(0)[2]
    assert_same_state(tmp_path / "run", one_machine[1])
    assert digest(result) == digest(one_machine[0])


def test_the_newest_snapshot_counts_whichever_machine_has_it(tmp_path, one_machine):
    """It is on the machine of rank 1; that of rank 0 has an old one."""
    disk1, disk2 = tmp_path / "run/disk1", tmp_path / "run/disk2"
    apart(tmp_path / "run", 2, 2)
    assert load(disk1)["step"] == load(disk2)["step"] == 2
    train(disk2, 4, 2, *SMALL)
    marks = [zipfile.ZipFile(disk / "snapshot.pt").comment for disk in (disk1, disk2)]
    assert marks[0].split(b",")[0] == marks[1].split(b",")[0] and marks[0] != marks[1]
    result = apart(tmp_path / "run", 6, 2)
    assert "resumed from snapshot.pt after step 4, saved on node2" in result.lines(0)
    assert digest(result) == digest(one_machine[0])
    for disk in disk1, disk2:
        assert_same_state(disk, one_machine[1])
    # A machine that has lost its disk gets the newest at once, even if no step follows.
    shutil.rmtree(disk1)
    apart(tmp_path / "run", 6, 2)
    assert (disk1 / "snapshot.pt").read_bytes() == (disk2 / "snapshot.pt").read_bytes()


def test_a_snapshot_that_one_machine_cannot_continue(tmp_path, one_machine):
    path = tmp_path / "run/disk2/snapshot.pt"
    shutil.copytree(one_machine[1], path.parent)
    flipped_byte(path, path.read_bytes())
    before = path.read_bytes()
    result = apart(tmp_path / "run", 8, 2, status=1)
    assert result.error().startswith("node2: cannot continue from snapshot.pt")
    assert path.read_bytes() == before and files(tmp_path / "run/disk1") == []


def test_machines_with_snapshots_of_different_jobs(tmp_path):
    """That of the longer job would replace the other's work."""
    for node, steps in (1, 2), (2, 1):
        (tmp_path / "run").mkdir(exist_ok=True)
        train(tmp_path / f"run/disk{node}", steps, 1, *SMALL, world_size=1)
    result = apart(tmp_path / "run", 3, 1, status=1)
    assert "node1 and node2 have snapshots of different jobs" in result.output
    assert [load(tmp_path / f"run/disk{node}")["step"] for node in (1, 2)] == [2, 1]


MOVED = (
    "add_up_gradients = lambda *args, old=add_up_gradients: ("
    "    os.replace('other.pt', 'snapshot.pt') or old(*args))"
)


def test_two_halves_of_a_job_do_not_both_write_one_snapshot(tmp_path):
    """One disk, and halves that do not see each other: who saves second finds the other's file."""
    folder = tmp_path / "run"
    for steps in 1, 2:  # the job; and its other half, which goes on
        train(folder, steps, 1, *SMALL, world_size=1)
        shutil.copy(folder / "snapshot.pt", folder / f"{steps}.pt")
    (folder / "1.pt").replace(folder / "snapshot.pt")
    (folder / "2.pt").replace(folder / "other.pt")
    refused = train(folder, 3, 1, *SMALL, world_size=1, changes=MOVED, status=1)
    assert "a lost part of this one, has written snapshot.pt meanwhile" in refused.error()
    assert load(folder)["step"] == 2


# ---- What a start, a step and a save cost ----


def test_a_start_a_save_and_a_step_cost_a_rank_no_more_where_there_are_more(tmp_path):
    """But rank 0, which asks for all in one; and Gloo, which connects each to 2 log2(N) others."""
    (tmp_path / "count.py").write_text(COUNT)
    shutil.copy(ROOT / "template/survive.py", tmp_path)
    for doubled, world_size in enumerate((4, 8, 16)):
        result = fork_ranks(tmp_path / "count.py", cwd=tmp_path, world_size=world_size).ok()
        for rank in range(world_size):
            *others, line = result.lines(rank)
            ours, of_gloo, files, sockets = map(int, re.findall(r"\d+", line))
            assert ours <= (4 if rank else world_size + 2), result.output
            assert len(others) == (rank == 0), result.output  # a line for a machine
            assert of_gloo <= 7 + 4 * doubled and sockets <= 6 + 2 * doubled, line
            assert files <= (1 if rank else 40), line
        (tmp_path / "snapshot.pt").unlink()


# ---- Without torchrun: four variables are all that a process needs to find the others ----


@pytest.fixture
def by_hand():
    """The environment of each of so many ranks. Rank 0 serves their store."""
    with free_port() as port:
        yield lambda count: [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(count)
        ]


def test_started_by_hand(tmp_path, by_hand):
    result = fork(SCRIPT, 2, 1, *SMALL, cwd=tmp_path, environments=by_hand(2)).ok()
    assert result.lines(0)[-1].startswith("2 replicas are identical, sha256")
    assert "note: " not in result.output


@pytest.mark.parametrize("missing", [0, 2, pytest.param("torchrun", marks=pytest.mark.long)])
def test_a_rank_that_never_comes_is_named(tmp_path, by_hand, missing):
    died = {}
    if missing == "torchrun":
        died = {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "3"}
        died["TORCHELASTIC_RESTART_COUNT"] = "0"
    waiting = [variables | died for rank, variables in enumerate(by_hand(3)) if rank != missing]
    result = fork(SCRIPT, "--timeout", 900 if died else 3, cwd=tmp_path, environments=waiting)
    assert result.status == 1
    gone = f"look for an error of {'torchrun' if died else 'rank 0'} on 127.0.0.1, or run tools/"
    named = "rank 2 did not come"
    lines = [line for line in result.output.splitlines() if ": error: " in line]
    assert any((named if missing == 2 else gone) in line for line in lines), result.output
    assert all(named in line or gone in line for line in lines), "a false cause"


@pytest.mark.long
@pytest.mark.parametrize(
    ("stopped", "whom"),
    [(0, "a store that does not answer"), (1, "rank 1: it has stopped, or waits")],
)
def test_a_rank_that_stops_is_named(tmp_path, by_hand, stopped, whom):
    """Rank 0 takes the store along."""
    script = variant(
        tmp_path,
        SCRIPT,
        NO_WORKERS
        + (  # 19: SIGSTOP
            "add_up_gradients = lambda *args, old=add_up_gradients: ("
            f"    dist.get_rank() == {stopped} and os.kill(os.getpid(), 19) or old(*args))"
        ),
    )
    rank = functools.partial(running, PYTHON, script, 3, 1, "--timeout", 5, cwd=tmp_path)
    with rank(env=by_hand(2)[0]) as first, rank(env=by_hand(2)[1]) as second:
        output, _ = (second, first)[stopped].communicate(timeout=400)
        assert f"[rank {1 - stopped}/2] waited in vain for {whom}" in output, output


def test_a_cause_is_told_by_what_is_known(survive, monkeypatch, capsys):
    """Of a start that failed; and who has stopped, where rank 2 gives up a moment later."""
    monkeypatch.setattr(survive, "SHARED_STORE", True)
    known = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "node1"}
    monkeypatch.setattr(os, "environ", {**os.environ, **known})
    for address, count, cause in (
        ("10.0.0.2", 0, "of torchrun on node1"),
        ("", 2, "torchrun"),
        ("127.0.0.1", 0, "that they cannot reach: set GLOO_SOCKET_IFN"),
        ("::1", 0, "that they cannot reach"),
        ("::1", 1, "of the dead"),
    ):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(count)
        line = survive.explain(OSError(f"remote=[{address}]"), one_machine=count == 2)
        assert cause in line and line.endswith(f"(OSError('remote=[{address}]'))")
    keys, threads = set(), []
    store = types.SimpleNamespace(check=lambda asked: {*asked} <= keys, add=lambda *_: 1)
    store.set = lambda key, _: (keys.add(key), threads.append(threading.current_thread().daemon))
    monkeypatch.setattr(time, "sleep", lambda _: keys.add("rank 2 failed"))
    for error in "Timed out", "DataLoader timed out after 120 seconds", "is non-finite":  # 1 blames
        survive.name_the_stopped(RuntimeError(error), store)
    said = "[rank 0/3] waited in vain for rank 1: it has stopped, or waits elsewhere\n"
    assert capsys.readouterr().out == said and threads == [True] * 3, "it must not keep the process"


def test_bad_starts_end_in_one_line(tmp_path):
    nowhere = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.invalid", "MASTER_PORT": "1"}
    for result, status, message in (
        (fork(SCRIPT, cwd=tmp_path), 2, "torchrun --standalone --nproc-per-node=2 .*train.py$"),
        (
            fork(SCRIPT, "--timeout", 1, cwd=tmp_path, env=nowhere),
            1,
            "on a.invalid, or run tools/check_machines.py on each machine: it finds out why",
        ),
    ):
        assert result.status == status and re.search(message, result.error()), result.output


# ---- README.md ----

BEFORE, AFTER = "template/example/before.py", "template/example/after.py"
MANY, LEAST, COLUMNS = "docs/many_processes.py", "template/least.py", "template/example/columns.py"
ORDINARY, TRAINER = "template/trainer/before.py", "template/trainer/after.py"


@pytest.mark.parametrize(
    ("one", "other", "lines", "name"),
    [
        (MANY, LEAST, "-U2", "template/least.diff"),
        (BEFORE, AFTER, "-U1", "template/example/after.diff"),
        (ORDINARY, TRAINER, "-U1", "template/trainer/after.diff"),
    ],
)
def test_the_diff_leads_from_one_script_to_the_other(one, other, lines, name):
    command = ["git", "diff", "--no-index", lines, ROOT / one, ROOT / other]
    diff = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    block = (ROOT / name).read_text()
    assert block.startswith("@@ ") and block in diff and diff.endswith(block)


LOST_AFTER = """
import os
survive.Snapshot.save = lambda self, old=survive.Snapshot.save, **state: (old(self, **state), (
    state["step"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ({}, "0") and os._exit(1))
"""


@pytest.mark.parametrize(
    ("script", "step", "ranks"),
    [
        (LEAST, 2, (3, 3)),
        (COLUMNS, 60, (3, 3)),
        (TRAINER, 20, (3, 3)),
        pytest.param(COLUMNS, 60, (2, 3), marks=pytest.mark.long),
    ],
)
def test_the_least_and_a_state_of_each_rank_go_on(tmp_path, script, step, ranks):
    """With the same bits; on another number of ranks, up to rounding."""
    states, few = [], "EPOCHS, STEPS = 2, 40"
    for changes, counts in (few, ranks[:1]), (few + LOST_AFTER.format(step), ranks):
        (folder := tmp_path / str(len(states))).mkdir()
        for count in counts:
            result = fork_ranks(variant(folder, script, changes), cwd=folder, world_size=count)
        assert result.status == 0 and resumed(result) == [step] * (len(counts) - 1), result.output
        states.append(tensors(torch.load(max(folder.glob("*.pt")))))
    apart = max((mine - its).abs().max() for mine, its in zip(*states, strict=True))
    assert len(states[0]) > 4 and apart <= 1e-3 * (ranks == (2, 3)), apart


FEW = {"STEPS, BATCH, ACCUMULATE, EVERY = 200": "STEPS, BATCH, ACCUMULATE, EVERY = 40"}
GENERATOR = {"10**10)": "10**10, torch.Generator().manual_seed(0))"}
PACKAGE = {"import survive\n": "from package import survive\n"}


def test_a_trainer_of_one_rank_is_the_ordinary_one(tmp_path):
    """To the bit. After a SIGTERM it prints no end; when all is done, it takes no step more."""
    fork(variant(tmp_path, ORDINARY, FEW | GENERATOR), cwd=tmp_path).ok()
    best = torch.load(tmp_path / "best.pt")
    script, package = variant(tmp_path, TRAINER, FEW | PACKAGE), tmp_path / "package"
    package.mkdir()
    (tmp_path / "survive.py").rename(package / "survive.py")
    options = {"max_restarts": 1, "before": functools.partial(strike, {0: (30, signal.SIGTERM)})}
    result = fork_ranks(script, cwd=tmp_path, world_size=1, **options).ok()
    assert resumed(result) == [30] and result.output.count("sha256") == 1
    its = torch.load(tmp_path / "best.pt")
    assert len(best) == 4 and all(torch.equal(best[name], its[name]) for name in best)
    assert digest(fork_ranks(script, cwd=tmp_path, world_size=1).ok()) == digest(result)


PAGE = """
import os, torch, torch.distributed as dist, survive
assert survive.start() == torch.device("cpu")
path, model, rank = "best.pt", torch.nn.Linear(2, 1, bias=False), dist.get_rank()
rank == 0 or survive.save({"model": {"weight": torch.ones(1, 2)}, "step": 3}, path)
BEST
assert (model.weight == 1).all()
NEW, optimizer = 0.5, torch.optim.SGD(model.parameters(), 4.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
for again in 1, 2:
    exec('''RATE''')
    assert optimizer.param_groups[0]["lr"] == 0.25 and scheduler.base_lrs == [0.5]
whole, step, snapshot = "1,a\\n2,b\\n", 2, survive.Snapshot("a.pt", "")
open("log.csv", "w").write(whole + "3,c\\n1")  # one more, and a part of another
LOG
assert open("log.csv").read() == whole
dist.barrier(), survive.leave(finished=False)
"""


def test_the_code_of_the_page(tmp_path):
    """The best model is that of the machine which has the newest. A rate is changed once. A log has
    no row after the snapshot's step, and no part of a row."""
    shutil.copy(ROOT / "template/survive.py", tmp_path)
    blocks = {"BEST": "the best model", "RATE": "another learning rate", "LOG": "a long log"}
    page = re.sub("|".join(blocks), lambda found: shown.block(blocks[found[0]]), PAGE)
    (tmp_path / "page.py").write_text(page)
    disks = {"nodes": 2, "before": (play_machine, own_disk)}
    assert fork_ranks(tmp_path / "page.py", cwd=tmp_path, **disks).status == 128 + signal.SIGTERM


@pytest.mark.long
def test_the_example_killed_is_the_example_undisturbed(tmp_path):
    """And it learns what the ordinary script learns."""
    runs = []
    strikes = functools.partial(strike, {0: (33, signal.SIGKILL), 1: (14, signal.SIGTERM)})
    for name, options in ("whole", {}), ("killed", {"max_restarts": 2, "before": strikes}):
        folder = tmp_path / name
        folder.mkdir()
        result = fork_ranks(variant(folder, AFTER, ""), cwd=folder, **options).ok()
        states = [torch.load(folder / its) for its in ("snapshot.pt", "best.pt")]
        runs.append([(folder / "log.csv").read_text(), *states])
    assert resumed(result) == [30, 44]
    (log, *states), (its_log, *its_states) = runs
    assert log == its_log and log.count("\n") == 4
    pairs = [*zip(*(tensors(dict(enumerate(its))) for its in (states, its_states)), strict=True)]
    assert len(pairs) > 40 and all(torch.equal(*pair) for pair in pairs)
    fork(BEFORE, cwd=tmp_path).ok()
    texts = (tmp_path / "log.csv").read_text(), log
    dice = [float(text.rpartition(",")[2]) for text in texts]  # in the last row
    assert min(dice) > 0.7, dice


def in_a_folder(tmp_path):
    shutil.copytree(ROOT / "template", tmp_path / "template")
    for name in "launch", "tools":
        (tmp_path / name).symlink_to(ROOT / name)
    return {"cwd": tmp_path, "timeout": 900, "env": {**ACTIVE, "HOME": str(tmp_path)}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "template: one machine",
            r"validation loss 2\.[0-8].*\n.* 2 replicas are identical, sha256",
        ),
        ("template: the least", "1 of 1 rounds ended equal"),
        ("columns", "step 300: loss 0.0"),
        ("trainer", "best 3.* sha256"),
    ],
)
def test_a_command_of_the_page(tmp_path, name, said):
    command = shown.block(name).replace("--rounds 5", "--rounds 1")
    result = started.run("bash", "-euc", command, **in_a_folder(tmp_path))
    assert re.search(said, result.output), result.output
    assert result.status == 0 or "0 of these went on" in result.output  # killed while it started


@pytest.mark.long
def test_the_command_for_several_machines(tmp_path):
    in_a_folder(tmp_path)
    with Lab(tmp_path) as lab:
        command = "bash", "-c", shown.block("template: several machines")
        results = lab.run(("node1", *command), ("node2", *command), timeout=600)
    assert all(result.status == 0 for result in results), results
    assert "[rank 0/4] 4 replicas are identical, sha256" in results[0].output + results[1].output


def test_a_stream_goes_on_after_any_number_of_batches():
    """As its page says: each loader's worker yields whole batches, in turn."""
    [line] = re.findall(r"`(islice\(.*?\))`", (ROOT / "template/example/README.md").read_text())
    names = {"islice": itertools.islice, "epoch": 1}
    names["batches"] = lambda epoch: ([epoch, place] for place in range(9))
    for count, done in itertools.product((1, 2, 3), (0, 1, 3, 8, 9)):
        workers = [types.SimpleNamespace(id=worker, num_workers=count) for worker in range(count)]
        parts = [[*eval(line, names | {"done": done, "worker": worker})] for worker in workers]
        merged = itertools.chain(*itertools.zip_longest(*parts))  # as the loader takes them
        assert [batch for batch in merged if batch] == [[1, place] for place in range(done, 9)]


def test_an_epoch_goes_on_after_any_number_of_steps():
    """As its page says: the batches that are not done, and each epoch in an order of its own."""
    names = {"torch": torch, "islice": itertools.islice, "BatchSampler": BatchSampler}
    names |= {"points": range(23), "BATCH": 4, "ACCUMULATE": 2, "updates": 3}  # 5 batches
    rest = []
    for step in range(6):
        exec(shown.block("by epochs"), its := names | {"step": step})  # noqa: S102
        rest.append([*its["batches"]])
        assert its["epoch"] == step // 3
    assert [len(batches) for batches in rest] == [5, 3, 1] * 2
    assert rest[0][2:] == rest[1] and rest[1][2:] == rest[2] and rest[0] != rest[3]
    assert len({*itertools.chain(*rest[0])}) == 20


def test_an_item_that_is_drawn_again_is_augmented_anew(survive):
    """As its page says: by its place, which a restart does not change."""
    names = {"torch": torch, "survive": survive, "BATCH": 2, "points": torch.zeros(9)}
    names["augment"] = lambda x: x + torch.rand(())
    exec(shown.block("items that draw"), names)  # noqa: S102
    batches, dataset = [[5, 7], [7, 5], [5, 7]], names["Drawing"]()
    whole, rest = [[*names["with_places"](batches[done:], done)] for done in (0, 1)]
    drawn = [float(dataset[item]) for batch in whole for item in batch]
    assert whole[1:] == rest and len({*drawn}) == 6
    assert [float(dataset[item]) for batch in rest for item in batch] == drawn[2:]


def test_rows_of_all_ranks_stand_in_the_order_of_the_batch():
    """As its page says: with a row of zeros where a share is shorter."""
    page = (ROOT / "template/example/README.md").read_text()
    [line] = re.findall(r"`(AllGather\.apply\(.*?\])`", page)
    for size, count in itertools.product((1, 2, 3), (3, 4, 5, 6)):
        batch = torch.arange(1, 2 * count + 1).view(count, 2)
        shares = [batch[rank::size] for rank in range(size)]
        full = [torch.cat([share, share.new_zeros(1, 2)])[: -(-count // size)] for share in shares]
        gather = types.SimpleNamespace(apply=lambda rows, full=full: torch.cat(full))
        found = eval(line, {"AllGather": gather, "rows": None, "N": size, "count": count})
        assert torch.equal(found, batch)
        assert all(
            torch.equal(found[i * size + rank], row)
            for rank, share in enumerate(shares)
            for i, row in enumerate(share)
        )


# As torchrun does it: the rank leads a session of its own, and SIGTERM goes to all that is in it.
LAUNCH = """
import os, signal, subprocess, sys
of_the_rank = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_ERROR_FILE": "/tmp/of_this_rank"}
child = subprocess.Popen(sys.argv[1:], start_new_session=True, env={**os.environ, **of_the_rank})
signal.signal(signal.SIGTERM, lambda *_: os.killpg(child.pid, signal.SIGTERM))
child.wait()
"""
# The rank says when it is in the middle of importing torch. Its step takes 2 seconds.
RANK = """
import sys, time
class Finder:
    def find_spec(self, name, *_):
        if name == "torch.nn":
            print("imports it", flush=True)
sys.meta_path.insert(0, Finder())
import survive
survive.start()
asked_to_leave = survive.leave_on_sigterm()
while not asked_to_leave():
    print("has started", flush=True)
    time.sleep(2)
print("has saved", flush=True)
"""


@pytest.mark.parametrize(
    ("shell", "moment", "kill"),
    [
        ([], "imports it", signal.SIGKILL),
        pytest.param([], "has started", signal.SIGKILL, marks=pytest.mark.long),
        (["bash", "-c", '"$@"; exit $?', "bash"], "has started", signal.SIGKILL),
        (["bash", "-c", '"$@"; exit $?', "bash"], "has started", signal.SIGTERM),
    ],
)
def test_a_rank_ends_with_its_torchrun(by_hand, shell, moment, kill):
    """Also if torchrun is killed by SIGKILL, and can tell nobody; also behind a shell. A SIGTERM
    ends the shell, and with it torchrun, before the rank has saved. This torchrun itself is a rank
    of another one, whose variables it has: it is no program between torchrun and python."""
    env = by_hand(1)[0] | {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_ERROR_FILE": "/tmp/other"}
    command = [PYTHON, "-c", LAUNCH, *shell, PYTHON, "-c", RANK]
    with running(*command, cwd=ROOT / "template", env=env) as job:
        output = read_until(job, moment)
        assert ("Write exec before python" in output) == bool(shell)
        job.send_signal(kill)
        wait_until(lambda: not family(job), "the rank ends")
        assert ("has saved" in job.stdout.read()) == (kill == signal.SIGTERM)
