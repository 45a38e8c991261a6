"""01, 02 and 03 as whole jobs: two ranks end with the weights of one process that sees all images.

And: what a rank sets up, who writes, what is left; a finished job goes on when asked; replicas that
differ are not saved; a wrong call ends in words. Of 01: mp.spawn starts it; its proof can fail.
"""

import gc
import json
import os
import re
import runpy
import shutil
import socket

import pytest
import torch
import torch.distributed as dist
from digits import digest, idx
from forked import fork, fork_ranks, fork_workers, limit_file_size, report_errors, variant
from started import ROOT, files
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

NAMES = {path.name[:2]: path.name for path in sorted(ROOT.glob("0[123]_*.py"))}
RESUMING = ("02", "03")
SAVED = {"01": "checkpoint.pt", "02": "snapshot.pt", "03": "snapshot.pt"}
SEED = 7  # one of the tests' own


def images(count):
    return torch.randint(256, (count, 28, 28), generator=torch.Generator().manual_seed(count))


def labels(count):
    return images(count)[:, 0, 0] % 10


def tell():
    """Called in a child: it tells what it is as it joins, what it writes, and how it leaves."""

    def say(what, **facts):
        print(f"told {json.dumps([what, dist.get_rank(), facts])}\n", end="", flush=True)

    def after(owner, name, tell_it):
        def call(*args, **options):
            found = function(*args, **options)
            tell_it(*args, **options)
            return found

        function = getattr(owner, name)
        setattr(owner, name, call)

    def written(_, target, **__):
        if isinstance(target, str):  # torch.save: 01, which does not move a file into place
            views = [
                its.gradient_as_bucket_view for its in gc.get_objects() if isinstance(its, DDP)
            ]
            say("wrote", target=target, gradients_in_buckets=views)

    def load_and_tell(path, to=None, map_location=None, old=torch.load, **options):
        if isinstance(path, str):  # not what a rank has sent
            say("loaded", to=to or map_location, no_code=options.get("weights_only"))
        return old(path, "cpu", **options)

    def leave_and_tell(old=dist.destroy_process_group):
        say("left", holds_ddp=any(isinstance(thing, DDP) for thing in gc.get_objects()))
        old()

    torch.set_num_threads(2)  # which the scripts change
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # of whoever runs the tests
    torch.load, dist.destroy_process_group = load_and_tell, leave_and_tell
    after(os, "replace", written)
    after(torch, "save", written)
    after(
        dist,
        "init_process_group",
        lambda *_, device_id=None, timeout=None, **__: say(
            "joined",
            timeout=getattr(timeout, "seconds", None),
            device_id=device_id,
            threads=torch.get_num_threads(),
            policy=os.sched_getscheduler(0),
            interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        ),
    )


def told(what, result):
    """[(rank, facts)] of what the ranks told, by rank."""
    lines = [json.loads(line) for line in re.findall("^told (.*)$", result.output, re.MULTILINE)]
    found = [(rank, facts) for its, rank, facts in lines if its == what]
    return sorted(found, key=lambda pair: pair[0])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function that runs a job of a script in a folder, on 63 images for training, 17 to test."""
    data = tmp_path_factory.mktemp("tiny")
    raw = data / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 63), ("t10k", 17)):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images(count)))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels(count)))

    def run(number, folder, *more, changes="", before=(), epochs=3, world_size=2, batch_size=17):
        script = variant(folder, NAMES[number], f"SEED = {SEED}\n{changes}")
        how = {"cwd": folder, "world_size": world_size, "before": (tell, *before)}
        if number != "01":
            words = ("--data-dir", data, "--batch-size", batch_size, *more)
            return fork_ranks(script, epochs, 2, *words, **how)
        args = {"total_epochs": epochs, "save_every": 2, "batch_size": batch_size}
        return fork_workers(
            script, **how, **args, data_dir=str(data), checkpoint_path="checkpoint.pt"
        )

    return run


@pytest.fixture(scope="module", params=sorted(NAMES))
def first_job(request, job, tmp_path_factory):
    """(the script's number, its folder, result): three epochs, saved every two and at the end."""
    folder = tmp_path_factory.mktemp(f"job{request.param}")
    result = job(request.param, folder).ok()
    return request.param, folder, result


def test_a_job_sets_up_its_processes_and_one_rank_saves_and_speaks(first_job):
    number, folder, result = first_job
    joined = {
        "timeout": 600 if number == "03" else None,
        "device_id": None,
        "threads": 1,
        "policy": os.SCHED_BATCH,
        "interface": socket.if_indextoname(1) if number in ("01", "02") else None,
    }
    assert told("joined", result) == [(0, joined), (1, joined)]
    assert told("left", result) == [(rank, {"holds_ddp": False}) for rank in (0, 1)]
    wrote = (0, {"target": SAVED[number], "gradients_in_buckets": [True]})
    assert told("wrote", result) == [wrote] * 2 and result.saved() == [2, 3]
    assert {file.name for file in folder.iterdir()} == {SAVED[number], NAMES[number]}
    said = result.lines(0)
    assert result.lines(1) == []
    assert len([line for line in said if "63 + 17 images of MNIST" in line]) == 1
    assert len([line for line in said if re.search(r"batch\b.* 2 ranks x 8 images", line)]) == 1
    assert re.fullmatch(r"2 replicas are identical, sha256 \w{12}", said[-1])
    assert not any("resumed" in line or "nothing left" in line for line in said)


def test_a_job_trains_as_one_process_that_sees_all_images(first_job):
    """62 of 63 images can be shared. Of its 31, a rank takes three batches of eight."""
    number, folder, result = first_job
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    net = runpy.run_path(str(ROOT / NAMES[number]))["Net"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    assert list(result.epochs()) == [1, 2, 3]
    assert min(int(speed) for speed in re.findall(r"(\d+) images/s", result.output)) > 0
    for epoch, (loss, accuracy) in result.epochs().items():
        order = torch.randperm(63, generator=torch.Generator().manual_seed(SEED + epoch))
        losses = []
        for batch in order[:48].split(16):
            optimizer.zero_grad()
            losses.append(cross_entropy(net(images(63)[batch]), labels(63)[batch]))
            losses[-1].backward()
            optimizer.step()
        assert loss == pytest.approx(sum(losses).item() / 3, abs=1e-3)
        right = (net(images(17)).argmax(dim=1) == labels(17)).double().mean().item()
        assert accuracy == pytest.approx(right, abs=1e-4)
    saved = torch.load(folder / SAVED[number], weights_only=True)
    for name, tensor in net.state_dict().items():
        assert (saved["model"][name] - tensor).abs().max() < 1e-5
    if number == "01":
        assert saved["epoch"] == 3
    else:
        assert saved["next_epoch"] == 4 and len(saved["optimizer"]["state"]) == 6


@pytest.mark.parametrize("first_job", RESUMING, indirect=True)
def test_a_finished_job_trains_no_more_until_it_is_asked(first_job, job, tmp_path):
    number, folder, first = first_job
    shutil.copy(folder / "snapshot.pt", tmp_path)
    result = job(number, tmp_path)
    assert result.status == 0 and result.epochs() == {}, result.output
    assert len([line for line in result.lines(0) if "resumed from snapshot.pt" in line]) == 1
    assert len([line for line in result.lines(0) if "nothing left to train" in line]) == 1
    # 03 gives the snapshot to each machine as it starts.
    assert len(told("wrote", result)) == (number == "03") and digest(result) == digest(first)
    # Not to the GPU of the rank that saved: all would fill that one.
    safely = {"to": "cpu", "no_code": True}
    assert told("loaded", result) == [(0, safely), (1, safely)]
    # One more epoch, on another number of ranks. (The old launcher adds --local-rank.)
    result = job(number, tmp_path, "--local-rank=0", epochs=4, world_size=3)
    assert result.status == 0 and list(result.epochs()) == [4], result.output
    assert any(line.endswith("batch 3 ranks x 5 images") for line in result.lines(0))
    # A full disk leaves the snapshot whole.
    before = (tmp_path / "snapshot.pt").read_bytes()
    result = job(number, tmp_path, epochs=5, before=[limit_file_size])
    assert result.status == 1 and (tmp_path / "snapshot.pt").read_bytes() == before


APART = """
def train_epoch(model, *args, old=train_epoch):
    found = old(model, *args)
    model.module.layers[0].bias.data += dist.get_rank()
    return found
"""


@pytest.mark.parametrize("number", sorted(NAMES))
def test_replicas_that_differ_are_not_saved_and_torchrun_hears_of_it(job, tmp_path, number):
    """Else the next attempt would load rank 0's, and nobody would know."""
    result = job(number, tmp_path, changes=APART, before=[report_errors] * (number != "01"))
    assert result.status == 1 and "RuntimeError: the replicas differ" in result.output
    assert told("left", result) == told("wrote", result) == []
    if number != "01":
        [report, *_] = tmp_path.glob("report*.json")
        assert "the replicas differ" in json.loads(report.read_text())["message"]["message"]


@pytest.mark.parametrize("number", sorted(NAMES))
def test_a_wrong_call_ends_in_words(tmp_path, number):
    a_rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    more, path = "must be 1 or more", "--checkpoint-path" if number == "01" else "--snapshot-path"
    for words, message in (
        (["--batch-size", 1], more),
        ([-3], more),
        ([3, 0], more),
        (["--batch-size", "many"], "--batch-size: invalid int value: 'many'"),
        ([path, "no/such.pt"], "cannot write into the folder of no/such.pt"),
        ([path, tmp_path], f"or {tmp_path} is not a file"),
        (
            {"01": ["--nprocs", 0], "02": ["--what"], "03": ["--timeout", 0]}[number],
            "unrecognized arguments" if number == "02" else more,
        ),
    ):
        result = fork(NAMES[number], *words, cwd=tmp_path, env=a_rank)
        assert result.status == 2 and message in result.error(), result.output
    assert files(tmp_path) == []


def test_01_with_mp_spawn_trains_and_proves_it(tmp_path, mnist_dir):
    (tmp_path / "data").symlink_to(mnist_dir)
    result = fork(NAMES["01"], 2, "--batch-size", 16, cwd=tmp_path, timeout=300)
    assert result.status == 0 and "1024 + 256 images of MNIST" in result.output, result.output
    alone, by_ddp = re.findall(
        r"gradient .* differs from the whole batch's by (\S+)$", result.output, re.MULTILINE
    )
    assert float(alone) > 0.01, "the ranks' own gradients must differ: it is the point"
    assert float(by_ddp) < 1e-5
    epochs = result.epochs()
    assert list(epochs) == [1, 2] and epochs[2][0] < epochs[1][0] / 2 and epochs[2][1] > 0.95
    assert result.saved() == [1, 2] and files(tmp_path) == ["checkpoint.pt", "data"]


def test_01_with_three_ranks_and_a_batch_of_more_images_than_there_are(job, tmp_path):
    result = job("01", tmp_path, epochs=1, world_size=3, batch_size=100).ok()
    assert any(line.endswith("batch 3 ranks x 21 images") for line in result.lines(0))


NO_DDP = """
class DDP(nn.Module):
    gradient_as_bucket_view = True

    def __init__(self, module, **_):
        super().__init__()
        self.module = module

    def forward(self, images):
        return self.module(images)
"""
# Rank 1 alone sees a difference.
HALF = "gathered = lambda own, old=gathered: old(own)[:1] * 2 if dist.get_rank() else old(own)"


@pytest.mark.parametrize(("changes", "error"), [(NO_DDP, "replicas"), (HALF, "gradient")])
def test_the_proofs_of_01_can_fail(job, tmp_path, changes, error):
    result = job("01", tmp_path, changes=changes)
    assert result.status == 1 and re.search(f"RuntimeError: .* {error}", result.output)
    by = re.search(r"DDP leaves .* by (\S+)", result.output)
    assert told("wrote", result) == [] if by is None else float(by[1]) > 1e-3
