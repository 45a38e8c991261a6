"""05: its lessons say what the pages show; two terminals, kills and bad calls end well."""

import concurrent.futures
import os
import pathlib
import re
import signal
import socket

import pytest
import shown
from forked import fork, variant
from started import PYTHON, ROOT, assert_nothing_left, end, listening, read_until, run, start

SCRIPT = "05_tcpstore.py"


def test_it_starts_its_own_processes(tmp_path):
    """The script itself fails when a lesson does not hold, but for how its queue is worked off."""
    result = fork(SCRIPT, "--nprocs", 3, cwd=tmp_path)
    assert result.status == 0, result.output
    assert not shown.missing("05_tcpstore.txt", result) and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())
    assert not re.search(r"^\[rank .*\n\n", result.output, re.MULTILINE), "a line, and no more"
    pid, visitors = re.search(r"the visitor, pid (\d+), has task (\d+)", result.output).groups()
    assert not pathlib.Path(f"/proc/{pid}").exists()
    assert any(line.startswith("did 3: ") for line in result.lines(1)), "rank 1 leaves early"
    [last] = [line.partition(":")[2] for line in result.lines(2) if line.startswith("did ")]
    assert all(int(task) >= 5 or task == visitors for task in last.split()), "it comes late"
    assert "together 20 tasks of 20, each of them once" in result.lines(0)
    assert result.lines(0)[-1].endswith("; 2 said goodbye before the server ended")


# Takes the place of main: goes through lessons with a store whose calls of one name give wrong
# answers at first, and tells what the lesson's own check says of that.
WRONG = """
class Wrong:
    def __init__(self, store, name, answers):
        self.store, self.name, self.answers = store, name, list(answers)

    def __getattr__(self, name):
        if name == self.name and self.answers:
            return lambda *args, **options: self.answers.pop(0)
        return getattr(self.store, name)


def main(host="127.0.0.1", own_server=host_store):
    store = own_server(host, 0)
    assert connect(host, store.port).timeout == store.timeout == TIMEOUT
    globals()["is_alive"] = lambda store, name: False
    store.set("owner/3", "visitor")
    for _ in range(2):  # the queue is looked through again and again
        requeue_lost_tasks(store, Member(0, 1, host), ["3"])
    assert store.queue_len("tasks") == 1, "pushed once"
    for n, (lesson, rank, name, answers) in enumerate(CASES):
        store = own_server(host, 0)
        store.multi_set(["greeting", "greeting again"], ["hello", "good bye"])
        wrong, why = Wrong(store, name, answers), "passed"
        globals().update(dict.fromkeys(["host_store", "connect"], lambda *address: wrong))
        try:
            globals()[lesson](wrong, Member(rank, 1, host))
        except RuntimeError as error:
            why = str(error)
        print(f"{n}: {why}", flush=True)


class Careless:  # a connection that takes any text for a number
    add, get = (lambda *args: 1), (lambda *args: b"2")

"""
# Lesson, rank, the calls that give wrong answers, these answers: what the lesson's check says
CASES = {
    '"set_get", 1, "check", [True]': "True, expected False",
    '"set_get", 1, "check", [False]': "b'hello', expected b'good bye'",
    '"wait_timeout", 0, "wait", [None]': "None, expected 'DistStoreError'",
    '"keys", 0, "num_keys", [0, 5]': "(5, True, False, True, False), expected (1, ",
    '"keys", 0, "delete_key", [True, False]': "3, expected 2",
    '"add", 0, "get", [b"0", b"7"]': "(300, 7), expected (300, 1)",
    '"values_are_bytes", 0, "get", ["two"]': "('two', b'2'), expected (b'two', b'2')",
    '"values_are_bytes", 0, "clone", [Careless()]': "[1, b'2'], expected ['DistNetworkError', ",
    '"append_and_multi", 0, "get", [b"0 0 "]': "[0, 0], expected [0]",
    '"append_and_multi", 0, "multi_get", [[b"1"]]': "(1, b'1'), expected (1, ",
    '"queue", 0, "queue_pop", [b"2", b"1", b"3"]': "[b'2', b'1', b'3'], expected [b'1', ",
    '"queue", 0, "queue_pop", [b"1", b"2", b"3", b"4"]': "b'4', expected 'QueueEmptyError'",
    '"elect_leader", 0, "multi_get", [[b"0", b"1"]]': "{b'",
    '"barrier_100_times", 0, "add", [1, 1, 2]': "1, expected 0",
    '"barrier_100_times", 0, "check", [False]': "False, expected True",
    '"server_ends_first", 1, "get", [b"1", b"2", b"3"]': "(b'2', b'3'), expected ('DistNetwork",
}


def test_a_lesson_fails_if_the_store_answers_wrongly(tmp_path):
    cases = "".join(f"    ({case}),\n" for case in CASES)
    script = variant(tmp_path, SCRIPT, {
        "\nLESSONS = (": f"{WRONG}\nCASES = [\n{cases}]\nLESSONS = ("})
    result = fork(script, cwd=tmp_path)
    assert result.status == 0, result.output
    for n, message in enumerate(CASES.values()):
        assert f"\n{n}: the store gave {message}" in f"\n{result.output}", result.output


def test_a_client_that_ends_takes_all_with_it(tmp_path):
    """Also those that wait for the others: they end with the server, and say nothing."""
    count = '    rank, world_size = store.add("ranks", 1)'
    script = variant(tmp_path, SCRIPT, {
        count: f'    if store.add("came", 1) == 2:\n        sys.exit(3)\n{count}',
        'get_context("spawn")': 'get_context("fork")'})  # which is fast
    result = fork(script, cwd=tmp_path)
    assert result.status == 1 and "a client ended before it had joined" in result.error()
    assert result.output.count("error:") == 1, result.output


@pytest.mark.long
def test_two_terminals(tmp_path):
    """Also: the server listens on loopback only, and one process too many is turned away."""
    server = start(PYTHON, ROOT / SCRIPT, "--role", "server", cwd=tmp_path)
    clients = []
    try:
        output = read_until(server, "waits for 1 of")
        command = re.search(r"python (05_tcpstore.py --role client .* --port (\d+))\n", output)
        assert listening(server.pid) == [("127.0.0.1", int(command[2]))]
        for _ in range(2):
            clients.append(start(PYTHON, *command[1].split(), cwd=ROOT))
        outputs = [client.communicate(timeout=90)[0] for client in clients]
        output += server.communicate(timeout=60)[0]
        assert server.returncode == 0, output
        assert "13 lessons, all checks passed on 2 processes" in output
        (status, joined), (refusal, late) = sorted(
            (client.returncode, text) for client, text in zip(clients, outputs, strict=True))
        assert (status, refusal) == (0, 1), outputs
        assert "[rank 1/2] did 3: " in joined and "has its 2 processes already" in late
        for process in (server, *clients):
            assert_nothing_left(process)
    finally:
        for process in (server, *clients):
            end(process)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "number", "status"), [
    ("server", signal.SIGINT, 130), ("server", signal.SIGKILL, -9), ("client", signal.SIGKILL, 1)])
def test_when_one_process_ends_all_do(tmp_path, victim, number, status):
    """With the server at once, with a client after the timeout that the script sets."""
    process = start(PYTHON, ROOT / SCRIPT, cwd=tmp_path)
    try:
        output = read_until(process, "== keys")
        client = int(re.search(r"\[rank 1/3\] pid (\d+), connected", output)[1])
        os.kill(client if victim == "client" else process.pid, number)
        output, _ = process.communicate(timeout=60)
        assert_nothing_left(process)
        assert process.returncode == status and "Traceback" not in output, output
        said = "interrupted" if number == signal.SIGINT else "another process has ended, or is stu"
        assert said in output
    finally:
        end(process)


# No barrier: the others come when rank 0 is through.
NO_BARRIER = {
    '        store.add(f"count {use}", 1)\n        wait_for_all(store, me, "gates")\n':
        '        me.rank and store.wait([f"through {use}"])\n'
        '        store.add(f"count {use}", 1)\n',
    '        early += store.add(f"count {use}", 0) != me.world_size\n':
        '        early += store.add(f"count {use}", 0) != me.world_size\n'
        '        store.set(f"through {use}", "")\n'}
# Each process writes its own count over those of the others.
NO_COUNTER = {'store.add("atomic", 1)': 'store.set("atomic", "300")'}


@pytest.mark.long
@pytest.mark.parametrize(("changes", "message"), [
    (NO_BARRIER, r"the store gave [1-9]\d*, expected 0"),
    (NO_COUNTER, r"the store gave \(300, 1\), expected \(900, 1\)"),
])
def test_the_checks_of_the_script_can_fail(tmp_path, changes, message):
    result = run(PYTHON, variant(tmp_path, SCRIPT, changes), cwd=tmp_path)
    assert result.status == 1 and "all checks passed" not in result.output, result.output
    assert re.search(f"^RuntimeError: {message}$", result.output, re.MULTILINE), result.output


def test_others_that_cannot_be_reached(tmp_path):
    script = variant(tmp_path, SCRIPT, {
        "patience=10": "patience=1", "JOIN_SECONDS = 60": "JOIN_SECONDS = 1"})
    silent, bound = socket.create_server(("127.0.0.1", 0)), socket.socket()
    busy = socket.create_server(("127.0.0.1", 0), backlog=0)  # takes one connection, and no other
    first = socket.create_connection(busy.getsockname())
    with silent, bound, busy, first, concurrent.futures.ThreadPoolExecutor() as pool:
        bound.bind(("127.0.0.1", 0))  # nobody listens there; silent listens, and never says a word
        port, unused = silent.getsockname()[1], bound.getsockname()[1]
        calls = {
            f"--role client --port {port}": "does not answer as a TCPStore",
            f"--role client --port {unused}": "no server at 127.0.0.1, port.*--role server",
            f"--role client --port {busy.getsockname()[1]}": "no server at .* 1 s .timed out.",
            f"--role client --port {port} --host a.invalid": "a.invalid does not resolve",
            "--role server --nprocs 3": "0 of 2 clients came within 1 s",
            f"--role server --port {port}": "Address already in use.*another --port",
            "--role server --host 192.0.2.1": "cannot listen on 192.0.2.1.*of this machine",
        }
        results = pool.map(lambda call: fork(script, *call.split(), cwd=tmp_path), calls)
        for result, message in zip(results, calls.values(), strict=True):
            assert result.status == 1 and re.search(message, result.error()), result.output


@pytest.mark.parametrize(("call", "environment", "message"), [
    ("--role client", {}, "needs the --port"),
    ("--role client --port 9 --nprocs 2", {}, "no --nprocs"),
    ("--nprocs 1", {}, "--nprocs 1: give 2 to 64"),
    ("--port=-1", {}, "--port -1: give 0 .a free one. to 65535"),
    ("--port 65536", {}, "--port 65536: give"),
    ("--role boss", {}, "invalid choice: 'boss'"),
    ("", {"LOCAL_RANK": "0"}, "run it with python, not with torchrun"),
])
def test_bad_calls_end_in_one_line(tmp_path, call, environment, message):
    result = fork(SCRIPT, *call.split(), cwd=tmp_path, env=environment)
    assert result.status == 2 and re.search(message, result.error()), result.output
    assert len(result.output.splitlines()) == 1, result.output
