"""05: every lesson's claim, read from what the processes print; two terminals; bad calls."""

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
LESSONS = [
    "set_get", "wait_timeout", "keys", "add", "values_are_bytes", "append_and_multi", "queue",
    "prefix_store", "elect_leader", "barrier_100_times", "work_queue", "process_groups",
    "server_ends_first",
]  # fmt: skip


def lessons(result):
    """{name: [(rank, line)]}, in the order of the output."""
    found, name = {}, "start"
    for rank, line in re.findall(r"^\[rank (\d+)/\d+\] (.*)$", result.output, re.MULTILINE):
        if line.startswith("== "):
            name = line[3:]
        else:
            found.setdefault(name, []).append((int(rank), line))
    return found


def said(lines, pattern):
    """[(rank, groups...)] of the lines that match."""
    matches = [(rank, re.fullmatch(pattern, line)) for rank, line in lines]
    return [(rank, *match.groups()) for rank, match in matches if match]


def check_lessons(result, size):
    """Each lesson's claim holds in the output of a whole run."""
    assert result.status == 0, result.output
    found = lessons(result)
    assert [name for name in found if name != "start"] == LESSONS
    assert not [line for line in result.output.splitlines() if len(line) > 100]

    [(_, greeting)] = said(found["set_get"], r'set\("greeting", "(hello from pid \d+)"\)')
    got = said(found["set_get"], r'get\("greeting"\) returns b\'(.*)\' after ([\d.]+) s')
    assert min(got)[0] == 1 and [text for _, text, _ in got] == [greeting] * (size - 1)
    assert said(found["wait_timeout"], r'wait\(\["never set"\]\): DistStoreError after .* s')
    [(_, before, after)] = said(found["keys"], r".*num_keys (\d+) -> (\d+), .*True, .*False")
    assert int(after) == int(before) + 1
    assert said(found["keys"], rf"delete_key: True, a second time: False, num_keys {before}")
    [(_, count, total, lost)] = said(
        found["add"], r".* add gives (\d+) of (\d+), get and set (\d+)")
    assert int(count) == int(total) == 300 * size > int(lost)
    assert said(found["values_are_bytes"], r"get\(\"text\"\) b'two', get\(\"number\"\) b'2'")
    assert said(found["values_are_bytes"], r".*: DistNetworkError; .* after that: DistNetworkError")
    assert said(found["values_are_bytes"], r"another connection: get\(\"number\"\) b'2'")
    [(_, order)] = said(found["append_and_multi"], r"the ranks .*: b'(.*) '")
    assert sorted(order.split()) == [str(rank) for rank in range(size)]
    assert said(found["queue"], r"3 pushed, popped \[b'1', b'2', b'3'\]")
    assert said(found["queue"], r"one more, with block=False: QueueEmptyError")
    assert said(found["prefix_store"], r".*job a b'7', job b b'40'; .* is b'7'")

    votes = said(found["elect_leader"], r"the leader is rank (\d)(, that is me)?")
    assert len(votes) == size and len({leader for _, leader, _ in votes}) == 1
    assert [rank for rank, leader, me in votes if me] == [int(votes[0][1])]
    through = said(found["barrier_100_times"], r"100 times through the barrier, 0 times too early")
    assert sorted(through) == [(rank,) for rank in range(size)]

    [(_, pid, task, beats)] = said(
        found["work_queue"], r"the visitor, pid (\d+), has task (\d+); heartbeat: (\w+)")
    assert beats == "True" and not pathlib.Path(f"/proc/{pid}").exists()
    assert said(found["work_queue"], rf"no heartbeat of visitor: its task {task} goes back .*")
    done = said(found["work_queue"], r"did (\d+): ?(.*)")
    assert {rank: count for rank, count, _ in done}[1] == "3"
    late = {rank: tasks.split() for rank, _, tasks in done}[size - 1]
    assert all(int(t) >= 5 or t == task for t in late), late
    assert sorted(int(t) for *_, tasks in done for t in tasks.split()) == list(range(20))
    ways = said(found["process_groups"], rf"(\w+)[:=].*: all_reduce of 1 to {size} gives (\d+)")
    total = str(size * (size + 1) // 2)
    assert ways == [(0, way, total) for way in ("env", "tcp", "file", "store")]
    ended = said(found["server_ends_first"], "get: (DistNetworkError); a second get: \\1")
    assert sorted(ended) == [(rank, "DistNetworkError") for rank in range(1, size)]
    assert result.lines(0)[-1] == (
        f"13 lessons, all checks passed on {size} processes; {size - 1} said goodbye before the"
        " server ended")  # fmt: skip


@pytest.mark.parametrize("size", [
    3, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_it_starts_its_own_processes(tmp_path, size):
    check_lessons(run(PYTHON, ROOT / SCRIPT, "--nprocs", size, cwd=tmp_path), size)
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
        with socket.socket() as probe:  # and on no other address of this machine
            assert probe.connect_ex(("127.0.0.2", int(command[2]))) != 0
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
def test_an_interrupt_ends_all(tmp_path):
    process = start(PYTHON, ROOT / SCRIPT, cwd=tmp_path)
    try:
        read_until(process, "== elect_leader")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130 and "interrupted" in output, output
        assert "Traceback" not in output
        assert_nothing_left(process)
    finally:
        end(process)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["server", "client"])
def test_a_killed_process_ends_the_others(tmp_path, victim):
    """With the server at once, with a client after the timeout that the script sets."""
    process = start(PYTHON, ROOT / SCRIPT, cwd=tmp_path)
    try:
        output = read_until(process, "== keys")
        if victim == "server":
            process.kill()
        else:
            pid = int(re.search(r"\[rank 1/3\] pid (\d+), connected", output)[1])
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert_nothing_left(process)
        assert process.returncode == (-9 if victim == "server" else 1), output
        assert "another process has ended, or is stuck" in output
        assert "Traceback" not in output
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
    # A counter that is not atomic: 300 from each of three processes overwrite each other.
    ({'store.add("atomic", 1)': 'store.set("atomic", str(store.add("atomic", 0) + 1))'},
     r"the store gave \d+, expected 900"),
])  # fmt: skip
def test_the_checks_of_the_script_can_fail(tmp_path, changes, message):
    result = run(PYTHON, variant(tmp_path, SCRIPT, changes), cwd=tmp_path)
    assert result.status == 1 and "all checks passed" not in result.output, result.output
    assert re.search(f"^RuntimeError: {message}$", result.output, re.MULTILINE), result.output


def test_bad_calls(tmp_path):
    def error(*arguments, status):
        result = fork(script, *arguments, cwd=tmp_path)
        assert result.status == status, result.output
        return result.error()

    script = variant(tmp_path, SCRIPT, {"patience=10": "patience=1"})
    with socket.create_server(("127.0.0.1", 0)) as other:  # listens, and never says a word
        taken = other.getsockname()[1]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            client = ("--role", "client", "--port")
            silent = pool.submit(error, *client, taken, status=1)
            with socket.socket() as bound:
                bound.bind(("127.0.0.1", 0))  # taken, so that nobody listens there meanwhile
                absent = pool.submit(error, *client, bound.getsockname()[1], status=1)
                assert "no server at 127.0.0.1, port" in absent.result()
                assert "--role server" in absent.result()
            message = error("--role", "server", "--port", taken, status=1)
            assert "Address already in use" in message and "another --port" in message
            message = error(*client, taken, "--host", "no.such.host.invalid", status=1)
            assert "no.such.host.invalid does not resolve" in message
            message = error("--role", "server", "--host", "192.0.2.1", status=1)
            assert "cannot listen on 192.0.2.1" in message and "of this machine" in message
            assert "does not answer as a TCPStore" in silent.result()
    assert "needs the --port" in error("--role", "client", status=2)
    assert "no --nprocs" in error("--role", "client", "--port", 9, "--nprocs", 2, status=2)
    assert "--nprocs 1: give 2 to 64" in error("--nprocs", 1, status=2)
    assert "--port -1: give 0 (a free one) to 65535" in error("--port=-1", status=2)
    assert "--port 65536: give" in error("--port", 65536, status=2)
    assert "invalid int value: 'x'" in error("--nprocs", "x", status=2)
    assert "invalid choice: 'boss'" in error("--role", "boss", status=2)
    result = fork(SCRIPT, cwd=tmp_path, env={"LOCAL_RANK": "0"})
    assert result.status == 2 and "run it with python, not with torchrun" in result.error()
