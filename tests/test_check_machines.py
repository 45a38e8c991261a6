"""launch/check_machines.py in processes that play machines. test_lab.py runs it on real ones."""

import functools
import os
import re
import runpy
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from support import (
    ROOT,
    files,
    fork,
    fork_ranks,
    free_port,
    machine,
    play_machine,
    pretend_one_gpu,
    variant,
)

SCRIPT = "launch/check_machines.py"


def check(folder, *arguments, before=(), script=SCRIPT, world_size=4, nodes=2, **options):
    return fork_ranks(script, *arguments, cwd=folder, world_size=world_size, nodes=nodes,
                      before=(play_machine, *before), **options)  # fmt: skip


def own_store(port):
    """Called in a child: torchrun runs no store for the ranks, so rank 0 has to, at this port."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)


@pytest.fixture(params=["store of torchrun", "store of rank 0"])
def store(request):
    """Functions to call in a child, so that the job has this kind of store."""
    if request.param == "store of torchrun":
        yield ()
        return
    with free_port() as port:
        yield (functools.partial(own_store, port),)


def test_passes(tmp_path, store):
    result = check(tmp_path, before=store)
    assert result.status == 0, result.output
    lines = result.lines(0)
    assert re.fullmatch(r"node1: ranks 0 1, 10\.0\.0\.1, 0 GPUs, torch 2\.\d+\.\d+\S*", lines[0])
    assert re.fullmatch(r"node2: ranks 2 3, 10\.0\.0\.2, 0 GPUs, torch 2\.\d+\.\d+\S*", lines[1])
    assert lines[2] == "all_reduce agrees with a ring of send and receive: OK"
    pattern = r"all_reduce of 16 MiB: (\d\.\d|10\.0|\d{2,}) ms, \d+\.\d\d GB/s bus bandwidth"
    assert re.fullmatch(pattern, lines[3])
    assert lines[4:] == ["check passed: 4 ranks on 2 machines"]
    assert files(tmp_path) == []


# ---- Faults that the roll call finds ----


def ranks_1_and_3_stay_away():
    if os.environ["RANK"] in ("1", "3"):
        os._exit(0)


def test_names_the_ranks_that_do_not_come(tmp_path, store):
    result = check(tmp_path, "--timeout", 3, before=(ranks_1_and_3_stay_away, *store))
    assert result.status == 1, result.output
    errors = [line for line in result.output.splitlines() if ": error: " in line]
    assert errors, result.output
    assert all("error: rank 1, rank 3 did not come within 3 s" in line for line in errors), errors


def first_attempt_fails_second_has_one_rank():
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def init_process_group(*_, **__):
        sys.exit(3 if os.environ["RANK"] == "1" else time.sleep(60))

    if first:  # after the roll call
        dist.init_process_group = init_process_group
    elif os.environ["RANK"] == "1":
        os._exit(0)


@pytest.mark.long
def test_a_restart_does_not_read_what_the_first_attempt_has_left(tmp_path):
    before = (first_attempt_fails_second_has_one_rank,)
    result = check(tmp_path, "--timeout", 4, world_size=2, before=before, max_restarts=1)
    assert (result.status, result.attempts) == (1, 2), result.output
    assert "rank 1 did not come within 4 s" in result.error()


def other_version():
    if machine() == 2:
        torch.__version__ = "2.0.0"


def loopback_name():
    if machine() == 2:
        socket.gethostbyname = lambda name: "127.0.1.1"


def unknown_name():
    def gethostbyname(name):
        if name == "node2":
            raise socket.gaierror(-2, "Name or service not known")
        return name

    if machine() == 2:
        socket.gethostbyname = gethostbyname


def loopback_interface():
    if machine() == 2:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def another_interface():
    if machine() == 2:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth99"


def another_number_of_processes():
    if machine() == 2:
        os.environ["LOCAL_WORLD_SIZE"] = "3"


def gpus_on_one_machine():
    if machine() == 2:
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
        torch.cuda.set_device = lambda device: None


CURE = r"on node2, set GLOO_SOCKET_IFNAME to one of \w+"
FAULTS = {
    other_version: r"the machines differ in torch \(node1 2\.\d+\.\d+\S*, node2 2\.0\.0\): install",
    loopback_name: rf"node2 gives .* an address that only it can use \(127\.0\.1\.1\): {CURE}",
    unknown_name: rf"node2 gives .* an address that only it can use \(none\): {CURE}",
    loopback_interface: rf"node2 gives .* an address that only it can use \(lo\): {CURE}",
    another_interface: rf"node2 gives .* an address that only it can use \(eth99\): {CURE}",
    another_number_of_processes: r"differ in processes \(node1 1, node2 3\): use the same --nproc",
    gpus_on_one_machine: r"differ in backend \(node1 gloo, node2 nccl\): .* does nvidia-smi work",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda function: function.__name__)
def test_names_the_fault(tmp_path, fault):
    result = check(tmp_path, before=(fault,), world_size=2)
    assert result.status == 1, result.output
    errors = [line for line in result.output.splitlines() if ": error: " in line]
    assert errors and all(re.search(FAULTS[fault], line) for line in errors), result.output
    assert "check passed" not in result.output and "Traceback" not in result.output


def test_refuses_a_name_that_means_another_machine_elsewhere(monkeypatch):
    """The name that torchrun gives the others: "localhost", if /etc/hosts has that in front."""
    script = runpy.run_path(str(ROOT / SCRIPT))
    monkeypatch.setattr(socket, "gethostbyname", {"node1": "10.0.0.1", "node2": "10.0.0.2",
                                                  "localhost": "127.0.0.1"}.get)  # fmt: skip
    machines = []
    for rank, own_name in enumerate(["localhost", "node2"]):
        monkeypatch.setattr(socket, "gethostname", lambda rank=rank: f"node{rank + 1}")
        monkeypatch.setattr(socket, "getfqdn", lambda name=own_name: name)
        machines.append(script["describe_process"](rank, 0, 1, "nccl"))
    [fault] = script["find_faults"](machines, machines[1], by_name=True)
    assert "node1 calls itself localhost, and on node2 that means node2" in fault


# ---- Faults that the exchange of data finds ----


@pytest.mark.parametrize(("old", "new", "error"), [
    ("total + coming, coming", "total + coming, passing", "all_reduce and the ring disagree"),
    ("by_all_reduce = numbers.clone()", "by_all_reduce = numbers + 1", "and the ring disagree"),
    ("dist.all_reduce(block)", "dist.all_reduce(block.add_(1))", "a sum of 16 MiB is wrong"),
])  # fmt: skip
def test_fails_when_the_sums_disagree(tmp_path, old, new, error):
    (tmp_path / "run").mkdir()
    script = variant(tmp_path, SCRIPT, {old: new})
    result = check(tmp_path / "run", script=script, world_size=3, nodes=1)
    assert result.status == 1 and "check passed" not in result.output
    assert error in result.output


def connecting_hangs():
    dist.init_process_group = lambda *_, **__: time.sleep(60)


def gloo_says(message):
    def init_process_group(*_, **__):
        raise RuntimeError(message)

    dist.init_process_group = init_process_group


def test_ends_when_connecting_hangs(tmp_path):
    script = variant(tmp_path, SCRIPT, {"CONNECT_LIMIT = 70": "CONNECT_LIMIT = 1"})
    result = check(tmp_path, script=script, before=(connecting_hangs,), world_size=2)
    assert result.status == 1, result.output
    assert "not each other: open all ports between them" in result.output


@pytest.mark.parametrize(
    "said, cause",
    [
        ("Connect timeout [10.0.0.1]:1", "not each other: open all ports between them"),
        ("Connection refused, remote=[127.0.1.1]:1", "set GLOO_SOCKET_IFNAME to the interface"),
        ("Connection reset by peer [10.0.0.1]:1", "another process has ended: see what the other"),
        ("out of luck", "failed"),
    ],
)
def test_explains_what_gloo_says(tmp_path, said, cause):
    result = check(tmp_path, nodes=1, world_size=2, before=(functools.partial(gloo_says, said),))
    assert result.status == 1 and "Traceback" not in result.output
    assert cause in result.error() and f"(RuntimeError: {said})" in result.error()


# ---- Bad calls, and a first machine that does not answer ----


def test_bad_calls_end_in_one_line(tmp_path):
    either = "name all machines (python launch/check_machines.py node1 node2), or use torchrun"
    for result, message in [
        (fork(SCRIPT, cwd=tmp_path), either),
        (check(tmp_path, "node1", "node2", nodes=1), either),
        (check(tmp_path, world_size=1, nodes=1), "one process has no other to find"),
        (fork(SCRIPT, "127.0.0.1", cwd=tmp_path), "one process has no other to find"),
        (check(tmp_path, "--timeout", 0, nodes=1), "--timeout must be 1 or more"),
        (check(tmp_path, before=(pretend_one_gpu,), nodes=1), "4 processes need a GPU each"),
        (fork(SCRIPT, "198.51.100.1", "198.51.100.2", cwd=tmp_path),
         "is none of 198.51.100.1 198.51.100.2"),
    ]:  # fmt: skip
        assert result.status == 2, result.output
        assert message in result.error() and "Traceback" not in result.output


def test_a_name_that_nobody_knows(tmp_path):
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.invalid", "MASTER_PORT": "1"}
    for result in [
        fork(SCRIPT, "127.0.0.1", "a.invalid", cwd=tmp_path),
        fork(SCRIPT, cwd=tmp_path, env=environment),
    ]:
        assert result.status == 1, result.output
        assert "does not know the name a.invalid: add it to /etc/hosts" in result.error()


def test_a_first_machine_where_nothing_listens(tmp_path):
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    result = fork(SCRIPT, "--timeout", 1, cwd=tmp_path, env=environment)
    assert result.status == 1
    assert "127.0.0.1:1 has not answered" in result.error()
    # torchrun there has published a name that means loopback everywhere.
    assert "the first machine calls itself 127.0.0.1, and on" in result.error()
    assert "--local-addr=ITS_ADDRESS" in result.error()
