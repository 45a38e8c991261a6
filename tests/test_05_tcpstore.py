"""05: every lesson says what its own checks found; two terminals, kills and bad calls end well."""

import concurrent.futures
import os
import pathlib
import re
import signal
import socket

import pytest
from support import (
    PYTHON,
    ROOT,
    assert_nothing_left,
    end,
    fork,
    listening,
    read_until,
    run,
    start,
    variant,
)

SCRIPT = "05_tcpstore.py"
# What the lessons say on three processes, in order. The script fails when one does not hold.
SAID = [
    ("set_get", r"get\(\"greeting\"\): not there yet"),
    ("set_get", r"get\(\"greeting\"\) returns b'hello from pid \d+' after [\d.]+ s"),
    ("wait_timeout", r"wait\(\[\"never set\"\]\): DistStoreError after .* s"),
    ("keys", r".*num_keys (\d+) -> \d+, .*True, .*False"),
    ("keys", r"delete_key: True, a second time: False, num_keys \d+"),
    ("add", r".* 300 times each: 900 of 900"),
    ("add", r".* set what they got plus 1: 1 of 3"),
    ("values_are_bytes", r"get\(\"text\"\) b'two', get\(\"number\"\) b'2'"),
    ("values_are_bytes", r".*: DistNetworkError; .* after that: DistNetworkError"),
    ("values_are_bytes", r"another connection: get\(\"number\"\) b'2'"),
    ("append_and_multi", r"the ranks in the order in which they came: b'(\d ){3}'"),
    ("append_and_multi", r"their process ids, with one multi_get: \[(b'\d+'(, )?){3}\]"),
    ("queue", r"3 pushed, popped \[b'1', b'2', b'3'\]"),
    ("queue", r"one more, with block=False: QueueEmptyError"),
    ("prefix_store", r".*job a b'7', job b b'40'; .* is b'7'"),
    ("elect_leader", r"the leader is rank \d, that is me"),
    ("elect_leader", r"the leader is rank \d"),
    ("barrier_100_times", r"100 times through the barrier, 0 times too early"),
    ("work_queue", r"the visitor, pid \d+, has task \d+; heartbeat: True"),
    ("work_queue", r"the visitor is killed"),
    ("work_queue", r"no heartbeat of visitor: its task \d+ goes back to the queue"),
    ("work_queue", r"together 20 tasks of 20, each of them once"),
    ("process_groups", r"env://: all_reduce of 1 to 3 gives 6"),
    ("process_groups", r"tcp:.*: all_reduce of 1 to 3 gives 6"),
    ("process_groups", r"file:.*: all_reduce of 1 to 3 gives 6"),
    ("process_groups", r"store=.*: all_reduce of 1 to 3 gives 6"),
    ("server_ends_first", r"get: (DistNetworkError); a second get: \1"),
]


def test_it_starts_its_own_processes(tmp_path):
    result = fork(SCRIPT, "--nprocs", 3, cwd=tmp_path)
    assert result.status == 0, result.output
    lesson, said = None, {}
    for rank, line in re.findall(r"^\[rank (\d)/3\] (.*)$", result.output, re.MULTILINE):
        lesson = line[3:] if line.startswith("== ") else lesson
        said.setdefault(lesson, []).append((int(rank), line))
    assert [name for name in said if name] == list(dict.fromkeys(name for name, _ in SAID))
    for lesson, pattern in SAID:
        assert any(re.fullmatch(pattern, line) for _, line in said[lesson]), (lesson, pattern)
    for lesson, pattern, ranks in (
        ("set_get", "get.*returns.*", [1, 2]),
        ("barrier_100_times", "100 times.*", [0, 1, 2]),
        ("server_ends_first", "get: .*", [1, 2]),
    ):
        assert sorted(rank for rank, line in said[lesson] if re.match(pattern, line)) == ranks
    work = "\n".join(f"{rank} {line}" for rank, line in said["work_queue"])
    pid, visitors = re.search(r"the visitor, pid (\d+), has task (\d+)", work).groups()
    assert not pathlib.Path(f"/proc/{pid}").exists()
    done = {int(rank): tasks.split() for rank, tasks in re.findall(r"(\d) did \d+: ?(.*)", work)}
    assert len(done[1]) == 3 and sum(map(len, done.values())) == 20
    assert all(int(task) >= 5 or task == visitors for task in done[2]), "the last rank comes late"
    assert result.lines(0)[-1] == (
        "13 lessons, all checks passed on 3 processes; 2 said goodbye before the server ended")
    assert not list(tmp_path.iterdir())


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


def test_missing_clients_are_counted(tmp_path):
    script = variant(tmp_path, SCRIPT, {"JOIN_SECONDS = 60": "JOIN_SECONDS = 1"})
    result = fork(script, "--role", "server", "--nprocs", "3", cwd=tmp_path)
    assert result.status == 1 and "0 of 2 clients came within 1 s" in result.error()


@pytest.mark.long
@pytest.mark.parametrize(("changes", "message"), [
    # No barrier: the others come when rank 0 is through.
    ({'        store.add(f"count {use}", 1)\n        wait_for_all(store, me, "gates")\n':
      '        me.rank and store.wait([f"through {use}"])\n'
      '        store.add(f"count {use}", 1)\n',
      '        early += store.add(f"count {use}", 0) != me.world_size\n':
      '        early += store.add(f"count {use}", 0) != me.world_size\n'
      '        store.set(f"through {use}", "")\n'}, r"the store gave [1-9]\d*, expected 0"),
    # Each process writes its own count over those of the others.
    ({'store.add("atomic", 1)': 'store.set("atomic", "300")'},
     r"the store gave \(300, 1\), expected \(900, 1\)"),
])  # fmt: skip
def test_the_checks_of_the_script_can_fail(tmp_path, changes, message):
    result = run(PYTHON, variant(tmp_path, SCRIPT, changes), cwd=tmp_path)
    assert result.status == 1 and "all checks passed" not in result.output, result.output
    assert re.search(f"^RuntimeError: {message}$", result.output, re.MULTILINE), result.output


def test_addresses_that_cannot_be(tmp_path):
    script = variant(tmp_path, SCRIPT, {"patience=10": "patience=1"})
    silent, bound = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with silent, bound, concurrent.futures.ThreadPoolExecutor() as pool:
        bound.bind(("127.0.0.1", 0))  # nobody listens there; silent listens, and never says a word
        port, unused = silent.getsockname()[1], bound.getsockname()[1]
        calls = [
            (pool.submit(fork, script, *call.split(), cwd=tmp_path), message)
            for call, message in (
                (f"--role client --port {port}", "does not answer as a TCPStore"),
                (f"--role client --port {unused}", "no server at 127.0.0.1, port.*--role server"),
                (f"--role client --port {port} --host a.invalid", "a.invalid does not resolve"),
                (f"--role server --port {port}", "Address already in use.*another --port"),
                ("--role server --host 192.0.2.1", "cannot listen on 192.0.2.1.*of this machine"),
            )
        ]
        for call, message in calls:
            assert call.result().status == 1, call.result().output
            assert re.search(message, call.result().error())


@pytest.mark.parametrize(("call", "environment", "message"), [
    ("--role client", {}, "needs the --port"),
    ("--role client --port 9 --nprocs 2", {}, "no --nprocs"),
    ("--nprocs 1", {}, "--nprocs 1: give 2 to 64"),
    ("--port=-1", {}, "--port -1: give 0 .a free one. to 65535"),
    ("--port 65536", {}, "--port 65536: give"),
    ("--role boss", {}, "invalid choice: 'boss'"),
    ("", {"LOCAL_RANK": "0"}, "run it with python, not with torchrun"),
])  # fmt: skip
def test_bad_calls_end_in_one_line(tmp_path, call, environment, message):
    result = fork(SCRIPT, *call.split(), cwd=tmp_path, env=environment)
    assert result.status == 2 and re.search(message, result.error()), result.output
