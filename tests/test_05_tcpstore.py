"""05: its lessons say what the pages show, and fail if the store is wrong; two terminals."""

import pathlib
import re
import sys
import time
from multiprocessing.process import BaseProcess

import pytest
import shown
import torch.distributed as dist
from forked import fork, variant
from mistakes.tcpstore import CASES, WRONG
from started import PYTHON, ROOT, assert_nothing_left, listening, read_until, run, running

SCRIPT = "05_tcpstore.py"
FORKS = {'get_context("spawn")': 'get_context("fork")'}  # which is fast


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("--role client", "needs the --port"),
        ("--nprocs 0", "--nprocs must be 2 or more"),
        ("--role boss", "invalid choice: 'boss'"),
        ("--port 65536", "must be 0 to 65535"),
    ],
)
def test_bad_calls(tmp_path, call, message):
    result = fork(SCRIPT, *call.split(), cwd=tmp_path)
    assert result.status == 2 and message in result.error(), result.output


def test_one_client_too_many_is_turned_away(tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    server.set("world size", "1")
    result = fork(SCRIPT, "--role", "client", "--port", server.port, cwd=tmp_path)
    assert (result.status, result.output) == (1, "the server has its 1 processes already\n")
    result = fork(SCRIPT, "--role", "client", "--port", 1, cwd=tmp_path, before=hurry)
    assert re.fullmatch("waits for a .*\nno server at .*: start it first\n", result.output)


def hurry():
    time.sleep = int  # which takes a number, too


def test_a_lesson_fails_if_the_store_answers_wrongly(tmp_path):
    cases = "".join(f"    ({case}),\n" for case in CASES)
    script = variant(
        tmp_path, SCRIPT, {"\nif __name__": f"{WRONG}\nCASES = [\n{cases}]\nif __name__", **FORKS}
    )
    result = fork(script, cwd=tmp_path).ok()
    for n, message in enumerate(CASES.values()):
        assert f"\n{n}: got {message}" in f"\n{result.output}", result.output
    assert "\nlo is Gloo's interface\n" in result.output


def refuse_others_than_daemons(start=BaseProcess.start):
    """Called in a child: they would outlive a script that fails."""
    BaseProcess.start = lambda process: start(process) if process.daemon else sys.exit("no daemon")


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
def test_it_starts_its_own_processes(tmp_path, forks):
    result = (
        run(PYTHON, ROOT / SCRIPT, cwd=tmp_path)
        if not forks
        else fork(variant(tmp_path, SCRIPT, FORKS), cwd=tmp_path, before=refuse_others_than_daemons)
    )
    assert not shown.missing("05_tcpstore.txt", result.ok()), result.output
    lines = result.output.splitlines()  # with torch loaded, its log is no longer kept quiet
    assert forks or all(re.match(r"\[rank \d/3\] ", line) for line in lines)
    assert {file.name for file in tmp_path.iterdir()} <= {SCRIPT}
    did = re.findall(r"\] did (\d+): ?(.*)$", result.output, re.MULTILINE)
    assert sorted(int(task) for _, tasks in did for task in tasks.split()) == [*range(20)], did
    assert "3 processes; 2 said goodbye" in result.output
    pid = re.search(r"pid (\d+), with task b'0': heartbeat True; once", result.output)[1]
    assert not pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.long
def test_two_terminals(tmp_path):
    """The server listens on loopback only."""
    with running(PYTHON, ROOT / SCRIPT, "--role", "server", cwd=tmp_path) as server:
        output = read_until(server, "waits for 1 of")
        command = re.search(r"python (\S+ --role client --port (\d+))\n", output)
        assert listening(server.pid) == [("127.0.0.1", int(command[2]))]
        client = run(PYTHON, *command[1].split(), cwd=tmp_path)
        output += server.communicate(timeout=60)[0]
        assert server.returncode == client.status == 0, output
        assert "11 lessons, all checks passed on 2 processes" in output
        assert "[rank 1/2] did " in client.output
        assert_nothing_left(server)
