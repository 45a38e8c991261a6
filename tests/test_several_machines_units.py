"""The functions of template/several_machines.py: what each returns, leaves, prints, and refuses.

Two forked ranks, or one process alone, call the checks below, each of one function. Whole jobs:
test_jobs.py. What these tests would not notice: python tests/mutants.py.
"""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import pathlib
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from support import ROOT, fork_workers, pretended
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

SCRIPT = "template/several_machines.py"
CPU = torch.device("cpu")
ALONE, PAIR = [], []  # the checks for one process alone, and for two ranks


def check(kind):
    return lambda function: kind.append(function)


@pytest.mark.parametrize("world_size", [1, 2])
def test_its_functions(tmp_path, world_size):
    result = fork_workers(__file__, tmp_path, world_size)
    assert result.status == 0, result.output
    assert result.output.count("all checked") == world_size, result.output


def worker(rank, world_size, meeting_point, args):
    """Called in each forked process: the checks of one script, up to the first that fails."""
    script = runpy.run_path(str(ROOT / SCRIPT))["parse_args"].__globals__
    sys.argv = [SCRIPT]
    if world_size > 1:
        dist.init_process_group("gloo", init_method=meeting_point, rank=rank,
                                world_size=world_size, timeout=timedelta(seconds=30))
        os.environ["LOCAL_RANK"] = str(rank)
    for function in PAIR if world_size > 1 else ALONE:
        function(script)
    print("all checked\n", end="", flush=True)
    if world_size > 1:
        dist.barrier()  # until the other has come to its end, too


# ---- What the checks need ----


def printed(function, *arguments, **options):
    """What function prints, and flushes."""
    with tempfile.NamedTemporaryFile("w") as file, contextlib.redirect_stdout(file):
        function(*arguments, **options)
        return pathlib.Path(file.name).read_text()


def stopped(function, *arguments, sleeps=()):
    """(status, message) with which function stops the process, after these pauses."""
    done = []
    with (tempfile.NamedTemporaryFile("w") as file, contextlib.redirect_stderr(file),
          patch.object(time, "sleep", done.append)):
        with pytest.raises(SystemExit) as end:
            function(*arguments)
        start, _, message = pathlib.Path(file.name).read_text().partition(": error: ")
    assert done == list(sleeps)
    assert start in (os.path.basename(SCRIPT), "") and message.count("\n") <= 1
    return end.value.code, message.removeprefix(f"{socket.gethostname()}: ").rstrip("\n")


def parked(tensor):
    """A tensor on no device, until somebody moves it to one."""
    return SimpleNamespace(to=lambda device, non_blocking: tensor)


def trained(seed, steps):
    """A model and its optimizer, after some steps."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(3, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


def gpus(*args, **options):
    return patch.multiple(torch.accelerator, **pretended(*args, **options))


# ---- Two ranks ----


@check(PAIR)
def train_epoch(script):
    """What it reports of two batches, of 3 and of 5 images a rank. (The steps: test_jobs.py.)"""
    torch.manual_seed(3)
    images, labels, model = torch.rand(2, 8, 4), torch.randint(3, (2, 8)), nn.Linear(4, 3)
    expected = cross_entropy(model(images.flatten(0, 1)), labels.flatten()).item()
    rank, bars, clock = dist.get_rank(), [], iter([10.0, 14.0])
    batches = [(parked(images[rank, part]), parked(labels[rank, part]))
               for part in (slice(0, 3), slice(3, 8))]
    changed = {"tqdm": lambda batches, **options: bars.append(options) or batches,
               "time": SimpleNamespace(perf_counter=lambda: next(clock))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    event = [threading.Event()] * ("leave_on_sigterm" in script)
    with patch.dict(script, changed), patch.object(torch, "zeros", wraps=torch.zeros) as zeros:
        loss, *rest = script["train_epoch"](DDP(model), batches, optimizer, CPU, *event)
    assert [made.kwargs["device"] for made in zeros.mock_calls if made.args == ((),)] == [CPU]
    assert loss == pytest.approx(expected, rel=1e-6) and rest == [16 / 4] + [16] * len(event)
    assert bars == [{"leave": False, "disable": None if rank == 0 else True}]


@check(PAIR)
def evaluate(script):
    """The share of right answers over all ranks, as floats and without a graph."""
    class FirstPixel(nn.Module):
        def forward(self, images):
            assert not torch.is_grad_enabled() and not self.training
            return torch.nn.functional.one_hot(images.flatten(1)[:, 0].long(), 10).float()

    images = torch.randint(10, (7, 1, 28, 28), dtype=torch.uint8)
    dist.broadcast(images, src=0)
    labels = images[:, 0, 0, 0].long()
    labels[:3] = (labels[:3] + 1) % 10
    model = nn.Module()  # as DDP around it
    model.module = FirstPixel()
    assert script["evaluate"](model, TensorDataset(images, labels), CPU) == pytest.approx(4 / 7)


@check(PAIR)
def check_replicas(script):
    """A difference is seen in the last entry of a weight or a buffer, of any type."""
    module, rank = nn.BatchNorm1d(2).to(torch.bfloat16), dist.get_rank()  # numpy has no bfloat16
    said = printed(script["check_replicas"], module)
    assert said.startswith("" if rank else "[rank 0/2] 2 replicas are identical, sha256 ")
    for tensor in (module.bias.data, module.running_mean):
        tensor[1] += rank
        with pytest.raises(RuntimeError, match="the replicas differ: sha256 "):
            script["check_replicas"](module)
        tensor[1] -= rank


@check(PAIR)
def what_ranks_say(script):
    """When a rank stops, rank 0 speaks at once, the others if they are the only ones that live."""
    rank = dist.get_rank()
    assert printed(script["log"], "a") == ("" if rank else "[rank 0/2] a\n")
    assert printed(script["log"], "a", every_rank=True) == f"[rank {rank}/2] a\n"
    assert script["gathered"]({rank: None}) == [{0: None}, {1: None}]
    assert stopped(script["stop"], "why", sleeps=[10] * rank) == (2, "why")
    if warn := script.get("warn_of_other_batches"):
        assert printed(warn, {}, "a") == printed(warn, {"batch": "a"}, "a") == ""
        assert rank or "note: saved by b: " in printed(warn, {"batch": "b"}, "a")


@check(PAIR)
def take_newest(script):
    """The later epoch. In one epoch, that which has come further. Of equals, rank 0's."""
    rank = dist.get_rank()
    for ours, newest in (
            ({"next_epoch": 1 + 5 * rank}, 1), ({"next_epoch": 6, "images_done": rank}, 1),
            ({"next_epoch": 6, "written_by": str(rank)}, 0), ({"next_epoch": 6}, 0)):
        parts = trained(seed=rank, steps=5 if rank == newest else ours["next_epoch"] - 1)
        with patch.object(socket, "gethostname", lambda: f"node{rank}"):
            found, sent = script["take_newest"](ours, "a", *parts, CPU)
        assert found["machine"] == f"node{newest}" and found["next_epoch"] == 6 and sent
        for part, expected in zip(parts, trained(seed=newest, steps=5), strict=True):
            torch.testing.assert_close(part.state_dict(), expected.state_dict(), rtol=0, atol=0)


@check(PAIR)
def check_data(script):
    """All of the set counts, and one rank of each machine looks. (The ranks play machines.)"""
    rank = dist.get_rank()
    data, labels = torch.zeros(4, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    other_labels = TensorDataset(data, labels + rank)
    with patch.object(socket, "gethostname", lambda: f"node{rank}"):
        script["check_data"](other_labels, "images")  # the second rank of one machine is not asked
        with patch.dict(os.environ, LOCAL_RANK="0"):
            script["check_data"](TensorDataset(data, labels), "images")
            for wrong in (other_labels, TensorDataset(data + rank, labels)):
                status, message = stopped(script["check_data"], wrong, "images")
                assert status == 1 and "would train on different data" in message


# ---- One process alone ----


@check(ALONE)
def check_items(script):
    """What the loop cannot take is named, in one line."""
    def loader(dataset, batch_size=1, sampler=None, batch_sampler=None, **workers):  # none here
        return DataLoader(dataset, batch_size, sampler=sampler, batch_sampler=batch_sampler)

    class Failing(list):
        def __getitem__(self, index):
            raise ValueError("an error of the set's own")

    images, labels = torch.rand(3, 2), torch.zeros(3)
    good = TensorDataset(images, labels)
    with patch.dict(script, DataLoader=loader):
        found, _ = script["check_items"](good, [(images[0], 1)])
        assert torch.equal(found, images[[0, 2]])
        with pytest.raises(ValueError, match="an error of the set's own"):
            script["check_items"](good, Failing([1]))
        for wrong, word in (
                (images, "a batch is Tensor"), (TensorDataset(images[:0], labels[:0]), "is empty"),
                ([(object(), 1)], "found <class 'object'>"), ([(images[0], "seven")], "['Tensor'")):
            for name, sets in (("training", (wrong, good)), ("test", (good, wrong))):
                status, message = stopped(script["check_items"], *sets)
                assert status == 1 and f"the {name} set " in message and word in message


@check(ALONE)
def seed_all(script):
    """Three generators start from the seed, a large one, too."""
    def draw(seed):
        script["seed_all"](seed)
        return random.random(), numpy.random.random(), torch.rand(()).item()

    first, other, again = map(draw, (2**33 + 7, 2**33 + 8, 2**33 + 7))
    assert first == again and len({*first, *other}) == 6


@check(ALONE)
def save(script):
    """All is on the disk before the old file goes. (A full disk: test_train_by_steps)"""
    path, events, fsync, replace = pathlib.Path("saved.pt"), [], os.fsync, os.replace
    path.write_text("old")

    def watched_fsync(number):
        fsync(number)
        events.append(("on the disk", os.fstat(number).st_size))

    def watched_replace(source, target):
        events.append(("replaced", path.read_text(), os.path.dirname(source)))
        replace(source, target)

    with (patch.object(torch, "save", lambda state, file: file.write(state)),  # and flush nothing
          patch.object(torch, "load"), patch.object(os, "fsync", watched_fsync),
          patch.object(os, "replace", watched_replace)):
        script["save"](b"new state", "saved.pt")
    assert events == [("on the disk", 9), ("replaced", "old", "")]
    assert path.read_text() == "new state"
    names = os.listdir()
    with patch.object(os, "replace", side_effect=OSError("why")):
        status, message = stopped(script["save"], {}, "saved.pt")
    assert status == 1 and "cannot write saved.pt, which stays as it was" in message
    assert path.read_text() == "new state" and os.listdir() == names
    status, message = stopped(script["save"], {"rate": numpy.cos(1)}, "saved.pt")
    assert status == 1 and "saved.pt stays as it was" in message and "numpy" in message
    assert path.read_text() == "new state"


@check(ALONE)
def load_data(script):
    """Generated, whatever was drawn before: ten kinds of images, and others to test."""
    train, test, _ = script["load_data"](".")
    images, labels = script["generate_data"](10240)
    for whole, *parts in (images, train[:][0], test[:][0]), (labels, train[:][1], test[:][1]):
        assert torch.equal(torch.cat(parts), whole)
    assert (len(train), len(test), len(labels.unique())) == (8192, 2048, 10)
    assert images.float().mean().item() == pytest.approx(125.5, rel=1e-3)  # on each machine


@check(ALONE)
def batches_of(script):
    """A set in memory needs no workers. Those of 02 and 03 are their rank's own, in any Python."""
    pairs = TensorDataset(torch.arange(3), torch.arange(3))
    assert script["batches_of"](pairs, [[0]]).num_workers == 0
    workers = script["batches_of"]([*pairs], [[0]])
    assert workers.num_workers == 2 and workers.batch_sampler == [[0]]
    if end_with_rank := script.get("exit_with_rank"):
        assert workers.worker_init_fn is end_with_rank
        assert workers.multiprocessing_context.get_start_method() == "fork"


@check(ALONE)
def pick_device(script):
    """Where the CPU does it, one rank says why. (Which GPU it takes: test_pretended_gpus.py)"""
    pick = script["pick_device"]
    assert pick(1) == (CPU, "gloo") and not printed(pick, 0)
    old_driver = patch.object(torch.cuda, "device_count", lambda: 2)
    for machine, why in ((gpus(2, "mps"), "exchanges tensors of mps"),
                         (gpus(2, usable=False), "cannot use its GPU")):
        with machine, old_driver:
            assert pick(0) == (CPU, "gloo") and script["count_gpus"]() == 0
            assert why in printed(pick, 0) and not printed(pick, 1)


@check(ALONE)
def share_cores(script):
    """In a container that forbids to change the policy; on a Mac; with GPUs."""
    share = script["share_cores"]
    with (patch.object(os, "sched_getaffinity", lambda _: set(range(12))),
          patch.object(os, "cpu_count", lambda: 20),
          patch.object(os, "sched_setscheduler", side_effect=PermissionError) as schedule):
        for ranks, threads in ((2, 6), (5, 2), (99, 1)):
            share(ranks)
            assert torch.get_num_threads() == threads
        del os.sched_getaffinity  # as on a Mac
        share(2)
        assert torch.get_num_threads() == 10 and schedule.call_count == 4
        with gpus(1):
            share(2)
        assert schedule.call_count == 4


@check(ALONE)
def parse_args(script):
    """The defaults; and each option goes where it belongs. (Wrong calls: test_01..., ...)"""
    torchrun = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                "MASTER_ADDR", "MASTER_PORT")
    environment = dict.fromkeys(torchrun, "1")

    def parse(*words):
        with (patch.object(sys, "argv", [sys.argv[0], *map(str, words)]),
              patch.dict(os.environ, environment)):
            return vars(script["parse_args"]())

    expected = parse()
    stated = {"total_epochs": 5, "save_every": 1, "batch_size": 64, "data_dir": "data"}
    assert expected | stated == expected and expected.get("nprocs", 2) == 2
    with gpus(3):
        assert parse().get("nprocs", 3) == 3
    words = []
    for i, (name, default) in enumerate(expected.items()):
        expected[name] = f"x{i}" if isinstance(default, str) else i + 10
        words += [*[f"--{name.replace('_', '-')}"] * (i > 1), expected[name]]
    assert parse(*words) == expected


@check(ALONE)
def exit_with_launcher(script):
    """A rank looks now and then whether its parent is still torchrun."""
    parents, pauses, ended = iter([7, 7, 1]), [], threading.Event()
    with (patch.dict(script, LAUNCHER=7), patch.object(os, "getppid", lambda: next(parents)),
          patch.object(time, "sleep", pauses.append),
          patch.object(os, "_exit", lambda status: ended.set())):
        script["exit_with_launcher"]()
        assert ended.wait(20)
    assert len(pauses) == 2 and min(pauses) >= 0.1, "the watcher takes a whole core"


@check(ALONE)
def lock(script):
    """It ends with its process. A disk may have no locks. (A second job: test_faults.py.)"""
    if (rank := os.fork()) == 0:
        script["lock"]("left.pt")
        if os.fork() == 0:  # a worker of its loader, which lives on for some seconds
            time.sleep(5)
        os._exit(0)
    os.waitpid(rank, 0)
    script["lock"]("left.pt")
    with patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available")):
        assert "on a disk without locks" in printed(script["lock"], "unlocked.pt")


@check(ALONE)
def name_the_stopped(script):
    for error, there, whom in (
        ("Timed out waiting 3 ms", ["rank 0 failed in 4"], "rank 2: it has stopped"),
        ("a timeout", ["rank 0 failed in 3"], "rank 0, 2: it has stopped"),
        ("it has timed out", ["rank 0 failed in 4", "rank 2 failed in 4"], "others, which wait"),
        ("division by zero", [], None),
    ):
        store = dist.HashStore()
        for name in there:
            store.set(name, "")
        with (patch.object(time, "sleep"), patch.object(dist, "get_rank", lambda: 1),
              patch.object(dist, "get_world_size", lambda: 3),
              patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "4"})):
            said = printed(script["name_the_stopped"], RuntimeError(error), store)
        assert said.startswith(f"[rank 1/3] waited in vain for {whom}") if whom else said == ""
        assert store.check(["rank 1 failed in 4"]), "for the others, whatever the error"
    stuck = SimpleNamespace(set=lambda *_: threading.Event().wait())  # as a store that is gone
    join = threading.Thread.join
    with (patch.object(dist, "get_rank", lambda: 1), patch.object(dist, "get_world_size", int),
          patch.object(threading.Thread, "join", lambda thread, limit: join(thread, limit / 100))):
        said = printed(script["name_the_stopped"], RuntimeError("timed out"), stuck)
    assert "a store that does not answer" in said
    assert all(thread.daemon for thread in threading.enumerate()[1:]), "it would keep the rank"


@check(ALONE)
def ignore_sigterm(script):
    """A worker ends by a SIGTERM of its rank, and by no other one."""
    def work(pipe):
        script["ignore_sigterm"](0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        pipe.send("works on")
        pipe.poll(20)

    context = multiprocessing.get_context("fork")
    for ends_it in (lambda worker, pipe: worker.terminate(), lambda worker, pipe: pipe.send("")):
        ours, its = context.Pipe()
        worker = context.Process(target=work, args=(its,))
        worker.start()
        assert ours.poll(10) and ours.recv() == "works on"
        ends_it(worker, ours)
        worker.join(3)
        assert worker.exitcode == 0


@check(ALONE)
def explain(script):
    """Which cause it names. (A host that nobody knows, or that does not answer: test_03...)"""
    mesh = ValueError(f"Gloo connectFullMesh failed {'?' * 400}\nmore")
    unknown = "run launch/check_machines.py on each machine"
    restart = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}

    def cause(error=mesh, own="10.0.0.1", backend="gloo", **environment):
        def look_up(name, _):
            if own is None:
                raise OSError
            return [(None, None, None, None, (own, 0))]

        with (patch.dict(os.environ, {"MASTER_ADDR": "node1", "RANK": "1", **environment}),
              patch.object(socket, "gethostname", lambda: "node1"),
              patch.object(socket, "getaddrinfo", look_up)):
            line = script["explain"](error, backend)
        assert str(error)[:40] in line and len(line) < 600 and "\n" not in line
        return line

    loopback = "127.0.1.1"
    assert "node1 gives the others its address 127.0.1.1" in cause(own=loopback)
    assert "node1 does not know the name node1" in cause(own=None)
    assert "this is a restart, with a store" in cause(**restart)
    for line in (
            cause(), cause(own=loopback, backend="nccl"), cause(ValueError("why"), own=loopback),
            cause(dist.DistNetworkError("why"), RANK="0"),
            cause(**restart | {"TORCHELASTIC_RESTART_COUNT": "0"}),
            cause(**restart | {"TORCHELASTIC_USE_AGENT_STORE": "False"})):
        assert line.startswith(unknown)
