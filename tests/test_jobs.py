"""What jobs of 01, 02 and 03 do without saying so: two ranks, and what they call is written down.

The checks of single functions are in test_units.py.
"""

import contextlib
import fcntl
import functools
import gc
import hashlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
import tqdm
from support import ROOT, fork_ranks, fork_workers, forkserver, idx, variant
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

NAMES = {path.name[:2]: path.name for path in ROOT.glob("0[123]_*.py")}
RESUMING = ("02", "03")

# ---- Two ranks on 63 images, with a seed of their own ----

SEED = 7


def write_down():
    """Called in a child: what it calls from now on, in order, goes to a file of the process."""
    def note(name, **what):
        with open(f"calls {os.getpid()}", "a") as file:
            print(json.dumps([name, what]), file=file)

    def noted(owner, name, describe):
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*args, **kwargs):
            note(name, **describe(*args, **kwargs))
            return real(*args, **kwargs)

        setattr(owner, name, call)

    def kwargs(*_, **kwargs):
        return {name: value for name, value in kwargs.items()
                if isinstance(value, int | float | str | None)}  # fmt: skip

    def group(*args, timeout, **options):
        return kwargs(**options) | {
            "timeout": timeout.total_seconds(), "has_store": "store" in options,
            "threads": torch.get_num_threads(), "policy": os.sched_getscheduler(0),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
            "threads_end": all(t.daemon for t in threading.enumerate()[1:]),
            "watchers": threading.active_count() - 1,
        }  # fmt: skip

    def state(content, *_, **__):
        if not isinstance(content, dict):  # tensors that are sent are pickled in this way
            return {}
        return {name: value for name, value in content.items() if isinstance(value, int)} | {
            "momenta": len(content.get("optimizer", {}).get("state", []))}  # fmt: skip

    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # of whoever runs the tests
    # Twelve cores, so that a share of them is not what it would be anyhow.
    os.sched_getaffinity = lambda _: set(range(12))
    noted(dist, "rendezvous", lambda *_, timeout: {"timeout": timeout.total_seconds()})
    noted(dist, "PrefixStore", lambda prefix, store: {"prefix": prefix})
    noted(fcntl, "lockf", kwargs)
    noted(dist, "init_process_group", group)
    noted(dist, "barrier", kwargs)
    noted(dist, "destroy_process_group", kwargs)
    noted(gc, "collect", kwargs)
    noted(torch.optim.SGD, "__init__", kwargs)
    noted(torch, "save", state)
    noted(torch, "load", kwargs)
    noted(tqdm, "tqdm", kwargs)

    def weights(model):
        return hashlib.sha256(torch.cat([p.flatten() for p in model.parameters()])
                              .detach().numpy().tobytes()).hexdigest()  # fmt: skip

    noted(DDP, "__init__", lambda _, model, **k: {"weights": weights(model), **kwargs(**k)})
    noted(DDP, "forward", lambda wrapper, images: {"images": len(images), "on": wrapper.training})
    draw = DistributedSampler.__iter__

    def draw_and_note(sampler):
        items = list(draw(sampler))
        note("draw", epoch=sampler.epoch, seed=sampler.seed, items=items)
        return iter(items)

    DistributedSampler.__iter__ = draw_and_note


def fail_in_epoch_1():
    """Called in a child: a collective fails; what torchrun would read is to be in report.json."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.abspath("report.json")
    time.sleep = lambda seconds: None

    def set_epoch(sampler, epoch):
        raise RuntimeError("Timed out, says this test")

    DistributedSampler.set_epoch = set_epoch


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function: run a job of a script in a folder; return (result, {rank: calls})."""
    data = tmp_path_factory.mktemp("tiny")
    raw = data / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 63), ("t10k", 17)):
        images = torch.randint(256, (count, 28, 28), generator=torch.Generator().manual_seed(1))
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(images[:, 0, 0] % 10))

    def run(number, folder, epochs, save_every, before=(), world_size=2):
        for file in folder.glob("calls *"):
            file.unlink()
        script = variant(folder, NAMES[number], {"SEED = 0\n": f"SEED = {SEED}\n"})
        hooks = (write_down, *before)
        if number == "01":
            result = fork_workers(
                script, folder, world_size, before=hooks, total_epochs=epochs, batch_size=20,
                save_every=save_every, data_dir=str(data), checkpoint_path="checkpoint.pt",
            )  # fmt: skip
        else:
            result = fork_ranks(
                script, epochs, save_every, "--data-dir", data, "--batch-size", 20, cwd=folder,
                world_size=world_size, before=hooks,
            )  # fmt: skip
        calls = {}
        for file in folder.glob("calls *"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            ranks = [what["rank"] for name, what in lines if name == "init_process_group"]
            calls[ranks[0]] = lines
        return result, calls

    return run


def all_of(name, calls):
    return [what for other, what in calls if other == name]


@pytest.fixture(scope="module", params=sorted(NAMES))
def first_job(request, job, tmp_path_factory):
    """(the script's number, its folder, result, calls): three epochs, a snapshot every two."""
    folder = tmp_path_factory.mktemp(f"job{request.param}")
    result, calls = job(request.param, folder, 3, 2)
    assert result.status == 0 and sorted(calls) == [0, 1], result.output
    return request.param, folder, result, calls


def test_a_job_sets_up_its_process_and_its_group(first_job):
    number, folder, _, calls = first_job
    for rank in (0, 1):
        [group] = all_of("init_process_group", calls[rank])
        expected = {"rank": rank, "world_size": 2, "device_id": None, "threads": 6}
        expected |= {"timeout": 600, "policy": os.SCHED_BATCH}
        expected |= {"interface": None if number == "03" else socket.if_indextoname(1)}
        expected |= {"threads_end": True, "watchers": int(number != "01")}
        if number == "01":
            assert group.pop("init_method").startswith("file://")
        assert group == expected | {"has_store": number != "01"}
        assert all_of("rendezvous", calls[rank]) == [{"timeout": 600}] * (number == "02")
        prefixes = all_of("PrefixStore", calls[rank])
        assert prefixes[:1] == [{"prefix": "attempt 0"}] * (number == "02")
        assert len(all_of("lockf", calls[rank])) == (rank == 0 and number != "01")
        ends = [name for name, _ in calls[rank]][-2:]
        assert ends == ["collect", "destroy_process_group"]
        assert all_of("tqdm", calls[rank]) == [
            {"leave": False, "disable": None if rank == 0 else True}] * 3  # fmt: skip
    lock = {"02": "snapshot.pt.lock", "03": f"snapshot.pt.{socket.gethostname()}.lock"}.get(number)
    assert [file.name for file in folder.glob("*.lock")] == ([lock] if lock else [])


def test_a_job_trains_whole_batches_of_its_own_images(first_job):
    number, _, _, calls = first_job
    net = runpy.run_path(str(ROOT / NAMES[number]))["Net"]
    for rank in (0, 1):
        # 31 of 63 images for each rank; three batches of ten. Before them, one for the proof, or an
        # image of the test set to settle the buckets.
        passes = all_of("forward", calls[rank])
        assert [its["images"] for its in passes] == [10 if number == "01" else 1] + [10] * 9
        assert [its["on"] for its in passes] == [False] + [True] * 9
        assert all_of("__init__", calls[rank])[0] == {"lr": 0.03, "momentum": 0.9}
        assert {its["seed"] for its in all_of("draw", calls[rank])} == {SEED}
    draws = [{its["epoch"]: its["items"] for its in all_of("draw", calls[rank])} for rank in (0, 1)]
    for epoch in (1, 2, 3):
        mine, its = draws[0][epoch], draws[1][epoch]
        assert len(mine) == len(its) == 31 and len({*mine, *its}) == 62
    orders = [tuple(items) for of_rank in draws for items in of_rank.values()]
    assert len({*orders}) == len(orders)
    torch.manual_seed(SEED)
    weights = torch.cat([p.flatten() for p in net().parameters()]).detach()
    expected = {"weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest()}
    expected |= {"gradient_as_bucket_view": True}
    assert [all_of("__init__", calls[rank])[1:] for rank in (0, 1)] == [[expected]] * 2


def test_one_rank_of_a_job_saves_and_speaks(first_job):
    number, _, result, calls = first_job
    key, momenta = ("epoch", 0) if number == "01" else ("next_epoch", 6)
    later = int(number != "01")
    expected = [{key: epoch + later, "momenta": momenta} for epoch in (2, 3)]
    if number == "03":
        expected = [saved | {"images_done": 0} for saved in expected]
    saves = [[its for its in all_of("save", calls[rank]) if its] for rank in (0, 1)]
    assert saves == [expected, []]
    assert result.saved() == [2, 3] and list(result.epochs()) == [1, 2, 3]
    said, other = result.lines(0), result.lines(1)
    own = [line for line in other if ", cpu, gloo" in line]
    assert other == own and len(own) == int(number != "03")
    assert said.count("data: 63 + 17 images of MNIST") == 1
    assert said.count("batch size 20: 2 ranks x 10 images") == 1
    assert said[-1].startswith("2 replicas are identical, sha256 ")
    assert not any("resumed" in line or "nothing left" in line for line in said)
    if number == "01":
        assert len([line for line in said if "gradient" in line]) == 3


@pytest.mark.parametrize("number", RESUMING)
def test_a_finished_job_loads_safely_and_trains_no_more(job, tmp_path, number):
    job(number, tmp_path, 1, 1)
    result, calls = job(number, tmp_path, 1, 1)
    assert result.status == 0 and result.epochs() == {}, result.output
    assert len([line for line in result.lines(0) if "resumed from snapshot.pt" in line]) == 1
    assert len([line for line in result.lines(0) if "nothing left to train" in line]) == 1
    for rank in (0, 1):
        assert all_of("load", calls[rank]) == [{"map_location": "cpu", "weights_only": True}]
        assert not [its for its in all_of("save", calls[rank]) if "next_epoch" in its]


@pytest.mark.parametrize("number", RESUMING)
def test_an_error_ends_a_rank_and_reaches_torchrun(job, tmp_path, number):
    result, calls = job(number, tmp_path, 1, 1, [fail_in_epoch_1], world_size=1)
    assert result.status == 1 and "RuntimeError: Timed out, says this test" in result.output
    said = "[rank 0/1] waited in vain for others, which wait elsewhere"
    assert (said in result.output) == (number == "03")
    report = json.loads((tmp_path / "report.json").read_text())
    assert "Timed out, says this test" in report["message"]["message"]
    assert not all_of("destroy_process_group", calls[0])


# ---- Without a launcher ----


def hang_in_epoch_1(ready):
    """Called in a child: tell the test when training begins and a watcher has looked, and wait."""
    looked, sleep = threading.Event(), time.sleep

    def look(seconds):
        if threading.current_thread() is not threading.main_thread():
            looked.set()
        sleep(seconds)

    def set_epoch(sampler, epoch):
        assert looked.wait(30), "the watcher does not pause: it takes a whole core"
        os.write(ready, b"x")
        signal.pause()

    time.sleep, DistributedSampler.set_epoch = look, set_epoch


def launcher(number, folder, ready):
    """In a forked process: start a rank of a job, wait until it trains, and die."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inside, outside = os.pipe()
    if os.fork() == 0:
        os.chdir(folder)
        os.environ |= {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        sys.argv = [NAMES[number], "1"]
        hang_in_epoch_1(outside)
        os.write(ready.fileno(), f"{os.getpid()}\n".encode())
        try:
            runpy.run_path(str(ROOT / NAMES[number]), run_name="__main__")
        finally:
            os._exit(1)
    os.close(outside)
    os._exit(0 if os.read(inside, 1) == b"x" else 1)


@pytest.mark.parametrize("number", RESUMING)
def test_a_rank_ends_with_its_launcher(tmp_path, number):
    """It holds the writing end of a pipe, so the pipe ends when the rank does."""
    theirs, ours = socket.socketpair()
    process = forkserver.Process(target=launcher, args=(number, str(tmp_path), theirs))
    process.start()
    theirs.close()
    ours.settimeout(60)
    pid = int(ours.recv(100))
    try:
        process.join(90)
        assert process.exitcode == 0, "the rank did not come to its training"
        assert ours.recv(100) == b"", "the rank goes on without its launcher"
    except TimeoutError:
        raise AssertionError("the rank goes on without its launcher") from None
    finally:
        process.kill()
        process.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
