"""tools/check_machines.py in processes that play machines. test_lab.py runs it on real ones."""

import functools
import os
import re

import pytest
from forked import fork, fork_ranks, play_machine, variant
from started import free_port

SCRIPT = "tools/check_machines.py"


def check(folder, *arguments, before=(), script=SCRIPT, world_size=4, nodes=2, **options):
    return fork_ranks(
        script,
        *arguments,
        cwd=folder,
        world_size=world_size,
        nodes=nodes,
        before=(play_machine, *before),
        **options,
    )


def own_store(port):
    """Called in a child: torchrun runs no store for the ranks, so rank 0 has to, at this port."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)


def assert_error(result, pattern, status=1):
    """Whichever process says it first, it is this, in one line."""
    assert result.status == status, result.output
    errors = [line for line in result.output.splitlines() if ": error: " in line]
    assert errors and all(re.search(pattern, line) for line in errors), result.output
    assert "check passed" not in result.output and "Traceback" not in result.output


def test_passes(tmp_path):
    """With a store of torchrun. (With one of rank 0: below.)"""
    result = check(tmp_path).ok()
    expected = [
        r"node1: ranks 0 1, 10\.0\.0\.1, 0 GPUs, torch 2\.\d+\.\d+\S*",
        r"node2: ranks 2 3, 10\.0\.0\.2, 0 GPUs, torch 2\.\d+\.\d+\S*",
        "all_reduce agrees with a ring of send and receive: OK",
        r"all_reduce of 16 MiB: (\d\.\d|10\.0|\d{2,}) ms, \d+\.\d\d GB/s bus bandwidth",
        "check passed: 4 ranks on 2 machines",
    ]
    lines = result.lines(0)
    assert len(lines) == 5 and all(map(re.fullmatch, expected, lines)), lines


def ranks_1_and_3_stay_away():
    if os.environ["RANK"] in ("1", "3"):
        os._exit(0)


def test_names_the_ranks_that_do_not_come(tmp_path):
    with free_port() as port:
        before = (ranks_1_and_3_stay_away, functools.partial(own_store, port))
        result = check(tmp_path, "--timeout", 3, before=before)
    assert_error(result, "error: rank 1, rank 3 did not come within 3 s")


LOOK_UP = (
    "socket.getaddrinfo = lambda name, *args, old=socket.getaddrinfo, **options: ("
    "[(0, 0, 0, '', ('127.0.1.1', 0))] if name == 'node2' else old(name, *args, **options))"
)
ADDRESS = r"node2 gives .* an address that only it can use \(%s\): on node2, set GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "torch.__version__ = '2.0.0'",
            r"differ in torch \(node1 2\.\d+\.\d+\S*, node2 2\.0\.0\): install",
        ),
        (LOOK_UP, ADDRESS % r"127\.0\.1\.1"),
        ("os.environ['GLOO_SOCKET_IFNAME'] = 'lo'", ADDRESS % "lo"),
        (
            "os.environ['GLOO_SOCKET_IFNAME'] = '^lo'",
            r"node2 has no interface .* \(\^lo\): on node2",
        ),
        (
            "os.environ['LOCAL_WORLD_SIZE'] = '3'",
            r"in processes \(node1 1, node2 3\): use the same",
        ),
        (
            "pick_device = lambda _: (torch.device('cpu'), 'nccl')",
            r"in backend \(node1 gloo, node2 nccl\): .* does nvidia-smi",
        ),
    ],
    ids=["torch", "name", "interface", "no_interface", "processes", "backend"],
)
def test_names_the_fault(tmp_path, fault, message):
    """Of the second machine."""
    machine_2 = f"import os, socket, torch\nif os.environ['GROUP_RANK'] == '1':\n    {fault}"
    script = variant(tmp_path, SCRIPT, machine_2)
    assert_error(check(tmp_path, script=script, world_size=2), message)


# The network changes a number.
CHANGED = (
    "dist.all_reduce = lambda tensor, *_, old=dist.all_reduce: "
    "(old(tensor), tensor.view(-1)[-1:].add_(1))\n"
)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (CHANGED, "all_reduce and the ring disagree"),
        (f"{CHANGED}check_sums = id", "a sum of 16 MiB is wrong"),
        (
            "def show(_):\n    raise RuntimeError('Connection reset by peer')",
            r"another process has ended: see what .*\(RuntimeError: Connection reset by peer",
        ),
    ],
    ids=["small", "large", "reset"],
)
def test_an_error_later_on_is_explained(tmp_path, code, error):
    script = variant(tmp_path, SCRIPT, code)
    assert_error(check(tmp_path, script=script, world_size=3, nodes=1), error)


def test_bad_calls_end_in_one_line(tmp_path):
    either = "name all machines (python tools/check_machines.py node1 node2), or use torchrun"
    two = functools.partial(check, tmp_path, world_size=2, nodes=1)
    for result, message in [
        (fork(SCRIPT, cwd=tmp_path), either),
        (fork(SCRIPT, "127.0.0.1", cwd=tmp_path), "one process has no other to find"),
        (two("--timeout", 0), "--timeout must be 1 or more"),
        (
            fork(SCRIPT, "198.51.100.1", "198.51.100.2", cwd=tmp_path),
            "is none of 198.51.100.1 198.51.100.2",
        ),
    ]:
        assert_error(result, re.escape(message), status=2)


def test_a_first_machine_that_is_unknown_or_silent(tmp_path):
    second = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}  # its torchrun's store: elsewhere
    assert_error(
        fork(SCRIPT, cwd=tmp_path, env=second | {"MASTER_ADDR": "a.invalid"}),
        "does not know the name a.invalid: add it to /etc/hosts",
    )
    # torchrun there has published a name that means loopback everywhere.
    result = fork(SCRIPT, "--timeout", 1, cwd=tmp_path, env=second | {"MASTER_ADDR": "127.0.0.1"})
    assert_error(
        result,
        r"127\.0\.0\.1:1 has not answered .* the first machine calls itself"
        r" 127\.0\.0\.1, and on .*--local-addr=ITS_ADDRESS",
    )
