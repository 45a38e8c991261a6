"""How processes find each other: a TCPStore, one small server for keys and values.

    python 05_tcpstore.py                                 # starts 3 processes itself
    python 05_tcpstore.py --role server --port 29605      # or in two terminals: this first,
    python 05_tcpstore.py --role client --port 29605      # then this in the other

On two machines, give both --host, the server's address, and set GLOO_SOCKET_IFNAME to the network
interface (eth0, for example). Otherwise Gloo may choose loopback, which no other machine can reach.
You will see what the store can do, and what is built from a store: a leader, a barrier (all wait
for all), a work queue, heartbeats (signs of life), process groups. In init_process_group, each rank
leaves its address in a store, mostly a TCPStore, and reads those of the others.

    [rank 0/3] == set_get
    [rank 0/3] What one process sets, all others can get. A get waits until the key is there.
    [rank 1/3] get("greeting"): not there yet
    [rank 2/3] get("greeting"): not there yet
    [rank 0/3] set("greeting", "hello from pid 4242")
    [rank 2/3] get("greeting") returns b'hello from pid 4242' after 0.31 s
    [rank 1/3] get("greeting") returns b'hello from pid 4242' after 0.31 s

New here: a store needs no process group. (One lesson makes some.) Rank 0 has the server. The others
get their ranks in the order in which they come. A TCPStore has no password: anyone who reaches its
port can read and change everything. Keep it on loopback or on a private network.
Read 01 before this. Here, begin with set_get, the first lesson. Next: recipes/go_on_without.py.
"""

import argparse
import contextlib
import inspect
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

# Some lessons end a connection on purpose. torch then prints twenty lines of C++ stack. This hides
# them (but no errors), and must come before the import. Leave it out of a training script.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)  # how long a get or a wait waits; by default 5 minutes
JOIN_SECONDS = 60  # how long the server waits for its clients


def main():
    args = parse_args()
    if "LOCAL_RANK" in os.environ:
        stop("this script starts its processes itself: run it with python, not with torchrun")
    if args.role == "client":
        guarded(run_client, args.host, args.port)
    else:
        guarded(run_server, args.host, args.port, args.nprocs, args.role is None)


def run_server(host, port, world_size, own_clients):
    """Host the store and take part as rank 0. own_clients: start the other processes here, too."""
    store, me = host_store(host, port), Member(0, world_size, host)
    store.set("world size", str(world_size))
    # spawn: a fork would copy this process without the threads that the store needs.
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=run_child, args=(run_client, host, store.port), daemon=True)
                for _ in range(world_size - 1 if own_clients else 0)]
    # The visitor has no rank. It takes part in one lesson, work_queue, and is killed there.
    visitor = context.Process(target=run_child, args=(run_visitor, host, store.port), daemon=True)
    for process in [*children, visitor]:
        process.start()
    me.say(f"pid {os.getpid()}, serves at {host}, port {store.port}")
    if not own_clients:
        me.say(f"waits for {world_size - 1} of: python 05_tcpstore.py --role client"
               f" --host {host} --port {store.port}")
    deadline = time.monotonic() + JOIN_SECONDS
    while (came := store.add("ranks", 0)) < world_size - 1:
        if any(child.exitcode for child in children):
            stop("a client ended before it had joined", status=1)
        if time.monotonic() > deadline:
            stop(f"{came} of {world_size - 1} clients came within {JOIN_SECONDS} s", status=1)
        time.sleep(0.05)
    play(store, me)
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        stop("a client failed after its last lesson", status=1)


def run_client(host, port):
    """Join the server at that address. The order in which clients come gives them their ranks."""
    store = connect(host, port)
    rank, world_size = store.add("ranks", 1), int(store.get("world size"))
    if rank >= world_size:
        stop(f"the server at {host}, port {port}, has its {world_size} processes already: start it"
             " with a larger --nprocs", status=1)
    me = Member(rank, world_size, host)
    me.say(f"pid {os.getpid()}, connected to {host}, port {port}")
    play(store, me)


@dataclass
class Member:
    """What a process knows: its number, how many there are, and the address of the server."""

    rank: int
    world_size: int
    host: str

    def say(self, message):
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {self.rank}/{self.world_size}] {message}\n", end="", flush=True)


def host_store(host, port):
    """Start the server in this process, on this address only. Return a store connected to it."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        reason = error.strerror.partition(" (")[0]
        stop(f"cannot listen on {host}, port {port} ({reason}): choose another --port, or leave it"
             " out for a free one; --host must be an address of this machine", status=1)
    # We open the socket ourselves: a TCPStore would listen on all addresses of this machine,
    # whatever host it is given. Port 0 lets the system choose a free one. wait_for_workers=True
    # would wait here for the clients. multi_tenant: init_process_group may use this server too.
    return dist.TCPStore(
        host, listener.getsockname()[1], is_master=True, wait_for_workers=False, timeout=TIMEOUT,
        multi_tenant=True, master_listen_fd=listener.detach())


def connect(host, port, timeout=TIMEOUT, patience=10):
    """Return a store connected to the server. Stop if none answers within patience seconds."""
    # TCPStore itself would try for its whole timeout: that of every get, which is long.
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=patience).close()
            break
        except socket.gaierror as error:
            stop(f"--host {host} does not resolve ({error.strerror}): try its IP address", status=1)
        except OSError as error:
            if time.monotonic() > deadline:
                stop(f"no server at {host}, port {port}, for {patience} s ({error}): start it first"
                     f" with --role server --host {host} --port {port}", status=1)
            time.sleep(0.2)

    def give_up():
        print(f"05_tcpstore.py: error: what listens at {host}, port {port}, does not answer as a"
              " TCPStore", file=sys.stderr, flush=True)
        os._exit(1)

    # TCPStore waits for the server's greeting without a limit. If another program listens at that
    # port, the greeting never comes.
    watchdog = threading.Timer(2 * patience, give_up)
    watchdog.start()
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    finally:
        watchdog.cancel()


def play(store, me):
    """Go through the lessons, all processes together; rank 0 leaves last."""
    for lesson in LESSONS:
        if me.rank == 0:
            for line in [f"== {lesson.__name__}", *inspect.getdoc(lesson).splitlines()]:
                me.say(line)
        wait_for_all(store, me)  # a barrier, built below from the store
        lesson(dist.PrefixStore(lesson.__name__, store), me)
        wait_for_all(store, me)
    # At the end a barrier is not enough. Rank 0 could pass it first, and end the server while
    # another still waits for the answer to its last call. So the others add to a count, as their
    # very last call, and rank 0 waits until the count is complete.
    if me.rank != 0:
        store.add("goodbye", 1)
        return
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while store.add("goodbye", 0) < me.world_size - 1:
        if time.monotonic() > deadline:
            stop("a client has ended without its goodbye", status=1)
        time.sleep(0.01)
    me.say(f"{len(LESSONS)} lessons, all checks passed on {me.world_size} processes;"
           f" {me.world_size - 1} said goodbye before the server ended")


# What the store can do. Every process calls every lesson; each lesson has keys of its own.


def set_get(store, me):
    """What one process sets, all others can get. A get waits until the key is there."""
    if me.rank == 0:
        for other in range(1, me.world_size):
            store.wait([f"rank {other} asks"])
        time.sleep(0.3)
        greeting = f"hello from pid {os.getpid()}"
        me.say(f'set("greeting", "{greeting}")')
        store.set("greeting", greeting)
        store.set("greeting again", greeting)
    else:
        me.say('get("greeting"): not there yet')
        expect(store.check(["greeting"]), False)
        store.set(f"rank {me.rank} asks", "")
        start = time.perf_counter()
        greeting = store.get("greeting")
        me.say(f'get("greeting") returns {greeting} after {time.perf_counter() - start:.2f} s')
        expect(greeting, store.get("greeting again"))


def wait_timeout(store, me):
    """If nobody ever sets the key, wait and get end with an error, by default after 5 minutes.
    You can give wait another time; get uses the store's (timeout, or set_timeout). Choose a
    short one: a process that waits for one that has died should say so soon."""
    if me.rank == 0:
        start = time.perf_counter()
        result = outcome(store.wait, ["never set"], timedelta(seconds=0.5))
        me.say(f'wait(["never set"]): {result} after {time.perf_counter() - start:.2f} s')
        expect(result, "DistStoreError")


def keys(store, me):
    """check asks without waiting. delete_key says whether there was something to delete.
    num_keys counts all keys of a server: here of a server that nobody else uses."""
    if me.rank == 0:
        store = host_store(me.host, 0)
        before = store.num_keys()
        store.set("key", "value")
        after = store.num_keys()
        there, both = store.check(["key"]), store.check(["key", "no"])
        me.say(f'set("key", "value"): num_keys {before} -> {after}, check(["key"]) {there},'
               f' check(["key", "no"]) {both}')
        deleted, again = store.delete_key("key"), store.delete_key("key")
        me.say(f"delete_key: {deleted}, a second time: {again}, num_keys {store.num_keys()}")
        expect((after - before, there, both, deleted, again), (1, True, False, True, False))
        expect(store.num_keys(), before)


def add(store, me):
    """An atomic counter: all processes add to it at once, and nothing is lost. A get followed
    by a set is not atomic: what another process wrote in between is overwritten."""
    if me.rank == 0:
        store.set("careless", "0")
    wait_for_all(store, me)
    for _ in range(300):
        store.add("atomic", 1)
    count = int(store.get("careless"))
    wait_for_all(store, me)  # makes the unlucky order certain: all get before anyone sets
    store.set("careless", str(count + 1))
    wait_for_all(store, me)
    if me.rank == 0:
        total = 300 * me.world_size
        atomic, careless = store.add("atomic", 0), int(store.get("careless"))
        me.say(f"{me.world_size} processes add 1, 300 times each: {atomic} of {total}")
        me.say(f"{me.world_size} processes set what they got plus 1: {careless} of"
               f" {me.world_size}")
        expect((atomic, careless), (total, 1))


def values_are_bytes(store, me):
    """Values come back as bytes, numbers as decimal text. Trap: add, on a key that holds other
    text, ends the connection, and all later calls on that connection fail."""
    if me.rank == 0:
        store.set("text", "two")
        store.add("number", 2)
        values = store.get("text"), store.get("number")
        me.say(f'get("text") {values[0]}, get("number") {values[1]}')
        expect(values, (b"two", b"2"))
        throwaway = store.clone()
        results = [outcome(throwaway.add, "text", 1), outcome(throwaway.get, "number")]
        me.say(f'add("text", 1): {results[0]}; get("number") after that: {results[1]}')
        me.say(f'another connection: get("number") {outcome(store.get, "number")}')
        expect(results, ["DistNetworkError"] * 2)


def append_and_multi(store, me):
    """append adds to the end of a value; multi_set and multi_get take many keys in one trip."""
    store.append("log", f"{me.rank} ")
    store.multi_set([f"host/{me.rank}", f"pid/{me.rank}"], [socket.gethostname(), str(os.getpid())])
    wait_for_all(store, me)
    if me.rank == 0:
        order = store.get("log")
        me.say(f"the ranks in the order in which they came: {order}")
        expect(sorted(map(int, order.split())), list(range(me.world_size)))
        pids = store.multi_get([f"pid/{rank}" for rank in range(me.world_size)])
        me.say(f"their process ids, with one multi_get: {pids}")
        expect((len(set(pids)), pids[0]), (me.world_size, str(os.getpid()).encode()))


def queue(store, me):
    """First in, first out, and each entry goes to one process. Use block=False, as here: a pop
    that waits for an entry fails if another process then takes the entry first."""
    if me.rank == 0:
        for number in (1, 2, 3):
            store.queue_push("numbers", str(number))
        length = store.queue_len("numbers")
        popped = [store.queue_pop("numbers", block=False) for _ in range(length)]
        me.say(f"{length} pushed, popped {popped}")
        expect(popped, [b"1", b"2", b"3"])
        result = outcome(store.queue_pop, "numbers", block=False)
        me.say(f"one more, with block=False: {result}")
        expect(result, "QueueEmptyError")


def prefix_store(store, me):
    """Two jobs on one server. Each has a prefix of its own for its keys: they never collide."""
    job_a, job_b = dist.PrefixStore("job a", store), dist.PrefixStore("job b", store)
    if me.rank == 0:
        job_a.set("epoch", "7")
        job_b.set("epoch", "40")
    key = "prefix_store/job a/epoch"  # store has a prefix of its own: play() gives each lesson one
    got = job_a.get("epoch"), job_b.get("epoch"), store.underlying_store.get(key)
    expect(got, (b"7", b"40", b"7"))
    if me.rank == 0:
        me.say(f'get("epoch"): job a {got[0]}, job b {got[1]}; on the server "{key}" is {got[2]}')


# What is built from the store.


def elect_leader(store, me):
    """compare_set writes only if the key still has the value that you expect, and returns the
    value it has then. All try to be first, one succeeds, and every process learns who."""
    # "" means: the key is missing, or empty. Trap: if the key is missing and you expect anything
    # else, compare_set writes nothing and returns what you expected, as if it were there.
    # This leader stays leader even when it dies. To elect another, a job also needs a heartbeat.
    leader = int(store.compare_set("leader", "", str(me.rank)))
    me.say(f"the leader is rank {leader}{', that is me' if leader == me.rank else ''}")
    store.set(f"vote/{me.rank}", str(leader))
    votes = store.multi_get([f"vote/{rank}" for rank in range(me.world_size)])
    expect(set(votes), {str(leader).encode()})


def barrier_100_times(store, me):
    """The barrier between the lessons (wait_for_all: ten lines of add, set, wait), 100 times.
    Each process counts itself before a barrier. After the barrier, the count is complete."""
    early = 0
    for use in range(100):
        store.add(f"count {use}", 1)
        wait_for_all(store, me, "gates")
        early += store.add(f"count {use}", 0) != me.world_size
    me.say(f"100 times through the barrier, {early} times too early")
    expect(early, 0)
    wait_for_all(store, me)
    expect(store.check(["gates/gate 99"]) and not store.check(["gates/gate 98"]), True)


def wait_for_all(store, me, key="barrier"):
    """Wait until all processes have come. The same key can be used again and again."""
    # Each use has a gate of its own. A single gate for all uses would stay open after the first,
    # and from then on nobody would wait.
    ticket = store.add(f"{key}/tickets", 1)  # 1, 2, 3 ... over all uses
    use = (ticket - 1) // me.world_size
    if ticket % me.world_size == 0:  # the last one to come opens the gate
        store.set(f"{key}/gate {use}", "open")
        store.delete_key(f"{key}/gate {use - 1}")  # all are here, so nobody waits there any more
    store.wait([f"{key}/gate {use}"])


def work_queue(store, me):
    """20 tasks, each done once, though workers come and go: rank 1 leaves after three, the
    last rank comes late, and a visitor is killed before its task is done."""
    tasks, finished = [str(task) for task in range(20)], threading.Event()
    heart = threading.Thread(
        target=beat, args=(store.clone(), f"rank {me.rank}", finished), daemon=True)
    heart.start()
    if me.rank == 0:
        for task in tasks:
            store.queue_push("tasks", task)
        kill_visitor(store, me)
    store.wait(["visitor's task"])
    while me.rank == me.world_size - 1 and store.add("done", 0) < 5:
        time.sleep(0.02)
    mine = work(store, me, tasks)
    me.say(f"did {len(mine)}: {' '.join(mine)}")
    store.set(f"tasks of {me.rank}", " ".join(mine))
    finished.set()
    heart.join()
    if me.rank == 0:
        done = b" ".join(store.multi_get([f"tasks of {rank}" for rank in range(me.world_size)]))
        expect(sorted(map(int, done.split())), list(range(len(tasks))))
        me.say(f"together {len(done.split())} tasks of {len(tasks)}, each of them once")


def beat(store, name, finished):
    """Add to a key ten times a second: the heartbeat, a sign that this process is alive."""
    # Give the heartbeat a connection of its own (a clone). A connection does one call at a time: a
    # get that waits would stop the heartbeat.
    with contextlib.suppress(dist.DistError):  # the main thread will report it
        while not finished.wait(0.1):
            store.add(f"beat/{name}", 1)


def run_visitor(host, port):
    """A process that takes a task, and works on it until it is killed."""
    # The visitor's connection waits longer: the other processes may come late.
    server = connect(host, port, timeout=timedelta(minutes=2), patience=2)
    store = dist.PrefixStore("work_queue", server)
    threading.Thread(
        target=beat, args=(store.clone(), "visitor", threading.Event()), daemon=True).start()
    task = take_task(store)
    while task is None:
        time.sleep(0.02)
        task = take_task(store)
    store.set(f"owner/{task}", "visitor")
    store.multi_set(["visitor's pid", "visitor's task"], [str(os.getpid()), task])
    store.wait(["the end of the task"])  # never comes; ends with an error when the server is gone


def kill_visitor(store, me):
    pid, task = store.multi_get(["visitor's pid", "visitor's task"])
    alive = is_alive(store, "visitor")
    me.say(f"the visitor, pid {int(pid)}, has task {int(task)}; heartbeat: {alive}")
    expect(alive, True)
    # Anyone can write to a store. So never kill a pid that stands there, unless it is your child's.
    [child] = [c for c in multiprocessing.active_children() if c.pid == int(pid)]
    child.kill()
    me.say("the visitor is killed")


def is_alive(store, name, patience=1.5):
    """Return whether the heartbeat of that name changes within patience seconds."""
    # Compare counts, not times of day: the clocks of two machines may differ.
    before, deadline = store.add(f"beat/{name}", 0), time.monotonic() + patience
    while time.monotonic() < deadline:
        if store.add(f"beat/{name}", 0) != before:
            return True
        time.sleep(0.05)
    return False


def work(store, me, tasks):
    """Take tasks until all are done (rank 1: only three). Return those that this rank has done."""
    mine, deadline = [], time.monotonic() + TIMEOUT.total_seconds()
    while store.add("done", 0) < len(tasks) and not (me.rank == 1 and len(mine) == 3):
        if time.monotonic() > deadline:
            raise RuntimeError("a task was lost")
        task = take_task(store)
        if task is None:
            if me.rank == 0:
                requeue_lost_tasks(store, me, tasks)
            time.sleep(0.02)
            continue
        # Trap: if a process dies here, its task is lost, as no key names its owner yet. So a real
        # queue, when it has been empty for a while, also pushes tasks without an owner again.
        store.set(f"owner/{task}", f"rank {me.rank}")
        time.sleep(0.02)  # the work
        # A slow process may be taken for dead. Then its task is done twice. The first time counts.
        if store.add(f"times done/{task}", 1) == 1:
            mine.append(task)
            store.add("done", 1)
    return mine


def take_task(store):
    """Return a task from the queue, or None while it is empty."""
    # Without block=False, the call waits and then pops. In between another process can be faster.
    # With torch 2.15, such a call also left an answer behind on its connection. The next wait on
    # that connection then returned at once, for a key that nobody had set.
    try:
        return store.queue_pop("tasks", block=False).decode()
    except dist.QueueEmptyError:
        return None


def requeue_lost_tasks(store, me, tasks):
    """Push a task again if the process that took it has no heartbeat any more."""
    for task in tasks:
        if store.check([f"owner/{task}"]) and not store.check([f"times done/{task}"]):
            owner = store.get(f"owner/{task}").decode()
            # Look at "times done" again: the owner may have finished and left in the meantime.
            if not is_alive(store, owner) and not store.check([f"times done/{task}"]):
                me.say(f"no heartbeat of {owner}: its task {task} goes back to the queue")
                store.delete_key(f"owner/{task}")
                store.queue_push("tasks", task)


def process_groups(store, me):
    """From a store to a process group: four ways, each followed by one all_reduce. torchrun
    sets the variables of env://, and has the server. A launcher of your own can use any way."""
    for way in ("env://", "tcp://", "file://", "store="):
        own, server, folder = dist.PrefixStore(way, store), None, None
        if me.rank == 0:
            # env:// and tcp:// need no server of yours: on rank 0, init_process_group starts one at
            # that port. Here it finds this one (multi_tenant): nobody else can take the port.
            server, folder = host_store(me.host, 0), tempfile.TemporaryDirectory()
            own.multi_set(["port", "folder"], [str(server.port), folder.name])
        port, path = int(own.get("port")), own.get("folder").decode()
        own.add("sees the folder", int(os.path.isdir(path)))
        wait_for_all(own, me)
        if way == "file://" and own.add("sees the folder", 0) < me.world_size:
            me.say("file://: left out, as not every process sees the same folder")
        else:
            arguments = rendezvous_arguments(way, me, port, path, server)
            if me.host == "127.0.0.1":  # all processes are on this machine
                listen_locally()
            dist.init_process_group("gloo", timeout=TIMEOUT, **arguments)
            total = torch.tensor(dist.get_rank() + 1)
            dist.all_reduce(total)
            dist.destroy_process_group()
            expect(total.item(), me.world_size * (me.world_size + 1) // 2)
            if me.rank == 0:
                me.say(f"{arguments.get('init_method', 'store=TCPStore(...)')}: all_reduce of 1 to"
                       f" {me.world_size} gives {total}")
        wait_for_all(own, me)  # before rank 0 ends the server and removes the folder


def rendezvous_arguments(way, me, port, path, server):
    """Return the arguments with which init_process_group finds the others in that way."""
    numbers = {"rank": me.rank, "world_size": me.world_size}
    if way == "env://":
        os.environ.update(MASTER_ADDR=me.host, MASTER_PORT=str(port),
                          RANK=str(me.rank), WORLD_SIZE=str(me.world_size))
        return {"init_method": "env://"}
    if way == "tcp://":
        return {"init_method": f"tcp://{me.host}:{port}", **numbers}
    if way == "file://":  # use a new file for every job: an old one has old addresses
        return {"init_method": f"file://{path}/meeting-point", **numbers}
    return {"store": server or connect(me.host, port), **numbers}


def server_ends_first(store, me):
    """When the process with the server ends, every call of the others fails, also a get that
    waits. So the others must say goodbye, and the process with the server must leave last."""
    if me.rank == 0:
        server = host_store(me.host, 0)  # a second server, to end it
        store.set("port", str(server.port))
        for other in range(1, me.world_size):
            server.wait([f"rank {other} is here"])
        del server  # stops it, as the end of this process would
    else:
        other = connect(me.host, int(store.get("port")))
        other.set(f"rank {me.rank} is here", "")
        waiting, later = outcome(other.get, "never set"), outcome(other.get, "never set")
        me.say(f"get: {waiting}; a second get: {later}")
        expect((waiting, later), ("DistNetworkError", "DistNetworkError"))


LESSONS = (set_get, wait_timeout, keys, add, values_are_bytes, append_and_multi, queue,
           prefix_store, elect_leader, barrier_100_times, work_queue, process_groups,
           server_ends_first)


# ---- Helpers that are no part of the lesson ----


def outcome(call, *arguments, **options):
    """Return what the call returns, or the name of its error: all derive from DistError."""
    try:
        return call(*arguments, **options)
    except dist.DistError as error:
        return type(error).__name__


def expect(actual, expected):
    if actual != expected:
        raise RuntimeError(f"the store gave {actual!r}, expected {expected!r}")


def run_child(function, *arguments):
    """Call function in a child process of run_server, which ends it on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guarded(function, *arguments)


def guarded(function, *arguments):
    """Call function. A lost connection or an interrupt ends the process with one line."""
    try:
        function(*arguments)
    except dist.DistError as error:
        reason = str(error).strip().partition("\n")[0]
        stop(f"pid {os.getpid()}: another process has ended, or is stuck ({reason})", status=1)
    except KeyboardInterrupt:
        stop(f"pid {os.getpid()}: interrupted", status=130)


def listen_locally():
    """Let Gloo listen on this machine only: by default, anyone on its network can connect."""
    # Interface 1 is the loopback interface: lo on Linux, lo0 on a Mac.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Rank 0 says it, and its end ends the others.
    if dist.is_initialized() and dist.get_rank() > 0:
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("--nprocs", type=int, help="default: 3; with --role server 2")
    parser.add_argument("--role", choices=("server", "client"), help="default: start all processes")
    parser.add_argument("--host", default="127.0.0.1", help="the server's address")
    parser.add_argument("--port", type=int, default=0, help="the server's; default: a free one")
    args = parser.parse_args()
    if not 0 <= args.port < 65536:
        stop(f"--port {args.port}: give 0 (a free one) to 65535")
    if args.role == "client" and (args.port == 0 or args.nprocs is not None):
        stop("--role client needs the --port that the server printed, and no --nprocs")
    if args.nprocs is None:
        args.nprocs = 2 if args.role else 3
    if not 2 <= args.nprocs <= 64:
        stop(f"--nprocs {args.nprocs}: give 2 to 64; a single process has nobody to find")
    return args


if __name__ == "__main__":
    main()
