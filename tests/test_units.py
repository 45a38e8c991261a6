"""The functions of 01, 02 and 03 one by one.

Two forked ranks, or one process alone, call all the functions of a script, each in a check below:
its asserts run there. test_jobs.py has what only a whole job shows; python tests/mutants.py tells
what these tests would not notice.
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
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import ROOT, forkserver, idx, write_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

NAMES = {path.name[:2]: path.name for path in ROOT.glob("0[123]_*.py")}
CPU = torch.device("cpu")
ALL, RESUMING, LAST = ("01", "02", "03"), ("02", "03"), ("03",)
PAIR, ALONE = {}, {}  # {check: the scripts for which two ranks call it, or one process}


def check(kind, scripts):
    def add(function):
        kind[function.__name__] = function, scripts
        return function

    return add


def call_checks(number, rank, folder):
    """In a forked process: call the checks; write {check: None, or its traceback} to a file."""
    own = pathlib.Path(folder, f"of {rank}")
    own.mkdir()
    os.chdir(own)
    sys.argv = [NAMES[number]]
    # The names that the functions of the script see, so that a check can put others in their place.
    script = runpy.run_path(str(ROOT / NAMES[number]))["parse_args"].__globals__
    results = {}
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


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function of a script's number: [{check: None or a traceback}], alone and for each rank."""

    @functools.cache
    def call(number):
        folder = tmp_path_factory.mktemp(number)
        processes = [
            forkserver.Process(target=call_checks, args=(number, rank, str(folder)))
            for rank in (None, 0, 1)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(90)
        finally:
            for process in processes:
                process.kill()
                process.join()
        files = [folder / f"of {rank}" / "results" for rank in (None, 0, 1)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    return call


def found(kind):
    return [(number, name) for name, (_, scripts) in kind.items() for number in scripts]


def pytest_generate_tests(metafunc):
    for fixture, kind in (("alone", ALONE), ("pair", PAIR)):
        if fixture in metafunc.fixturenames:
            ids = [f"{number}-{name}" for number, name in found(kind)]
            metafunc.parametrize(fixture, found(kind), ids=ids)


def test_alone(results, alone):
    number, name = alone
    result = results(number)[0].get(name, "the process did not come to this check")
    assert result is None, result


def test_two_ranks(results, pair):
    number, name = pair
    for rank, of_rank in enumerate(results(number)[1:]):
        result = of_rank.get(name, "an earlier check failed")
        assert result is None, f"rank {rank}: {result}"


# ---- What the checks need ----


class Output(io.StringIO):
    """A text file that knows how it was written to."""

    def __init__(self):
        super().__init__()
        self.writes, self.unwritten = [], 0

    def write(self, text):
        self.writes += [text] if text else []
        self.unwritten += len(text)
        return super().write(text)

    def flush(self):
        self.unwritten = 0


def printed(function, *arguments, **options):
    """What function prints: in a single write, and flushed."""
    with contextlib.redirect_stdout(Output()) as output:
        function(*arguments, **options)
    assert output.unwritten == 0 and len(output.writes) <= 1
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
    assert done == list(sleeps) and output.unwritten == 0
    start, _, message = output.getvalue().partition(": error: ")
    assert start in (*NAMES.values(), "") and message.count("\n") <= 1
    return error.value.code, message.removeprefix(f"{socket.gethostname()}: ").rstrip("\n")


class Parked:
    """A tensor on no device, until somebody moves it to the CPU."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, non_blocking=False):
        assert device == CPU
        return self.tensor

    def __len__(self):
        return len(self.tensor)


class Sensitive(nn.Module):
    """A model that shows in which mode it is called: BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
        self.calls = []  # (images, whether in inference mode)

    def forward(self, images):
        self.calls.append((len(images), torch.is_inference_mode_enabled()))
        return self.layers(images)


def state(model):
    """All of a model, and the random state: what a call must leave as it was."""
    return [tensor.clone() for tensor in [*model.state_dict().values(), torch.get_rng_state()]]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextlib.contextmanager
def sums_are_made(script, dtype):
    """The script makes one sum: of this type, on the device that it was given."""
    with patch.object(torch, "zeros", wraps=torch.zeros) as zeros:
        yield
    assert [call.kwargs for call in zeros.mock_calls if call.args == ((),)] == [
        {"dtype": dtype, "device": CPU}
    ]


def mean_of_two(spoil, calls=None):
    """A hook for DDP: the mean over two ranks, as always, plus spoil."""

    def hook(_, bucket):
        if calls is not None:
            calls.append(bucket.index())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 2 + spoil)

    return hook


# ---- Two ranks ----


@check(PAIR, ALL)
def train_epoch(script):
    """Batches of 3 and 5 images a rank, against one process that sees all of them."""
    torch.manual_seed(3)
    images, labels = torch.rand(2, 8, 4), torch.randint(3, (2, 8))
    alone, model = nn.Linear(4, 3), nn.Linear(4, 3)
    model.load_state_dict(alone.state_dict())
    expected, optimizer = 0.0, torch.optim.SGD(alone.parameters(), lr=0.5)
    batches, rank, parts = [], dist.get_rank(), (slice(0, 3), slice(3, 8))
    for part in parts:
        batches.append((Parked(images[rank, part]), Parked(labels[rank, part])))
        optimizer.zero_grad()
        loss = cross_entropy(alone(images[:, part].flatten(0, 1)), labels[:, part].flatten())
        loss.backward()
        optimizer.step()
        expected += loss.item() * labels[:, part].numel() / 16
    bars, clock = [], iter([10.0, 14.0])

    def bar(batches, **options):
        bars.append(options)
        return batches

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    changed = {"tqdm": bar, "time": SimpleNamespace(perf_counter=lambda: next(clock))}
    with patch.dict(script, changed), sums_are_made(script, torch.float64):
        call = DDP(model), batches, optimizer, CPU
        if "leave_on_sigterm" in script:
            loss, speed, images = script["train_epoch"](*call, threading.Event())
            assert images == 16
        else:
            loss, speed = script["train_epoch"](*call)
    assert loss == pytest.approx(expected, rel=1e-6) and speed == 16 / 4
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine - its).abs().max() < 1e-6
    assert bars == [{"leave": False, "disable": None if rank == 0 else True}]


@check(PAIR, ALL)
def evaluate(script):
    """Every image once, though 2,003 are no multiple of two."""
    model = Sensitive()
    images = torch.rand(2003, 4)
    labels = copy.deepcopy(model).eval()(images).argmax(dim=1)
    labels[::7] += 1
    right = sum(1 for i in range(2003) if i % 7)
    before = state(model)
    model.layers[0].running_mean += dist.get_rank()  # as after a step: rank 0's are to be used

    class Images(TensorDataset):
        def __getitem__(self, indices):
            return tuple(map(Parked, super().__getitem__(indices)))

    wrapper = nn.Module()
    wrapper.module = model
    with sums_are_made(script, torch.int64):
        assert script["evaluate"](wrapper, Images(images, labels), CPU) == right / 2003
    assert equal(state(model)[:-1], before[:-1]) and model.training and wrapper.training
    sizes, modes = zip(*model.calls, strict=True)
    assert sum(sizes) == 1002 - dist.get_rank() and max(sizes) <= 1000 and all(modes)


@check(PAIR, RESUMING)
def settle_buckets(script):
    model = Sensitive()
    before, passes, syncs = state(model), [], []
    wrapper = DDP(model)
    model.layers[2].weight.register_hook(passes.append)
    wrapper.register_comm_hook(None, mean_of_two(0, syncs))
    script["settle_buckets"](wrapper, torch.rand(6, 4), torch.arange(6) % 3)
    after = state(model)
    torch.set_rng_state(before[-1])
    torch.rand(6, 4)  # the images above
    assert equal(after, [*before[:-1], torch.get_rng_state()])
    assert len(passes) == 1 and syncs, "no backward through DDP"
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
    wrapper, mine = DDP(net), (images[rank], labels[rank], CPU)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        script["check_gradients"](wrapper, *mine)
    lines = output.getvalue().splitlines()
    assert all(p.grad is None for p in net.parameters())
    if rank == 0:
        told = float(lines[1].split(": ")[1].split()[0])
        assert told == pytest.approx((off / whole.abs().max()).item(), rel=0.1)
        assert float(lines[2].split(": ")[1]) < 1e-5
    # It holds for BatchNorm and dropout, and leaves the model as it was.
    model = DDP(Sensitive())
    before = state(model)
    rows = torch.rand(2, 8, 4)[rank]
    with contextlib.redirect_stdout(io.StringIO()):
        script["check_gradients"](model, rows, labels[rank] % 3, CPU)
    assert equal(state(model)[:-1], before[:-1]) and model.training and model.module.training
    # What DDP leaves on one rank alone is wrong; nan is wrong, too.
    for spoil in (1e-3, torch.nan):
        wrapper = DDP(copy.deepcopy(net))
        wrapper.register_comm_hook(None, mean_of_two(rank * spoil))
        with pytest.raises(RuntimeError, match="DDP's gradient is off by"):
            script["check_gradients"](wrapper, *mine)


@check(PAIR, ALL)
def check_replicas(script):
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    weights = model.module.state_dict()
    for tensor in weights.values():
        tensor.fill_(1)
    said = printed(script["check_replicas"], model)
    digest = hashlib.sha256(torch.ones(6).numpy().tobytes()).hexdigest()[:12]
    rank = dist.get_rank()
    assert said == ("" if rank else f"[rank 0/2] 2 replicas are identical, sha256 {digest}\n")
    weights["bias"][1] += rank * 1e-6
    with pytest.raises(RuntimeError, match=f"the replicas differ: sha256 {digest}, "):
        script["check_replicas"](model)
    model.module = nn.BatchNorm1d(2).to(torch.bfloat16)  # numpy does not know this type
    printed(script["check_replicas"], model)
    model.module.running_mean += rank
    with pytest.raises(RuntimeError, match="the replicas differ: sha256 "):
        script["check_replicas"](model)


@check(PAIR, ALL)
def log_and_gathered(script):
    rank = dist.get_rank()
    assert printed(script["log"], "a") == ("" if rank else "[rank 0/2] a\n")
    assert printed(script["log"], "a", every_rank=True) == f"[rank {rank}/2] a\n"
    assert script["gathered"]({rank: None}) == [{0: None}, {1: None}]


@check(PAIR, ALL)
def stop(script):
    """Rank 0 speaks at once; the others when they are the only ones that still live."""
    sleeps = [10] * dist.get_rank()
    assert stopped(script["stop"], "why", sleeps=sleeps) == (2, "why")
    assert stopped(script["stop"], "why", 3, sleeps=sleeps) == (3, "why")


def trained(script, seed, steps):
    """A model and its optimizer, after some steps."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(3, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


def momenta(optimizer):
    return [its["momentum_buffer"] for its in optimizer.state_dict()["state"].values()]


@check(PAIR, LAST)
def take_newest(script):
    rank = dist.get_rank()
    newest, its_optimizer = trained(script, 1, 5)
    with (
        patch.object(socket, "gethostname", lambda: f"node{rank}"),
    ):
        model, optimizer = trained(script, rank, 5 * rank)
        found = script["take_newest"]({"next_epoch": 1 + 5 * rank}, "a", model, optimizer, CPU)
        assert found == ({"next_epoch": 6, "machine": "node1"}, True)
        assert equal(model.state_dict().values(), newest.state_dict().values())
        assert equal(momenta(optimizer), momenta(its_optimizer)) and len(momenta(optimizer)) == 2
        # In one epoch, that which has come further; of one age but of two writers, or of writers
        # that are not known (02's), rank 0's.
        for ours, newer in (({"images_done": rank}, 1), ({"written_by": str(rank)}, 0), ({}, 0)):
            model, optimizer = trained(script, rank, 5)
            ours = {"next_epoch": 6, **ours}
            found, _ = script["take_newest"](ours, "a", model, optimizer, CPU)
            assert found["machine"] == f"node{newer}"
            its_model, its_optimizer = trained(script, newer, 5)
            assert equal(model.state_dict().values(), its_model.state_dict().values())
            assert equal(momenta(optimizer), momenta(its_optimizer))


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
            for machine in ("node0", "node1"):
                assert f"{machine} has 4 images, sha256 " in message


# ---- One process alone ----


@check(ALONE, ALL)
def check_items(script):
    """What the loop cannot take is named, in one line."""
    images, labels = torch.zeros(3, 2), torch.zeros(3)
    good = TensorDataset(images, labels)
    script["check_items"](good, [(images[0], 1)])
    for wrong, word in ((TensorDataset(images[:0], labels[:0]), "is empty"),
                        ([(object(), 1)], "['object', 'int']"), (images, "are [[(2,)], [(2,)]]"),
                        ([(images[0], "seven")], "[(2,), 'str']"),
                        ([(images[0], 1), (images[0, :1], 1)], "[(2,), 'int'], [(1,), 'int']")):
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
    size = path.stat().st_size
    assert events == [("fsync", size), ("replace", size)], "not all was flushed to the disk"
    assert torch.equal(torch.load(path, weights_only=True)["a"], content["a"])
    before, names = path.read_bytes(), sorted(os.listdir())
    for owner, name, error in (
        (os, "replace", OSError("x")), (os, "fsync", OSError("x")),
        (torch, "save", RuntimeError("x")),
    ):  # fmt: skip
        with patch.object(owner, name, side_effect=error):
            assert stopped(script["save"], content, "saved.pt") == (
                1, "cannot write saved.pt, which stays as it was; is the disk full? (x)"
            )  # fmt: skip
        assert path.read_bytes() == before and sorted(os.listdir()) == names
    status, message = stopped(script["save"], content, "no/such.pt")
    assert status == 1 and message.startswith("cannot write no/such.pt")


@check(ALONE, RESUMING)
def resume(script):
    model, optimizer = trained(script, 1, 5)
    other, its_optimizer = trained(script, 2, 0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "next_epoch": 6, "batch": "all"}, "resume.pt")  # fmt: skip
    assert script["resume"]("none.pt", other, its_optimizer) == {"next_epoch": 1}
    with patch.object(torch, "load", wraps=torch.load) as load:
        assert script["resume"]("resume.pt", other, its_optimizer) == {
            "next_epoch": 6, "batch": "all"}  # fmt: skip
    assert load.call_args.kwargs == {"map_location": "cpu", "weights_only": True}
    assert equal(model.state_dict().values(), other.state_dict().values())
    assert equal(momenta(optimizer), momenta(its_optimizer)) and momenta(optimizer)


@check(ALONE, ALL)
def net(script):
    """Seeded and run on images; their scale does not swamp the first weights."""
    torch.manual_seed(0)
    net, images = script["Net"](), torch.randint(256, (3, 28, 28), dtype=torch.uint8)
    layers = list(net.layers)
    assert net(images).shape == (3, 10)
    x = images.unsqueeze(1) / 255
    for layer in layers:
        x = layer(x)
    assert (net(images) - x).abs().max() < 1e-6
    assert sum(p.numel() for p in net.parameters()) == 16 * 26 + 32 * 401 + 10 * 513


@check(ALONE, ALL)
def generate_data(script):
    torch.manual_seed(1)
    images, labels = script["generate_data"](2000)
    torch.manual_seed(2)
    assert equal(script["generate_data"](2000), (images, labels)), "not the same on all ranks"
    assert images.shape == (2000, 28, 28) and images.dtype == torch.uint8
    assert labels.shape == (2000,) and sorted(set(labels.tolist())) == list(range(10))
    # Half of the pixels are 45 lighter. All have noise, from 0 to 209.
    for share in ((images >= 210).double().mean(), (images < 45).double().mean()):
        assert 0.08 < share < 0.14
    # 49 shifts of each pattern: two images of one label have the same one 41 times in 2,000.
    one = images[labels == 0].double().flatten(1)
    one -= one.mean(dim=1, keepdim=True)
    alike = (one[1:] @ one[0]) / (one[1:].norm(dim=1) * one[0].norm())
    assert 0.001 < (alike > 0.08).double().mean() and alike.max() < 0.3


@check(ALONE, ALL)
def load_data(script):
    train, test, source = script["load_data"](".")
    assert source.startswith("generated images") and (len(train), len(test)) == (8192, 2048)
    whole = script["generate_data"](10240)
    for i, tensor in enumerate(whole):
        assert torch.equal(torch.cat([train.tensors[i], test.tensors[i]]), tensor)
    folder = write_digits(pathlib.Path("digits"))
    train, test, source = script["load_data"]("digits")
    assert source == "images of MNIST" and (len(train), len(test)) == (1024, 256)
    for name, its in (("train", train), ("t10k", test)):
        raw = [(folder / f"MNIST/raw/{name}-{kind}-ubyte").read_bytes()
               for kind in ("images-idx3", "labels-idx1")]  # fmt: skip
        assert [idx(tensor) for tensor in its.tensors] == raw
    (folder / "MNIST/raw/t10k-labels-idx1-ubyte").write_bytes(b"")
    status, message = stopped(script["load_data"], "digits")
    assert status == 1 and "python download_mnist.py --data-dir digits" in message


@check(ALONE, ALL)
def pick_device(script):
    assert not printed(script["pick_device"], 0)
    assert script["pick_device"](1) == (CPU, "gloo")
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "set_device") as set_device,
    ):
        assert script["pick_device"](1) == (torch.device("cuda", 1), "nccl")
    set_device.assert_called_once_with(1)
    with gpus(2, usable=False):  # the driver is too old: one rank says so, and the CPU does it
        assert script["pick_device"](0) == (CPU, "gloo")
        assert "cannot use the GPU of this machine" in printed(script["pick_device"], 0)
        assert not printed(script["pick_device"], 1)


@check(ALONE, ALL)
def share_cores(script):
    share = script["share_cores"]
    with (
        patch.object(os, "sched_getaffinity", lambda _: set(range(12)), create=True),
        patch.object(os, "cpu_count", lambda: 20),
        patch.object(os, "sched_setscheduler", create=True) as schedule,
    ):
        for ranks, threads in ((2, 6), (5, 2), (99, 1)):
            share(ranks)
            assert torch.get_num_threads() == threads
        batch = getattr(os, "SCHED_BATCH", None)
        if batch is not None:
            assert [call.args[:2] for call in schedule.mock_calls] == [(0, batch)] * 3
        schedule.side_effect = PermissionError
        share(2)
        schedule.reset_mock()
        with patch.object(torch.cuda, "is_available", lambda: True):
            share(3)
        assert torch.get_num_threads() == 4 and not schedule.called
        del os.sched_getaffinity
        share(2)
        assert torch.get_num_threads() == 10
        os.sched_getaffinity = None  # for patch, to put the real one back


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


def gpus(count, usable=True):
    """The driver counts so many GPUs, and torch can use them, or cannot."""
    return patch.multiple(torch.cuda, device_count=lambda: count, is_available=lambda: usable)


@check(ALONE, ALL)
def parse_args(script):
    number = sys.argv[0][:2]
    expected = {"total_epochs": 5, "save_every": 1, "batch_size": 64, "data_dir": "data"}
    expected |= PARSED[number]
    with patch.dict(os.environ, {} if number == "01" else TORCHRUN):
        with patch.object(sys, "argv", [NAMES[number]]):
            assert vars(script["parse_args"]()) == expected
            for count in (2, 3):
                with gpus(count):
                    found = vars(script["parse_args"]())
                    assert found == expected | ({"nprocs": count} if number == "01" else {})
            with gpus(1, usable=False):  # no refusal, and two processes on the CPU
                assert vars(script["parse_args"]()) == expected
        words = []
        for i, (name, default) in enumerate(expected.items()):
            option = [f"--{name.replace('_', '-')}"] * (i > 1)
            expected[name] = f"x{i}" if isinstance(default, str) else i + 10
            words += [*option, str(expected[name])]
        with patch.object(sys, "argv", [NAMES[number], *words]):
            assert vars(script["parse_args"]()) == expected
        for argument in ([0], [1, 0], ["many"], ["--batch-size=x"], ["--local-rank=x"]):
            with patch.object(sys, "argv", [NAMES[number], *map(str, argument)]):
                assert stopped(script["parse_args"])[0] == 2
        with patch.object(sys, "argv", [NAMES[number]]):
            two = ["--nprocs=2"] if number == "01" else []
            with gpus(1), patch.object(sys, "argv", [NAMES[number], *two]):
                status, message = stopped(script["parse_args"])
                assert status == 2 and "and there are 1: use --n" in message
            wrong = {"LOCAL_RANK": "0"} if number == "01" else {}
            with patch.dict(os.environ, wrong, clear=True):
                assert "torchrun" in stopped(script["parse_args"])[1]
    if number == "03":  # by hand: a process a machine
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        hand = {name: TORCHRUN[name] for name in names}
        with patch.object(sys, "argv", [NAMES[number]]):
            for missing in hand:
                rest = {name: value for name, value in hand.items() if name != missing}
                with patch.dict(os.environ, rest, clear=True):
                    assert "start it with: torchrun" in stopped(script["parse_args"])[1]
            with patch.dict(os.environ, hand, clear=True):
                script["parse_args"]()
                assert os.environ["LOCAL_RANK"] == "0" and os.environ["LOCAL_WORLD_SIZE"] == "1"
    if number == "02":
        several = patch.dict(os.environ, TORCHRUN | {"WORLD_SIZE": "4"})
        with several, patch.object(sys, "argv", [NAMES[number]]):
            assert "this script is for one machine" in stopped(script["parse_args"])[1]


@check(ALONE, ("01",))
def the_parent(script):
    """main starts the processes; what it says when they end badly, or when somebody interrupts."""
    calls, children = [], [SimpleNamespace(terminate=lambda: calls.append("terminate"))]

    def spawn(worker, args, nprocs):
        calls.append((worker, args[0], args[2].nprocs, nprocs))
        assert os.path.isdir(os.path.dirname(args[1].removeprefix("file://")))
        raise error

    died = functools.partial(mp.ProcessExitedException, "process 1 died", 1, 1)
    ends = [
        (KeyboardInterrupt(), 130, "interrupted"),
        (died(3), 3, ""),
        (died(-9, "SIGKILL"), 1, "process 1 died; out of memory? The other processes were ended"),
    ]
    with (
        patch.object(sys, "argv", [NAMES["01"], "--nprocs=4"]),
        patch.object(mp, "spawn", spawn),
        patch.object(mp, "active_children", lambda: children),
    ):
        for error, status, message in ends:
            calls.clear()
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
def lock(script):
    def leave_a_worker():
        script["lock"]("left.pt")
        if (worker := os.fork()) == 0:  # a loader's, which lives on for some seconds
            time.sleep(60)
            os._exit(0)
        return worker

    script["lock"]("locked.pt")
    for again in (False, True):
        status, message = in_child(lambda: stopped(script["lock"], "locked.pt"))
        assert status == 1 and message.startswith("another job is running with locked.pt")
    worker = in_child(leave_a_worker)
    script["lock"]("left.pt")
    os.kill(worker, signal.SIGKILL)
    status, message = stopped(script["lock"], "no/such.pt")
    assert status == 2 and message.startswith("cannot write no/such.pt (No such file or directory)")
    with patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available")):
        assert "on a disk without locks" in printed(script["lock"], "unlocked.pt")


@check(PAIR, RESUMING)
def warn_of_other_batches(script):
    warn, rank = script["warn_of_other_batches"], dist.get_rank()
    assert printed(warn, {}, "a") == printed(warn, {"batch": "a"}, "a") == ""
    assert rank or "note: saved by b: not" in printed(warn, {"batch": "b"}, "a")


class FakeStore(dict):
    """A store in which others have left what it is made with, and its calls in order."""

    timeout, error = timedelta(seconds=7), None

    def __init__(self, *there):
        super().__init__(dict.fromkeys(there))
        self.calls = []

    def set_timeout(self, timeout):
        self.calls.append(("timeout", timeout))

    def set(self, name, value):
        if self.error:
            raise self.error
        self.calls.append(("set", name))
        self[name] = value

    def check(self, names):
        return all(name in self for name in names)

    def wait(self, names, timeout):
        if not self.check(names):
            raise dist.DistStoreError("timeout")


@check(ALONE, RESUMING)
def roll_call(script):
    store = FakeStore("rank 0", "rank 2")
    assert script["roll_call"](store, 1, 3) is None
    status, message = stopped(script["roll_call"], FakeStore("rank 2"), 0, 4)
    assert status == 1 and message.startswith("rank 1, rank 3 did not come within 7 s")


@check(ALONE, LAST)
def name_the_stopped(script):
    timeouts = ("Timed out waiting 3 ms", "a timeout", "it has timed out")
    for error, there, whom in (
        *((error, ["rank 0 failed in 4"], "rank 2: it has stopped") for error in timeouts),
        (timeouts[0], ["rank 0 failed in 3"], "rank 0, 2: it has stopped"),
        (timeouts[0], ["rank 0 failed in 4", "rank 2 failed in 4"], "others, which wait elsewhere"),
        ("division by zero", [], None),
    ):
        store = FakeStore(*there)
        with (
            patch.object(time, "sleep"), patch.object(dist, "get_rank", lambda: 1),
            patch.object(dist, "get_world_size", lambda: 3),
            patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "4"}),
        ):  # fmt: skip
            said = printed(script["name_the_stopped"], RuntimeError(error), store)
        assert said.startswith(f"[rank 1/3] waited in vain for {whom}") if whom else said == ""
        assert "rank 1 failed in 4" in store, "for the others, whatever the error"


@check(ALONE, LAST)
def save_if_ours(script):
    path, save = pathlib.Path("ours.pt"), script["save_if_ours"]

    def call(writer, epoch, known=(1, 0, None)):
        return {"next_epoch": epoch, "images_done": 0, "written_by": writer}, "ours.pt", known

    save(*call("us", 2))
    save(*call("us", 3))
    for known in (1, 0, None), (2, 0, "us"):  # we have written since they read it
        status, message = stopped(save, *call("others", 4, known))
        assert status == 1 and message.startswith("another job, or a lost part of this one, has ")
    assert torch.load(path)["written_by"] == "us"
    save(*call("others", 4, (3, 0, "us")))
    path.unlink()  # by somebody who means it
    save(*call("us", 5))
    assert torch.load(path)["written_by"] == "us"


@check(ALONE, LAST)
def explain(script):
    checked = "run launch/check_machines.py on each machine"
    address = "gives the others its address 127.0.1.1"
    restart = "this is a restart, with a store that still holds"
    unknown = "node1 does not know the name node1"
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    for own, environment, cause in (
        ("127.0.1.1", {}, address),
        ("10.0.0.1", {}, checked),
        ("127.0.1.1", {"backend": "nccl"}, checked),
        ("127.0.1.1", {"said": "why"}, checked),
        (None, {}, unknown),
        ("10.0.0.1", {"RANK": "0", "error": dist.DistNetworkError}, checked),
        ("10.0.0.1", {"error": dist.DistNetworkError}, "rank 0 serves the store on node1, and doe"),
        ("10.0.0.1", elastic, restart),
        ("10.0.0.1", elastic | {"TORCHELASTIC_RESTART_COUNT": "0"}, checked),
        ("10.0.0.1", elastic | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, checked),
        ("10.0.0.1", {"TORCHELASTIC_RESTART_COUNT": "1"}, checked),
    ):
        known = {"node1": own} if own else {}

        def look_up(name, _, known=known):
            if name not in known:
                raise OSError
            return [(None, None, None, None, (known[name], 0))]

        environment = {"MASTER_ADDR": "node1", "RANK": "1", **environment}
        backend, kind = environment.pop("backend", "gloo"), environment.pop("error", ValueError)
        said = environment.pop("said", "Gloo connectFullMesh failed")
        with (
            patch.dict(os.environ, environment, clear=True),
            patch.object(socket, "gethostname", lambda: "node1"),
            patch.object(socket, "getaddrinfo", look_up),
        ):
            line = script["explain"](kind(f"{said} {'?' * 400}\nmore"), backend)
            assert cause in line and line.endswith("??)") and "\n" not in line, line
            assert line.count("?") < 300
            if own and kind is ValueError:  # then another name may be unknown
                os.environ["MASTER_ADDR"] = "node9"
                line = script["explain"](OSError(), backend)
                assert "node1 does not know the name node9" in line or cause == restart


@check(ALONE, ("02",))
def crash_halfway(script):
    kills = []
    with (
        patch.object(os, "kill", lambda *args: kills.append(args)),
        patch.dict(script, log=lambda *args, **kwargs: kills.append((args[0][:16], kwargs))),
    ):
        assert list(script["crash_halfway"](list(range(10)))) == [0, 1, 2, 3, 4]
    assert kills == [("crash on purpose", {"every_rank": True}), (os.getpid(), signal.SIGKILL)]
