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


# In the place of main: lessons meet a store that gives wrong answers. What do their checks say?
WRONG = """
class Wrong:
    def __init__(self, store, answers):
        self.store, self.answers, self.underlying_store = store, answers, store.underlying_store

    def __getattr__(self, name):
        if self.answers.get(name):
            return lambda *args, **options: self.answers[name].pop(0)
        return getattr(self.store, name)


def main(real=dist.PrefixStore):
    store = serve()
    assert connect(store.port).timeout == store.timeout == TIMEOUT
    store.set_timeout(timedelta(seconds=0.3))
    assert outcome(say_goodbye, store, Member(0, 2)) == "DistStoreError", "does not wait"
    time.sleep, dist.all_reduce = (lambda seconds: None), torch.Tensor.zero_
    for n, (lesson, rank, answers) in enumerate(CASES):
        store, why = serve(), "passed"
        wrong = Wrong(real(lesson, store), answers) if answers else real(lesson, store)
        if lesson == "prefix_store":
            dist.PrefixStore = lambda prefix, store: store
            store.set("prefix_store/job a/epoch", "7")
        if lesson == "find_each_other":
            dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
        if lesson == "server_ends_first":
            globals()["connect"] = lambda port: wrong
        try:
            globals()[lesson](wrong, Member(rank, 1))
        except RuntimeError as error:
            why = str(error)
        print(f"{n}: {why}", flush=True)
    print(os.environ["GLOO_SOCKET_IFNAME"], "is Gloo's interface")

"""
# Lesson, rank, wrong answers of some calls: what the lesson's check says
CASES = {
    '"set_get", 1, {"check": [True]}': "True, expected False",
    '"set_get", 1, {"get": [b"7"]}': "b'7', expected b'hello'",
    '"wait_timeout", 0, {"wait": [None]}': "None, expected 'DistStoreError'",
    '"wait_timeout", 0, {"wait": ["DistStoreError"]}': "False, expected True",
    '"add", 0, {"get": [b"0", b"7"]}': "(300, 7), expected (300, 1)",
    '"add", 0, {"add": [*[0] * 300, 299]}': "(299, 1), expected (300, 1)",
    '"append_and_multi", 0, {"get": [b"0 0 "]}': "[0, 0], expected [0]",
    '"append_and_multi", 0, {"multi_get": [[b"1"]]}': "(1, b'1'), expected (1, ",
    '"elect_leader", 0, {"multi_get": [[b"0", b"1"]]}': "{b'",
    '"barrier_100_times", 0, {"add": [1, 1, 2]}': "(1, False), expected (0, False)",
    '"barrier_100_times", 0, {"check": [True]}': "(0, True), expected (0, False)",
    '"work_queue", 0, {"add": [0, 0]}': "[False, False], expected [True, False]",
    '"work_queue", 0, {"add": [0, 1, 1, 2]}': "[True, True], expected [True, False]",
    '"work_queue", 0, {"add": [0, 1, 1, 1], "queue_pop": [b"1"]}': "[1, 1, 2, 3, 4, 5, 6, 7, 8, ",
    '"process_groups", 0, {}': "0, expected 1",
    '"prefix_store", 0, {"get": [b"40", b"40"]}': "(b'40', b'40', b'7'), expected (b'7', b'4",
    '"server_ends_first", 1, {"get": [b"1", b"2", b"3"]}': "[b'2', b'3'], expected ['DistNetwork",
    '"find_each_other", 0, {}': "0, expected 1",
}


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
