"""The functions of 01, 02 and 03 one by one: what each returns, leaves, prints, and refuses.

Two forked ranks, or one process alone, call all the functions of a script, each in a check below.
Whole jobs: test_jobs.py. What these tests would not notice: python tests/mutants.py.
"""

import contextlib
import copy
import errno
import fcntl
import functools
import hashlib
import io
import json
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
import traceback
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import ROOT, forkserver, pretended, wait_until, write_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

NAMES = {path.name[:2]: path.name for path in ROOT.glob("0[123]_*.py")}
CPU = torch.device("cpu")
ALL, RESUMING, LAST = ("01", "02", "03"), ("02", "03"), ("03",)
PAIR, ALONE = {}, {}  # {check: the scripts for which two ranks call it, or one process}


def check(kind, scripts):
    def add(function):
        kind[function.__name__] = function, scripts
        return function

    return add


def names_of(number):
    """The names that the functions of a script see, so that a check can put others in place."""
    return runpy.run_path(str(ROOT / NAMES[number]))["parse_args"].__globals__


def call_checks(number, rank, folder):
    """In a forked process: call the checks; write {check: None, or its traceback} to a file."""
    own = pathlib.Path(folder, f"of {rank}")
    own.mkdir()
    os.chdir(own)
    sys.argv = [NAMES[number]]
    script, results = names_of(number), {}
    for name, (function, scripts) in (ALONE if rank is None else PAIR).items():
        if number not in scripts:
            continue
        try:
            if rank is not None:  # a new group each time: what is left of one does not matter
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2,
                    timeout=timedelta(seconds=30))  # fmt: skip
                os.environ["LOCAL_RANK"] = str(rank)
            with contextlib.redirect_stdout(Output()):
                function(script)
            if rank is not None:
                dist.barrier()  # else one may leave while the other still connects
            results[name] = None
        except BaseException:  # SystemExit, too
            results[name] = traceback.format_exc()
        (own / "results").write_text(json.dumps(results))
        if rank is not None:
            if results[name]:
                break  # which ends the process, so that the other rank does not wait for it
            dist.destroy_process_group()


@functools.cache
def results(number):
    """[{check: None or a traceback}] of a script: alone, and of each rank."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        processes = [forkserver.Process(target=call_checks, args=(number, rank, folder))
                     for rank in (None, 0, 1)]  # fmt: skip
        for process in processes:
            process.start()
        for process in processes:
            process.join(90)
            process.kill()
            process.join()
        files = [pathlib.Path(folder, f"of {rank}", "results") for rank in (None, 0, 1)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def pytest_generate_tests(metafunc):
    for fixture, kind in (("alone", ALONE), ("pair", PAIR)):
        if fixture in metafunc.fixturenames:
            found = [(number, name) for name, (_, its) in kind.items() for number in its]
            metafunc.parametrize(fixture, found, ids="-".join)


def test_alone(alone):
    number, name = alone
    result = results(number)[0].get(name, "the process did not come to this")
    assert result is None, result


def test_two_ranks(pair):
    number, name = pair
    for rank, of_rank in enumerate(results(number)[1:]):
        result = of_rank.get(name, "an earlier check failed")
        assert result is None, f"rank {rank}: {result}"


# ---- What the checks need ----


class Output(io.StringIO):
    """A text file that knows whether all was flushed."""

    unwritten = False

    def write(self, text):
        self.unwritten = True
        return super().write(text)

    def flush(self):
        self.unwritten = False


def printed(function, *arguments, **options):
    """What function prints, and flushes."""
    with contextlib.redirect_stdout(Output()) as output:
        function(*arguments, **options)
    assert not output.unwritten
    return output.getvalue()


def stopped(function, *arguments, sleeps=()):
    """(status, message) with which function stops the process, after these pauses."""
    done = []
    with (
        pytest.raises(SystemExit) as error,
        contextlib.redirect_stderr(Output()) as output,
        patch.object(time, "sleep", done.append),
    ):
        function(*arguments)
    assert done == list(sleeps) and not output.unwritten
    start, _, message = output.getvalue().partition(": error: ")
    assert start in (*NAMES.values(), "") and message.count("\n") <= 1
    return error.value.code, message.removeprefix(f"{socket.gethostname()}: ").rstrip("\n")


class Parked:
    """A tensor on no device, until somebody moves it to one."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, non_blocking=False):
        return self.tensor


class Sensitive(nn.Module):
    """A model that shows in which mode it is called: BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
        self.calls = []  # (images, whether without gradients)

    def forward(self, images):
        self.calls.append((len(images), not torch.is_grad_enabled()))
        return self.layers(images)


def state(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextlib.contextmanager
def sums_are_made(dtype):
    """One sum is made: of this type, on the device that was given."""
    with patch.object(torch, "zeros", wraps=torch.zeros) as zeros:
        yield
    sums = [call.kwargs for call in zeros.mock_calls if call.args == ((),)]
    assert sums == [{"dtype": dtype, "device": CPU}]


def mean_of_two(spoil, calls):
    """A hook for DDP: the mean over two ranks, as always, plus spoil."""
    def hook(_, bucket):
        calls.append(bucket.index())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 2 + spoil)

    return hook


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


def all_of(model, optimizer):
    momenta = [its["momentum_buffer"] for its in optimizer.state_dict()["state"].values()]
    return [*model.state_dict().values(), *momenta]


def gpus(*args, **options):
    return patch.multiple(torch.accelerator, **pretended(*args, **options))


# ---- Two ranks ----


@check(PAIR, ALL)
def train_epoch(script):
    """What it reports of two batches, of 3 and of 5 images a rank. (The steps: test_jobs.py.)"""
    torch.manual_seed(3)
    images, labels, model = torch.rand(2, 8, 4), torch.randint(3, (2, 8)), nn.Linear(4, 3)
    expected = cross_entropy(model(images.flatten(0, 1)), labels.flatten()).item()
    rank, bars, clock = dist.get_rank(), [], iter([10.0, 14.0])
    batches = [(Parked(images[rank, part]), Parked(labels[rank, part]))
               for part in (slice(0, 3), slice(3, 8))]  # fmt: skip
    changed = {"tqdm": lambda batches, **options: bars.append(options) or batches,
               "time": SimpleNamespace(perf_counter=lambda: next(clock))}  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    event = [threading.Event()] * ("leave_on_sigterm" in script)
    with patch.dict(script, changed), sums_are_made(torch.float64):
        loss, *rest = script["train_epoch"](DDP(model), batches, optimizer, CPU, *event)
    assert loss == pytest.approx(expected, rel=1e-6) and rest == [16 / 4] + [16] * len(event)
    assert bars == [{"leave": False, "disable": None if rank == 0 else True}]


@check(PAIR, ALL)
def evaluate(script):
    """Every image once, though 2,003 are no multiple of two; the model stays as it was."""
    model = Sensitive()
    images = torch.rand(2003, 4)
    labels = copy.deepcopy(model).eval()(images).argmax(dim=1)
    labels[::7] += 1
    before = state(model)
    model.layers[0].running_mean += dist.get_rank()  # as after a step: rank 0's are to be used
    wrapper = nn.Module()
    wrapper.module = model
    with sums_are_made(torch.int64):
        accuracy = script["evaluate"](wrapper, TensorDataset(images, labels), CPU)
    assert accuracy == sum(1 for i in range(2003) if i % 7) / 2003
    assert equal(state(model), before) and model.training and wrapper.training
    sizes, modes = zip(*model.calls, strict=True)
    assert sum(sizes) == 1002 - dist.get_rank() and max(sizes) <= 1000 and all(modes)


@check(PAIR, RESUMING)
def settle_buckets(script):
    model, syncs = Sensitive(), []
    before, wrapper = state(model), DDP(model)
    wrapper.register_comm_hook(None, mean_of_two(0, syncs))
    script["settle_buckets"](wrapper, torch.rand(6, 4), torch.arange(6) % 3)
    assert equal(state(model), before) and syncs, "no backward through DDP"
    assert all(p.grad is None for p in model.parameters())
    assert model.training and wrapper.training


@check(PAIR, ("01",))
def check_gradients(script):
    torch.manual_seed(5)
    images = torch.randint(256, (2, 8, 28, 28), dtype=torch.uint8)
    labels, rank = torch.randint(10, (2, 8)), dist.get_rank()
    net = script["Net"]()

    def gradient(images, labels):
        alone = copy.deepcopy(net)
        cross_entropy(alone(images), labels).backward()
        return torch.cat([p.grad.flatten() for p in alone.parameters()])

    whole = gradient(images.flatten(0, 1), labels.flatten())
    off = max((gradient(images[r], labels[r]) - whole).abs().max() for r in (0, 1))
    mine = images[rank], labels[rank], CPU
    lines = printed(script["check_gradients"], DDP(net), *mine).splitlines()
    assert all(p.grad is None for p in net.parameters())
    if rank == 0:
        told = float(lines[1].split(": ")[1].split()[0])
        assert told == pytest.approx((off / whole.abs().max()).item(), rel=0.1)
        assert float(lines[2].split(": ")[1]) < 1e-5
    model = DDP(Sensitive())  # with BatchNorm and dropout, and it stays as it was
    before = state(model)
    printed(script["check_gradients"], model, torch.rand(2, 8, 4)[rank], labels[rank] % 3, CPU)
    assert equal(state(model), before) and model.training and model.module.training
    # What DDP leaves on one rank alone is wrong; nan is wrong, too.
    for spoil in (1e-3, torch.nan):
        wrapper = DDP(copy.deepcopy(net))
        wrapper.register_comm_hook(None, mean_of_two(rank * spoil, []))
        with pytest.raises(RuntimeError, match="DDP's gradient is off by"):
            script["check_gradients"](wrapper, *mine)


@check(PAIR, ALL)
def check_replicas(script):
    module, rank = nn.Linear(2, 2), dist.get_rank()
    weights = module.state_dict()
    for tensor in weights.values():
        tensor.fill_(1)
    digest = hashlib.sha256(torch.ones(6).numpy().tobytes()).hexdigest()[:12]
    said = "" if rank else f"[rank 0/2] 2 replicas are identical, sha256 {digest}\n"
    assert printed(script["check_replicas"], module) == said
    weights["bias"][1] += rank * 1e-6
    with pytest.raises(RuntimeError, match=f"the replicas differ: sha256 {digest}, "):
        script["check_replicas"](module)
    module = nn.BatchNorm1d(2).to(torch.bfloat16)  # numpy does not know this type
    printed(script["check_replicas"], module)
    module.running_mean += rank
    with pytest.raises(RuntimeError, match="the replicas differ: sha256 "):
        script["check_replicas"](module)


@check(PAIR, ALL)
def what_ranks_say(script):
    """When a rank stops, rank 0 speaks at once, the others if they are the only ones that live."""
    rank = dist.get_rank()
    assert printed(script["log"], "a") == ("" if rank else "[rank 0/2] a\n")
    assert printed(script["log"], "a", every_rank=True) == f"[rank {rank}/2] a\n"
    assert script["gathered"]({rank: None}) == [{0: None}, {1: None}]
    assert stopped(script["stop"], "why", sleeps=[10] * rank) == (2, "why")
    assert stopped(script["stop"], "why", 3, sleeps=[10] * rank) == (3, "why")
    if warn := script.get("warn_of_other_batches"):
        assert printed(warn, {}, "a") == printed(warn, {"batch": "a"}, "a") == ""
        assert rank or "note: saved by b: " in printed(warn, {"batch": "b"}, "a")


@check(PAIR, LAST)
def take_newest(script):
    rank = dist.get_rank()
    with patch.object(socket, "gethostname", lambda: f"node{rank}"):
        # The later epoch; in one epoch, that which has come further; of one age but of two
        # writers, or of writers that are not known (02's), rank 0's.
        for ours, newer in (
            ({"next_epoch": 1 + 5 * rank}, 1), ({"next_epoch": 6, "images_done": rank}, 1),
            ({"next_epoch": 6, "written_by": str(rank)}, 0), ({"next_epoch": 6}, 0),
        ):  # fmt: skip
            steps = [ours["next_epoch"] - 1, 5][newer == rank]
            model, optimizer = trained(rank, steps)
            found, sent = script["take_newest"](ours, "a", model, optimizer, CPU)
            assert found["machine"] == f"node{newer}" and found["next_epoch"] == 6 and sent
            assert equal(all_of(model, optimizer), all_of(*trained(newer, 5)))
        assert len(all_of(model, optimizer)) == 4


@check(PAIR, LAST)
def check_data(script):
    """Ranks that play machines: all of the set counts, and one rank of each machine looks."""
    rank = dist.get_rank()
    data, labels = torch.zeros(4, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    same, other_labels = TensorDataset(data, labels), TensorDataset(data, labels + rank)
    with patch.object(socket, "gethostname", lambda: f"node{rank}"):
        script["check_data"](other_labels, "images")  # the second rank of one machine is not asked
        os.environ["LOCAL_RANK"] = "0"
        script["check_data"](same, "images")
        for wrong in (other_labels, TensorDataset(data + rank, labels)):
            status, message = stopped(script["check_data"], wrong, "images")
            assert status == 1 and message.startswith("the machines would train on different data")
            assert "node0 has 4 images, sha256 " in message and "node1 has 4 images, " in message


# ---- One process alone ----


@check(ALONE, ALL)
def check_items(script):
    """What the loop cannot take is named, in one line."""
    def batches_of(dataset, lists):  # without workers: the process of this check cannot have any
        if isinstance(dataset, TensorDataset):
            return DataLoader(dataset, batch_size=None, sampler=lists)
        return DataLoader(dataset, batch_sampler=lists)

    images, labels = torch.zeros(3, 2), torch.zeros(3)
    good = TensorDataset(images, labels)
    with patch.dict(script, batches_of=batches_of):
        script["check_items"](good, [(images[0], 1)])
        for wrong, word in (
            (TensorDataset(images[:0], labels[:0]), "is empty"),
            ([(object(), 1)], "found <class 'object'>"), (images, "a batch is Tensor"),
            ([(images[0], "seven")], "a batch is ['Tensor', "),
        ):  # fmt: skip
            for name, sets in (("training", (wrong, good)), ("test", (good, wrong))):
                status, message = stopped(script["check_items"], *sets)
                assert status == 1 and f"the {name} set " in message and word in message


@check(ALONE, ALL)
def save(script):
    """At every step, what a power cut or a crash would leave."""
    path, events = pathlib.Path("saved.pt"), []
    path.write_text("old")
    fsync, replace, content = os.fsync, os.replace, {"a": torch.arange(9)}

    def watched_fsync(number):
        events.append(("fsync", os.fstat(number).st_size))
        fsync(number)

    def watched_replace(source, target):
        assert path.read_text() == "old" and os.path.dirname(source) == os.path.dirname(target)
        events.append(("replace", os.stat(source).st_size))
        replace(source, target)

    def save_in_pieces(state, file):  # and flush nothing, on which nobody may rely
        file.write(saved[:100])
        file.write(saved[100:])

    torch.save(content, "whole.pt")
    saved = pathlib.Path("whole.pt").read_bytes()
    with (
        patch.object(torch, "save", save_in_pieces),
        patch.object(os, "fsync", watched_fsync),
        patch.object(os, "replace", watched_replace),
    ):
        script["save"](content, "saved.pt")
    assert events == [("fsync", len(saved)), ("replace", len(saved))], "not all was on the disk"
    assert path.read_bytes() == saved
    names = sorted(os.listdir())
    for owner, name, error in (
        (os, "replace", OSError("x")), (os, "fsync", OSError("x")),
        (torch, "save", RuntimeError("x")),
    ):  # fmt: skip
        with patch.object(owner, name, side_effect=error):
            assert stopped(script["save"], {}, "saved.pt") == (
                1, "cannot write saved.pt, which stays as it was; is the disk full? (x)"
            )  # fmt: skip
        assert path.read_bytes() == saved and sorted(os.listdir()) == names
    status, message = stopped(script["save"], content, "no/such.pt")
    assert status == 1 and message.startswith("cannot write no/such.pt")


@check(ALONE, ALL)
def seed_all(script):
    def draw(seed):
        script["seed_all"](seed)
        return [random.random(), numpy.random.rand(), torch.rand(()).item()]

    first, other, again = draw(1), draw(2**40), draw(1)
    assert first == again and not set(first) & set(other)


@check(ALONE, ALL)
def model_and_generated_data(script):
    """They are those of the other scripts; and all ranks make the same."""
    other = names_of("02" if sys.argv[0] == NAMES["01"] else "01")
    nets = []
    for names in (script, other):
        torch.manual_seed(0)
        nets.append(names["Net"]())
    images, labels = script["generate_data"](2000)
    assert equal(state(nets[0]), state(nets[1])) and equal([nets[0](images)], [nets[1](images)])
    assert equal(other["generate_data"](2000), (images, labels))
    assert images.shape == (2000, 28, 28) and images.dtype == torch.uint8
    assert labels.shape == (2000,) and sorted(set(labels.tolist())) == list(range(10))


@check(ALONE, ALL)
def load_data(script):
    train, test, source = script["load_data"](".")
    assert source.startswith("generated images") and (len(train), len(test)) == (8192, 2048)
    whole = script["generate_data"](10240)
    for i, tensor in enumerate(whole):
        assert torch.equal(torch.cat([train.tensors[i], test.tensors[i]]), tensor)
    folder = write_digits(pathlib.Path("digits")) / "MNIST" / "raw"
    assert script["load_data"]("digits")[2] == "images of MNIST"
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"")
    status, message = stopped(script["load_data"], "digits")
    assert status == 1 and "python download_mnist.py --data-dir digits" in message


@check(ALONE, ALL)
def pick_device(script):
    pick, table = script["pick_device"], dist.Backend.default_device_backend_map
    assert pick(1) == (CPU, "gloo") and not printed(pick, 0)
    for kind, backend in (("cuda", "nccl"), ("xpu", "xccl"), ("mtia", "own")):
        with (
            gpus(2, kind), patch.dict(table, mtia="own"),
            patch.object(torch.accelerator, "set_device_index") as set_device,
        ):  # fmt: skip
            assert pick(1) == (torch.device(kind, 1), backend) and not printed(pick, 0)
        assert [call.args for call in set_device.mock_calls] == [(1,), (0,)]
    # Where the CPU does it, one rank says why: no backend, or a driver that is too old.
    old = patch.object(torch.cuda, "device_count", lambda: 2)
    for machine, why in ((gpus(2, "mps"), "exchanges tensors of mps"),
                         (gpus(2, "mtia"), "exchanges tensors of mtia"),
                         (gpus(2, usable=False), "cannot use its GPU")):  # fmt: skip
        with machine, old:
            assert pick(0) == (CPU, "gloo") and script["count_gpus"]() == 0
            assert why in printed(pick, 0) and not printed(pick, 1)


@check(ALONE, ALL)
def share_cores(script):
    share, real = script["share_cores"], os.sched_getaffinity
    with (
        patch.object(os, "sched_getaffinity", lambda _: set(range(12))),
        patch.object(os, "cpu_count", lambda: 20),
        patch.object(os, "sched_setscheduler") as schedule,
    ):
        with gpus(1):
            share(3)
        assert torch.get_num_threads() == 4 and not schedule.called
        schedule.side_effect = PermissionError  # as in some containers
        for ranks, threads in ((2, 6), (5, 2), (99, 1)):
            share(ranks)
            assert torch.get_num_threads() == threads
        assert [call.args[:2] for call in schedule.mock_calls] == [(0, os.SCHED_BATCH)] * 3
        del os.sched_getaffinity  # as on a Mac
        share(2)
        assert torch.get_num_threads() == 10
        os.sched_getaffinity = real


@check(ALONE, ("01", "02"))
def listen_locally(script):
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    script["listen_locally"]()
    assert os.environ["GLOO_SOCKET_IFNAME"] == socket.if_indextoname(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    script["listen_locally"]()
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "eth7"


PARSED = {
    "01": {"nprocs": 2, "checkpoint_path": "checkpoint.pt"},
    "02": {"snapshot_path": "snapshot.pt", "crash_epoch": None, "local_rank": None},
    "03": {"snapshot_path": "snapshot.pt", "timeout": 600, "local_rank": None},
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
}  # fmt: skip


@check(ALONE, ALL)
def parse_args(script):
    number = sys.argv[0][:2]
    expected = {"total_epochs": 5, "save_every": 1, "batch_size": 64, "data_dir": "data"}
    expected |= PARSED[number]

    def parse(*words):
        with (
            patch.object(sys, "argv", [NAMES[number], *map(str, words)]),
            patch.dict(os.environ, {} if number == "01" else TORCHRUN),
        ):
            return vars(script["parse_args"]())

    assert parse() == expected
    with gpus(3):
        assert parse() == expected | ({"nprocs": 3} if number == "01" else {})
    with gpus(1, usable=False):  # no refusal, and two processes on the CPU
        assert parse() == expected
    words = []
    for i, (name, default) in enumerate(expected.items()):
        expected[name] = f"x{i}" if isinstance(default, str) else i + 10
        words += [*[f"--{name.replace('_', '-')}"] * (i > 1), expected[name]]
    assert parse(*words) == expected
    for wrong in ([0], [1, 0], ["many"], ["--batch-size=x"], ["--local-rank=x"]):
        assert stopped(parse, *wrong)[0] == 2


@check(ALONE, ("01",))
def the_parent(script):
    """main starts the processes; what it says when they end badly, or when somebody interrupts."""
    calls, child = [], SimpleNamespace(terminate=lambda: calls.append("terminate"))

    def spawn(worker, args, nprocs):
        calls.append((worker, args[0], args[2].nprocs, nprocs))
        assert os.path.isdir(os.path.dirname(args[1].removeprefix("file://")))
        raise error

    died = functools.partial(mp.ProcessExitedException, "process 1 died", 1, 1)
    for error, status, message in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (died(3), 3, ""),
        (died(-9, "SIGKILL"), 1, "process 1 died; out of memory? The other processes were ended"),
    ):
        calls.clear()
        with (
            patch.object(sys, "argv", [NAMES["01"], "--nprocs=4"]),
            patch.object(mp, "spawn", spawn), patch.object(mp, "active_children", lambda: [child]),
        ):  # fmt: skip
            assert stopped(script["main"]) == (status, message)
        assert calls == [(script["worker"], 4, 4, 4), "terminate"]


def in_child(function):
    """What function returns in a forked process, which then ends."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return json.loads(os.read(file.fileno(), 10_000))


@check(ALONE, RESUMING)
def exit_with_launcher(script):
    """A rank looks after torchrun now and then, and ends when torchrun is gone."""
    def launch():
        read, write = os.pipe()
        if (rank := os.fork()) == 0:
            script["LAUNCHER"], getppid, looks = os.getppid(), os.getppid, []
            with patch.object(os, "getppid", lambda: looks.append(1) or getppid()):
                script["exit_with_launcher"]()
                time.sleep(0.7)
                os.write(write, bytes([min(len(looks), 255)]))
                time.sleep(60)
            os._exit(0)
        return rank, os.read(read, 1)[0]

    rank, looks = in_child(launch)
    assert 1 <= looks <= 3, "the watcher does not look, or takes a whole core"
    stat = pathlib.Path(f"/proc/{rank}/stat")
    wait_until(lambda: not stat.exists() or ") Z " in stat.read_text(), "the rank ends", timeout=20)


@check(ALONE, RESUMING)
def lock(script):
    def leave_a_worker():
        script["lock"]("left.pt")
        if (worker := os.fork()) == 0:  # a loader's, which lives on for some seconds
            time.sleep(60)
            os._exit(0)
        return worker

    script["lock"]("locked.pt")
    for _ in ("the first other job", "the second"):
        status, message = in_child(lambda: stopped(script["lock"], "locked.pt"))
        assert status == 1 and message.startswith("another job is running with locked.pt")
    worker = in_child(leave_a_worker)
    script["lock"]("left.pt")
    os.kill(worker, signal.SIGKILL)
    status, message = stopped(script["lock"], "no/such.pt")
    assert status == 2 and message.startswith("cannot write no/such.pt (No such file or directory)")
    with patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available")):
        assert "on a disk without locks" in printed(script["lock"], "unlocked.pt")


@check(ALONE, LAST)
def name_the_stopped(script):
    timeouts = ("Timed out waiting 3 ms", "a timeout", "it has timed out")
    for error, there, whom in (
        *((error, ["rank 0 failed in 4"], "rank 2: it has stopped") for error in timeouts),
        (timeouts[0], ["rank 0 failed in 3"], "rank 0, 2: it has stopped"),
        (timeouts[0], ["rank 0 failed in 4", "rank 2 failed in 4"], "others, which wait elsewhere"),
        ("division by zero", [], None),
    ):
        store = dist.HashStore()
        for name in there:
            store.set(name, "")
        with (
            patch.object(time, "sleep"), patch.object(dist, "get_rank", lambda: 1),
            patch.object(dist, "get_world_size", lambda: 3),
            patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "4"}),
        ):  # fmt: skip
            said = printed(script["name_the_stopped"], RuntimeError(error), store)
        assert said.startswith(f"[rank 1/3] waited in vain for {whom}") if whom else said == ""
        assert store.check(["rank 1 failed in 4"]), "for the others, whatever the error"


@check(ALONE, LAST)
def save_if_ours(script):
    path = pathlib.Path("ours.pt")

    def save(writer, epoch, known=(1, 0, None)):
        content = {"next_epoch": epoch, "images_done": 0, "written_by": writer}
        script["save_if_ours"](content, "ours.pt", known)

    save("us", 2)
    save("us", 3)
    for known in (1, 0, None), (2, 0, "us"):  # we have written since they read it
        status, message = stopped(save, "others", 4, known)
        assert status == 1 and message.startswith("another job, or a lost part of this one, has ")
    assert torch.load(path)["written_by"] == "us"
    save("others", 4, (3, 0, "us"))
    path.unlink()  # by somebody who means it
    save("us", 5)
    assert torch.load(path)["written_by"] == "us"


@check(ALONE, LAST)
def explain(script):
    checked = "run launch/check_machines.py on each machine"
    restart = "this is a restart, with a store that still holds"
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    network, mesh, said = dist.DistNetworkError, "Gloo connectFullMesh failed", ""
    for own, environment, backend, kind, said, cause in (
        ("127.0.1.1", {}, "gloo", ValueError, mesh, "gives the others its address 127.0.1.1"),
        ("10.0.0.1", {}, "gloo", ValueError, mesh, checked),
        ("127.0.1.1", {}, "nccl", ValueError, mesh, checked),
        ("127.0.1.1", {}, "gloo", ValueError, "why", checked),
        (None, {}, "gloo", ValueError, mesh, "node1 does not know the name node1"),
        ("10.0.0.1", {"MASTER_ADDR": "node9"}, "gloo", OSError, "", "not know the name node9"),
        ("10.0.0.1", {"RANK": "0"}, "gloo", network, mesh, checked),
        ("10.0.0.1", {}, "gloo", network, mesh, "rank 0 serves the store on node1, and doe"),
        ("10.0.0.1", elastic, "gloo", ValueError, mesh, restart),
        ("10.0.0.1", elastic | {"TORCHELASTIC_RESTART_COUNT": "0"}, "gloo", OSError, "", checked),
        ("10.0.0.1", elastic | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "gloo", OSError, "",
         checked),
    ):
        known = {"node1": own} if own else {}

        def look_up(name, _, known=known):
            if name not in known:
                raise OSError
            return [(None, None, None, None, (known[name], 0))]

        environment = {"MASTER_ADDR": "node1", "RANK": "1", **environment}
        with (
            patch.dict(os.environ, environment, clear=True),
            patch.object(socket, "gethostname", lambda: "node1"),
            patch.object(socket, "getaddrinfo", look_up),
        ):
            line = script["explain"](kind(f"{said} {'?' * 400}\nmore"), backend)
        assert cause in line and line.endswith("??)") and "\n" not in line, line
        assert line.count("?") < 300 + (not said)


@check(ALONE, ("02",))
def crash_halfway(script):
    kills = []
    with (
        patch.object(os, "kill", lambda *args: kills.append(args)),
        patch.dict(script, log=lambda message, every_rank: kills.append(every_rank)),
    ):
        assert list(script["crash_halfway"](list(range(10)))) == [0, 1, 2, 3, 4]
    assert kills == [True, (os.getpid(), signal.SIGKILL)]
