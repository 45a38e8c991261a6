"""How processes find each other: a TCPStore, one small server for keys and values.

    python 05_tcpstore.py                                 # starts 3 processes itself
    python 05_tcpstore.py --role server --port 29605      # or in two terminals: this first,
    python 05_tcpstore.py --role client --port 29605      # then this in the other

To form a process group, ranks must find each other. So each (with NCCL, rank 0) leaves its address
in a store, a dictionary that processes share, and the others read it there: see the first lesson.
init_process_group does so in 01 to 04; you touch the store yourself when a job restarts, as in 02.
Here processes use one directly, in short lessons: what it can do, and what is built from it: a
barrier (all wait for all), a leader, a work queue, process groups.

    [rank 0/3] == find_each_other
    [rank 0/3] get("0//cpu//0/0"): 178 bytes, with the address 127.0.0.1, port 43551
    [rank 0/3] get("0//cpu//0/1"): 178 bytes, with the address 127.0.0.1, port 40013
    [rank 0/3] get("0//cpu//0/2"): 178 bytes, with the address 127.0.0.1, port 42195
    ...
    [rank 0/3] 11 lessons, all checks passed on 3 processes; 2 said goodbye before the server ended

Rank 0 has the server. The others, its clients, get their ranks in the order in which they come.
Each lesson checks its results. Those keys end in a rank. Next: template/, for a job of your own.
"""

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

# Some calls fail here on purpose. This hides the C++ stack that torch then prints, but no error.
# It must come before the import. Leave it out of a training script.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist

HOST = "127.0.0.1"  # loopback: this machine alone. A TCPStore asks nobody for a password
TIMEOUT = timedelta(seconds=60)  # how long a get or a wait waits; by default 5 minutes
SPAWN = multiprocessing.get_context("spawn")  # a fork would copy locks, but no thread to free them


# What the store can do. Every process calls every lesson. me: its rank, and how many there are.


def find_each_other(store, me):
    """How processes find each other: each leaves its address in the store, under a key of its own,
    reads those of the others, and connects to them. init_process_group does all that."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback: this machine
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    found = 0
    for key in sorted(store.list_keys()) if me.rank == 0 else []:
        value = store.get(key)
        at = value.find(socket.inet_aton(HOST))  # in the two bytes before it is the port
        if at > 0:
            found += 1
            port = int.from_bytes(value[at - 2 : at], "big")
            me.say(f'get("{key}"): {len(value)} bytes, with the address {HOST}, port {port}')
    expect(found, me.world_size if me.rank == 0 else 0)
    dist.barrier()  # one that left early would break the connections of those that still start
    dist.destroy_process_group()


def set_get(store, me):
    """What one process sets, all others can get, as bytes. A get waits until the key is there."""
    if me.rank == 0:
        # wait returns when all of these keys are there.
        store.wait([f"rank {other} asks" for other in range(1, me.world_size)])
        time.sleep(0.3)
        me.say('set("greeting", "hello")')
        store.set("greeting", "hello")
    else:
        me.say('get("greeting"): not there yet')
        expect(store.check(["greeting"]), False)  # check asks without waiting
        store.set(f"rank {me.rank} asks", "")
        start = time.perf_counter()
        greeting = store.get("greeting")
        me.say(f'get("greeting") returns {greeting} after {time.perf_counter() - start:.2f} s')
        expect(greeting, b"hello")


def wait_timeout(store, me):
    """If nobody sets the key, a get fails after the store's timeout, by default 5 minutes. A wait
    can be given a time of its own. Choose a short one: the other may be dead."""
    if me.rank == 0:
        start = time.perf_counter()
        result = outcome(store.wait, ["never set"], timedelta(seconds=0.5))  # its error's name
        seconds = time.perf_counter() - start
        me.say(f'wait(["never set"]): {result} after {seconds:.2f} s')
        expect(result, "DistStoreError")
        expect(0.4 < seconds < 30, True)


def add(store, me):
    """An atomic counter: all processes add to it at once, and nothing is lost. A get followed
    by a set is not atomic: what another process wrote in between is overwritten."""
    if me.rank == 0:
        store.set("careless", "0")
    for _ in range(300):
        # Trap: on a key that holds a text which is no number, add ends the connection.
        store.add("atomic", 1)  # returns the new value; add(key, 0) only asks for it
    count = int(store.get("careless"))
    store.set(f"{me.rank} got", "")
    store.wait([f"{rank} got" for rank in range(me.world_size)])  # the unlucky order, made certain
    store.set("careless", str(count + 1))
    store.set(f"{me.rank} set", "")
    if me.rank == 0:
        store.wait([f"{rank} set" for rank in range(me.world_size)])
        total = 300 * me.world_size
        atomic, careless = store.add("atomic", 0), int(store.get("careless"))
        me.say(f"{me.world_size} processes add 1, 300 times each: {atomic} of {total}")
        me.say(f"{me.world_size} processes set what they got plus 1: {careless} of {me.world_size}")
        expect((atomic, careless), (total, 1))


def barrier_100_times(store, me):
    """A barrier lets nobody pass until all have come: wait_for_all, made of add, set and wait.
    Each process counts itself before it. After it, the count must be complete, 100 times."""
    early = 0
    for use in range(100):
        store.add(f"count {use}", 1)
        wait_for_all(store, me)
        early += store.add(f"count {use}", 0) != me.world_size
    me.say(f"100 times through the barrier, {early} times too early")
    expect((early, store.check(["barrier/gate 0"])), (0, False))  # old gates are deleted


def wait_for_all(store, me, key="barrier", timeout=TIMEOUT):
    """Wait until all processes have come. The same key can be used again and again."""
    # Each use has a gate of its own. A single gate for all uses would stay open after the first,
    # and from then on nobody would wait.
    ticket = store.add(f"{key}/tickets", 1)  # 1, 2, 3 ... over all uses
    use = (ticket - 1) // me.world_size
    if ticket % me.world_size == 0:  # the last one to come opens the gate
        store.set(f"{key}/gate {use}", "open")
        store.delete_key(f"{key}/gate {use - 1}")  # all are here, so nobody waits there any more
    store.wait([f"{key}/gate {use}"], timeout)


def append_and_multi(store, me):
    """append adds to the end of a value; multi_set and multi_get (it waits, too) take many keys."""
    store.append("order", f"{me.rank} ")
    store.multi_set([f"host/{me.rank}", f"pid/{me.rank}"], [socket.gethostname(), str(os.getpid())])
    wait_for_all(store, me)
    if me.rank == 0:
        order = store.get("order")
        me.say(f"the ranks in the order in which they came: {order}")
        expect(sorted(map(int, order.split())), list(range(me.world_size)))
        pids = store.multi_get([f"pid/{rank}" for rank in range(me.world_size)])
        me.say(f"their process ids, with one multi_get: {pids}")
        expect((len(set(pids)), pids[0]), (me.world_size, str(os.getpid()).encode()))


def prefix_store(store, me):
    """Two jobs on one server. Each has a prefix of its own for its keys: they never collide."""
    job_a, job_b = dist.PrefixStore("job a", store), dist.PrefixStore("job b", store)
    if me.rank == 0:
        job_a.set("epoch", "7")
        job_b.set("epoch", "40")
    key = "prefix_store/job a/epoch"  # each lesson has a prefix, too: see play
    got = job_a.get("epoch"), job_b.get("epoch"), store.underlying_store.get(key)
    if me.rank == 0:
        me.say(f'get("epoch"): job a {got[0]}, job b {got[1]}; on the server "{key}" is {got[2]}')
    expect(got, (b"7", b"40", b"7"))


# What is built from the store.


def elect_leader(store, me):
    """compare_set writes only if the key still has the value that you expect, and returns the
    value it has then. All try to be first, one succeeds, and every process learns who."""
    leader = int(store.compare_set("leader", "", str(me.rank)))  # "": the key is not there yet
    me.say(f"the leader is rank {leader}{', that is me' if leader == me.rank else ''}")
    store.set(f"vote/{me.rank}", str(leader))
    votes = store.multi_get([f"vote/{rank}" for rank in range(me.world_size)])
    expect(set(votes), {str(leader).encode()})


def work_queue(store, me):
    """A queue gives each of 20 tasks to one process. One more worker dies with one in hand. Then
    its heartbeat, a count that grows while it lives, stands still: rank 0 puts the task back."""
    if me.rank == 0:
        for task in range(20):
            store.queue_push("tasks", str(task))
        worker = SPAWN.Process(target=run_worker, args=(store.underlying_store.port,), daemon=True)
        worker.start()
    lost = store.get("worker's task")  # wait until the worker has one
    if me.rank == 0:
        alive = [has_heartbeat(store)]
        worker.kill()
        worker.join()
        alive.append(has_heartbeat(store))
        me.say(f"pid {worker.pid}, with task {lost}: heartbeat {alive[0]}; once killed, {alive[1]}")
        expect(alive, [True, False])
        store.queue_push("tasks", lost)
    mine, deadline = [], time.monotonic() + TIMEOUT.total_seconds()
    while store.add("done", 0) < 20 and time.monotonic() < deadline:
        try:
            # With block=True, a pop that waits fails if another process takes the entry.
            task = store.queue_pop("tasks", block=False).decode()
        except dist.QueueEmptyError:  # but the lost task may come back
            time.sleep(0.02)
            continue
        time.sleep(0.2)  # the work
        mine.append(task)
        store.append("all", f"{task} ")
        store.add("done", 1)
    me.say(f"did {len(mine)}: {' '.join(mine)}")
    wait_for_all(store, me)
    if me.rank == 0:
        expect(sorted(map(int, store.get("all").split())), list(range(20)))
        me.say("together 20 tasks of 20, each of them once")


def run_worker(port):
    """Take a task, and never end it."""
    store = dist.PrefixStore("work_queue", connect(port))
    threading.Thread(target=beat, args=(store.clone(),)).start()
    # If it died after the pop and before the set, nobody would know which task is lost.
    store.set("worker's task", store.queue_pop("tasks", block=False))
    store.get("never set")  # the work


def beat(store):
    # A connection does one call at a time, and a get that waits would stop the heartbeat: so this
    # store is a clone, with a connection of its own.
    while True:
        store.add("heartbeat", 1)
        time.sleep(0.1)


def has_heartbeat(store):
    """Return whether the count grows within a second."""
    # A process that hangs, or is very slow, looks dead, too: its task may then be done twice.
    before = store.add("heartbeat", 0)
    time.sleep(1)
    return store.add("heartbeat", 0) > before


def process_groups(store, me):
    """From a store to a process group: four ways, each followed by one all_reduce. torchrun
    sets the variables of env://, and has the server. A launcher of your own can use any way."""
    # For env:// and tcp://, rank 0 would start servers that listen on all addresses. So it makes
    # two private ones first (see serve).
    if me.rank == 0:
        servers, folder = [serve(), serve()], tempfile.TemporaryDirectory()
        places = [str(server.port) for server in servers] + [folder.name]
        store.multi_set(["env", "tcp", "file"], places)
    env, tcp, file = (place.decode() for place in store.multi_get(["env", "tcp", "file"]))
    numbers = {"rank": me.rank, "world_size": me.world_size}
    os.environ |= {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": env,
    }
    ways = {
        "env://": {},  # the default: it reads the four variables
        "tcp://": {"init_method": f"tcp://{HOST}:{tcp}", **numbers},
        "file://": {"init_method": f"file://{file}/meet", **numbers},
        "store=": {"store": dist.PrefixStore("group", store), **numbers},
    }
    for way, arguments in ways.items():
        dist.init_process_group("gloo", timeout=TIMEOUT, **arguments)
        total = torch.tensor(me.rank + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        if me.rank == 0:
            me.say(f"{way:<8} all_reduce of 1 to {me.world_size} gives {total}")
        expect(total.item(), me.world_size * (me.world_size + 1) // 2)
    wait_for_all(store, me)  # before rank 0 returns, which ends the servers and removes the folder


def server_ends_first(store, me):
    """When the process with the server ends, every get of the others fails, also one that
    waits. So the process with the server must leave last."""
    if me.rank == 0:
        server = serve()  # a second server, to end it
        store.set("port", str(server.port))
        server.wait([f"rank {other} is here" for other in range(1, me.world_size)])
        time.sleep(0.3)  # by then they wait
        del server  # stops it, as the end of this process would
    else:
        other = connect(int(store.get("port")))
        other.set(f"rank {me.rank} is here", "")
        results = [outcome(other.get, "never set"), outcome(other.get, "never set")]
        me.say(f"get: {results[0]}; a second get: {results[1]}")
        expect(results, ["DistNetworkError"] * 2)


def say_goodbye(store, me):
    """The others say goodbye as their last call; rank 0, with the server, waits for that."""
    # A barrier is not enough: rank 0 could pass it first, and end the server while another still
    # waits there. A set waits for no answer: whoever has called it needs the server no more.
    if me.rank != 0:
        store.set(f"goodbye from {me.rank}", "")
    else:
        store.wait([f"goodbye from {other}" for other in range(1, me.world_size)])
        me.say(
            f"{len(LESSONS)} lessons, all checks passed on {me.world_size} processes;"
            f" {me.world_size - 1} said goodbye before the server ended"
        )


LESSONS = (
    find_each_other,
    set_get,
    wait_timeout,
    add,
    barrier_100_times,
    append_and_multi,
    prefix_store,
    elect_leader,
    work_queue,
    process_groups,
    server_ends_first,
)


# ---- The lessons end here. Below: the server, its clients, and what each lesson needs. ----


def main():
    args = parse_args()
    if args.role == "client":
        return run_client(args.port)

    store, me = serve(args.port), Member(0, args.nprocs)  # this process serves it, and is rank 0
    store.set("world size", str(me.world_size))
    me.say(f"pid {os.getpid()}, serves at {HOST}, port {store.port}")
    others = 0 if args.role else me.world_size - 1
    clients = [
        SPAWN.Process(target=run_client, args=(store.port,), daemon=True) for _ in range(others)
    ]
    for client in clients:
        client.start()
    if args.role:
        me.say(
            f"waits for {me.world_size - 1} of: python {sys.argv[0]} --role client"
            f" --port {store.port}"
        )
    play(store, me)
    for client in clients:
        client.join()
        expect(client.exitcode, 0)


def run_client(port):
    """Join the server. The order in which clients come gives them their ranks."""
    for second in range(60):
        if socket.socket().connect_ex((HOST, port)) == 0:  # it is there
            break
        if second == 0:
            print(f"waits for a server at {HOST}, port {port}", flush=True)
        time.sleep(1)
    else:
        sys.exit(f"no server at {HOST}, port {port}, in a minute: start it first")
    store = connect(port)
    rank, world_size = store.add("ranks", 1), int(store.get("world size"))
    if rank >= world_size:
        sys.exit(f"the server has its {world_size} processes already")
    me = Member(rank, world_size)
    me.say(f"pid {os.getpid()}, connected to {HOST}, port {port}")
    play(store, me)


def play(store, me):
    """Go through the lessons, all processes together. The one with the server leaves last."""
    wait_for_all(store, me, "start", timedelta(minutes=5))  # time for the second terminal
    for lesson in LESSONS:
        if me.rank == 0:
            for line in [f"== {lesson.__name__}", *lesson.__doc__.splitlines()]:
                me.say(line.strip())
        wait_for_all(store, me)
        lesson(dist.PrefixStore(lesson.__name__, store), me)  # keys of its own
        wait_for_all(store, me)
    say_goodbye(store, me)


def serve(port=0):
    """Start a server in this process (port 0: at any free one). Return a store connected to it."""
    # We open the socket ourselves: a TCPStore would listen on all addresses of this machine.
    # multi_tenant: init_process_group in this process may use this server, instead of its own.
    listener = socket.create_server((HOST, port))
    return dist.TCPStore(
        HOST,
        listener.getsockname()[1],
        is_master=True,
        timeout=TIMEOUT,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def connect(port):
    """Return a store connected to the server at that port."""
    return dist.TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)


@dataclass
class Member:
    """A process: its number, and how many there are."""

    rank: int
    world_size: int

    def say(self, message):
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {self.rank}/{self.world_size}] {message}\n", end="", flush=True)


def outcome(call, *arguments, **options):
    """Return what the call returns, or the name of its error: all derive from DistError."""
    try:
        return call(*arguments, **options)
    except dist.DistError as error:
        return type(error).__name__


def expect(actual, expected):
    if actual != expected:
        raise RuntimeError(f"got {actual!r}, expected {expected!r}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nprocs", type=int, help="default: 3; with --role server 2")
    parser.add_argument("--role", choices=("server", "client"), help="default: start all processes")
    parser.add_argument("--port", type=int, default=0, help="the server's; default: a free one")
    args = parser.parse_args()
    if args.role == "client" and not args.port:
        parser.error("--role client needs the --port that the server printed")
    if not 0 <= args.port < 65536:
        parser.error("--port must be 0 to 65535")
    if args.nprocs is None:
        args.nprocs = 2 if args.role else 3
    if args.nprocs < 2:
        parser.error("--nprocs must be 2 or more: a single process has nobody to find")
    return args


if __name__ == "__main__":
    main()
