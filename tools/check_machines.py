"""Check several machines before a long job: do they find each other, and how fast is the network?

The check shows which machines are there, whether data arrives unchanged, and how fast it travels.
If a machine is missing, cut off or badly named, one line says so within a minute, with the cure.
Run the same command on each machine, with the names (or addresses) of all machines:

    python tools/check_machines.py node1 node2

This starts one process on each machine. To check all processes of a job, start the check as you
start the job, without names (on machines with GPUs: --nproc-per-node=gpu):

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-id=345 --rdzv-backend=c10d \
        --rdzv-endpoint=node1:29603 tools/check_machines.py

On two machines without GPUs, the second command prints this (a rank is the number of a process):

    [rank 0/4] node1: ranks 0 1, 10.77.0.1, 0 GPUs, torch 2.15.0
    [rank 0/4] node2: ranks 2 3, 10.77.0.2, 0 GPUs, torch 2.15.0
    [rank 0/4] all_reduce agrees with a ring of send and receive: OK
    [rank 0/4] all_reduce of 16 MiB: 31 ms, 0.81 GB/s bus bandwidth
    [rank 0/4] check passed: 4 ranks on 2 machines

If you have only one machine, launch/lab turns it into several. Next: start the job.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, also a wait of torch

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

PORT = 29613  # of a check with names. Not the port of a job, as a check must not disturb a job
CONNECT_LIMIT = 70  # seconds
LOOPBACK = ("127.", "::1")
CLOSED_PORTS = (
    "the machines reach the first one, but not each other: open all ports between"
    " them. A rank listens at a port chosen at random"
)
CUT = (
    "the network was cut, a machine hangs, or large packets are lost, as MTUs differ (ip link"
    " shows it; a switch has one, too): all had just exchanged data"
)


def main():
    args, silent = parse_args(), CLOSED_PORTS
    rank, everyone, host, port, runs_store = find_place(args.machines)
    if len(everyone) == 1:
        stop("one process has no other to find: name all machines, or start more processes")
    # The local rank counts the processes of one machine. It selects the GPU.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, backend = pick_device(local_rank)  # the backend, NCCL or Gloo, moves the data
    # Whoever gives addresses has no names, and starts torchrun with addresses, too.
    by_name = any(not re.fullmatch(r"[\d.]+|.*:.*", name) for name in args.machines)

    if not runs_store:
        wait_for_listener(host, port, args.timeout)
    try:
        # Some waits of the store have no timeout.
        with time_limit(
            args.timeout + 15,
            f"{host}:{port} accepts connections, but does not"
            " answer: is it another program, or was the network cut?",
        ):
            store = reach_store(host, port, runs_store, args.timeout)
            mine = describe_process(rank, local_rank, local_world_size, backend)
            machines, faults = compare(store, mine, rank, everyone, by_name, args.timeout)
        if faults:
            if runs_store:  # it ends with this process: let the others read
                time.sleep(2)
            stop("; also: ".join(faults), status=1)
        with time_limit(CONNECT_LIMIT, CLOSED_PORTS):
            make_group(store, rank, len(everyone), device, backend)
        silent = CUT
        show(machines)
        check_sums(device)
        measure_bandwidth(device)
    except Exception as error:  # the store, Gloo and NCCL raise types of their own
        stop(diagnose(error, silent), status=1)
    if args.machines and not by_name:
        log(
            "note: give torchrun addresses, too: --local-addr=ITS_ADDRESS on each machine, and"
            " --rdzv-conf=is_host=1 on the first, is_host=0 on the others"
        )
    different = {(m["machine"], m["address"]) for m in machines}
    if len(different) < len(machines):
        log(
            "note: a machine is there twice. torchrun starts all processes of a machine: start one"
            " on each (under Slurm: --ntasks-per-node=1)"
        )
    count = f"{len(different)} machine{'s' if len(different) > 1 else ''}"
    log(f"check passed: {len(everyone)} ranks on {count}")
    dist.destroy_process_group()


def find_place(names):
    """Return (rank, what all processes are called, host and port of the store, do I run it?).

    The processes find each other through a store, a small server of keys and values. torchrun tells
    each process its rank and the store's address. Without torchrun, the names give both.
    """
    under_torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if under_torchrun == bool(names):
        stop(
            "name all machines (python tools/check_machines.py node1 node2), or use torchrun"
            " without names"
        )
    if names:
        rank = own_place(names)
        return rank, names, names[0], PORT, rank == 0
    try:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        everyone = [f"rank {r}" for r in range(int(os.environ["WORLD_SIZE"]))]
    except ValueError as error:
        stop(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers ({error}): torchrun sets them")
    # Usually torchrun itself runs the store. Otherwise rank 0 must run it.
    runs_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return rank, everyone, os.environ["MASTER_ADDR"], port, runs_store


def own_place(names):
    """Return which of the named machines this one is, counted from 0. Stop if it is none."""
    place = None
    if "" in names or len({*names}) < len(names):
        stop(
            f"a name is empty or stands there twice: {' '.join(map(repr, names))}. Name each"
            " machine once, in the same order on all"
        )
    for i, name in enumerate(names):
        if fault := fault_of_name(name):
            stop(fault, status=1)
        address = address_of(name)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe, contextlib.suppress(OSError):  # another machine's
            probe.bind((address, 0))
            if place is not None:
                stop(f"{names[place]} and {name} are both this machine: name each machine once")
            place = i
    if place is None:
        stop(f"this machine, {socket.gethostname()}, is none of {' '.join(names)}")
    return place


def address_of(name):
    """Return the address that this machine has for a name, of IPv4 or IPv6; else an OSError."""
    return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]


def fault_of_name(name, other=None):
    """Return a sentence if this machine does not know name, or not as that of the other machine."""
    here, other_or_name = socket.gethostname(), other or name
    try:
        if not address_of(name).startswith(LOOPBACK) or not other:
            return None
        fault = f"{other} calls itself {name}, and on {here} that means {here}: correct"
    except OSError:
        fault = f"{here} does not know the name {name}: add it to"
    return (
        f"{fault} /etc/hosts, or give its address instead (torchrun on {other_or_name}:"
        " --local-addr=ITS_ADDRESS)"
    )


def wait_for_listener(host, port, timeout):
    """Return once host accepts connections at port. Stop if it does not within the timeout."""
    if fault := fault_of_name(host):
        stop(fault, status=1)
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=2).close()
        except ConnectionRefusedError:
            reason = (
                f"{host} is up, but nothing listens there. Start the check on {host}, too,"
                " with the names in the same order"
            )
            if address_of(host).startswith(LOOPBACK):  # only right on the first machine
                reason = fault_of_name(host, "the first machine")
        except OSError as error:
            reason = (
                f"{error}. Is {host} up, is its address right, and is the port open in its"
                f" firewall? To test: nc -vz {host} {port}"
            )
        if time.monotonic() > deadline:
            stop(
                f"{host}:{port} has not answered {socket.gethostname()} for {timeout} s: {reason}",
                status=1,
            )
        time.sleep(0.2)


def reach_store(host, port, runs_store, timeout):
    """Return the store. If torchrun starts the processes again, they find no old entries in it."""
    store = dist.TCPStore(
        host, port, is_master=runs_store, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    return dist.PrefixStore(f"check {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def describe_process(rank, local_rank, local_world_size, backend):
    """Return what the others must know of this process: a dict of plain types."""
    # Gloo (on CPUs, and for a group beside a GPU's) gives the others one address of this machine:
    # of the interface that GLOO_SOCKET_IFNAME names, or else the address of the machine's own name.
    address = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    try:
        address = address or address_of(socket.gethostname())
    except OSError:
        address = "none"  # this machine does not know its own name
    first = rank - local_rank
    return {
        "local rank": local_rank,
        "machine": socket.gethostname(),
        "address": address,
        "name": socket.getfqdn(),  # torchrun gives the others this one, or --local-addr
        "ranks": " ".join(str(r) for r in range(first, first + local_world_size)),
        "processes": local_world_size,
        "backend": backend,
        "GPUs": 0 if backend == "gloo" else torch.accelerator.device_count(),
        "torch": torch.__version__,
    }


def compare(store, mine, rank, everyone, by_name, timeout):
    """Return (the first process of each machine, the faults that any process sees)."""
    found = collect(store, "came", mine, rank, everyone, timeout)
    machines = [process for process in found if process["local rank"] == 0]
    seen = find_faults(machines, mine, by_name)
    seen_by_each = collect(store, "sees", seen, rank, everyone, timeout)
    return machines, dict.fromkeys(fault for seen in seen_by_each for fault in seen)


def collect(store, key, mine, rank, everyone, timeout):
    """Return what each process has put into the store under key. Stop if one does not come.

    init_process_group alone would wait for that process, and not say which it is.
    """
    store.set(f"{key} {rank}", json.dumps(mine))
    keys = [f"{key} {r}" for r in range(len(everyone))]
    try:
        # Rank 0 may run the store, from which the others read who is missing. It waits longer.
        store.wait(keys, timedelta(seconds=timeout + 2 if rank == 0 else timeout))
    except dist.DistStoreError:  # the time is over
        missing = [name for r, name in enumerate(everyone) if not store.check([keys[r]])]
        stop(
            f"{', '.join(missing)} did not come within {timeout} s: is the check running there,"
            " with the names in the same order, and what does it say?",
            status=1,
        )
    return [json.loads(store.get(k)) for k in keys]


def find_faults(machines, mine, by_name):
    """Return a list of sentences, each a fault that this process sees."""
    faults, machine, address = [], mine["machine"], mine["address"]
    interfaces = [name for index, name in socket.if_nameindex() if index > 1]  # 1 is loopback
    by_interface = os.environ.get("GLOO_SOCKET_IFNAME")
    usable = address in interfaces if by_interface else not address.startswith((*LOOPBACK, "none"))
    if len(machines) > 1 and not usable:
        what = (
            "has no interface with this name"
            if by_interface and address != "lo"
            else "gives the others an address that only it can use"
        )
        fault = (
            f"{machine} {what} ({address}): on"
            f" {machine}, set GLOO_SOCKET_IFNAME to one of {' '.join(interfaces)}"
        )
        if mine["backend"] == "gloo":
            faults.append(fault)
        elif mine["local rank"] == 0:
            print(
                f"note: a Gloo group beside {mine['backend']} would fail. {fault}\n",
                end="",
                flush=True,
            )
    if by_name:  # a job needs the names. Under torchrun, it has already used them
        others = [m for m in machines if m["ranks"] != mine["ranks"]]
        faults += [fault for m in others if (fault := fault_of_name(m["name"], m["machine"]))]
    for what, cure in {
        "torch": "install the same version everywhere",
        "backend": "where it is gloo, does nvidia-smi (rocm-smi, xpu-smi) work?",
        "processes": "use the same --nproc-per-node everywhere",
    }.items():
        if len({m[what] for m in machines}) > 1:
            each = ", ".join(f"{m['machine']} {m[what]}" for m in machines)
            faults.append(f"the machines differ in {what} ({each}): {cure}")
    return faults


def make_group(store, rank, world_size, device, backend):
    """Make the process group. In it, the processes exchange data without the store."""
    # Gloo tries to connect for five times as long as its timeout, here 50 seconds.
    seconds = 10 if backend == "gloo" else 60
    if backend == "nccl":  # it may hang for ever if ports are closed. (Not tried on GPUs.)
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(seconds))  # default: 30 minutes
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        device_id=device if device.type != "cpu" else None,
    )  # for a GPU's backend
    dist.barrier()


def show(machines):
    for m in machines:
        ranks = "ranks" if m["processes"] > 1 else "rank"
        log(
            f"{m['machine']}: {ranks} {m['ranks']}, {m['address']}, {m['GPUs']} GPUs, torch"
            f" {m['torch']}"
        )


def check_sums(device):
    """Stop unless two ways to add up the tensors of all ranks give the same sum."""
    numbers = torch.arange(1024, device=device, dtype=torch.float64) * (dist.get_rank() + 1)
    by_ring = ring_sum(numbers)
    by_all_reduce = numbers.clone()
    dist.all_reduce(by_all_reduce)  # now every rank has the sum
    if not torch.equal(by_all_reduce, by_ring):
        stop("all_reduce and the ring disagree: does the network change data?", status=1)
    log("all_reduce agrees with a ring of send and receive: OK")


def ring_sum(tensor):
    """Return the sum of all ranks' tensors. They travel around the ring from rank to rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(world_size - 1):
        coming = torch.empty_like(passing)
        # Send and receive at once. If all ranks sent first, all would wait for ever.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, passing, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, coming, (rank - 1) % world_size),
            ]
        )
        for work in works:
            work.wait()
        total, passing = total + coming, coming
    return total


def measure_bandwidth(device):
    """Print the bus bandwidth of an all_reduce: the bytes that each rank sends per second."""
    # 16 MiB of integers, as their sum is exact. (NVLink and InfiniBand may need more to be at full
    # speed, which was not tried: benchmarks/collectives.py measures up to 64 MiB.)
    numbers = torch.arange(4 * 2**20, dtype=torch.int32, device=device) % 1000
    world_size, times = dist.get_world_size(), []
    for _ in range(6):
        block = numbers * (dist.get_rank() + 1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(block)
        block[0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
        if not torch.equal(block, numbers * (world_size * (world_size + 1) // 2)):
            stop("a sum of 16 MiB is wrong: does the network change data?", status=1)
    seconds = min(times[1:])  # the first is slower
    sent = 2 * (world_size - 1) / world_size * block.nbytes / seconds
    log(
        f"all_reduce of 16 MiB: {1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms,"
        f" {sent / 1e9:.2f} GB/s bus bandwidth"
    )


def diagnose(error, silent):
    """Return one line: the cause of an error (silent: of a timeout), the cure, torch's words."""
    said = str(error).strip().partition("\n")[0][:300]
    causes = {
        r"\[(127\.|::1)": "a machine gave the others an address that only it can use: on each,"
        " set GLOO_SOCKET_IFNAME to the interface that ip -br address shows",
        "EADDRINUSE": "the port is taken. Is another check or a job running on this machine?",
        "refused|reset|closed|Broken": "another process has ended: see what the other machines say",
        "[Tt]ime": silent,
    }
    cause = next((text for pattern, text in causes.items() if re.search(pattern, said)), "failed")
    return f"{cause} ({type(error).__name__}: {said})"


# ---- Helpers that are no part of the lesson ----


@contextlib.contextmanager
def time_limit(seconds, message):
    """End this process with the message if the block takes longer than this."""

    def end():
        print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # an exception would not reach the main thread, which hangs in torch

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def pick_device(local_rank):
    """Return (device, backend): GPU number local_rank with its backend, or the CPU with Gloo."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(gpu or "cpu")
    if backend != "gloo":
        if local_rank >= torch.accelerator.device_count():
            raise SystemExit("each process needs a GPU: start fewer, or set CUDA_VISIBLE_DEVICES=")
        torch.accelerator.set_device_index(local_rank)  # else every process takes some of GPU 0
        return torch.device(gpu.type, local_rank), backend
    # The CPU, also on a Mac: Gloo cannot send tensors of its GPU. One thread for each process:
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # often faster
    return torch.device("cpu"), "gloo"


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument(
        "machines",
        nargs="*",
        metavar="MACHINE",
        help="the names of all machines, in the same order on each; without torchrun only",
    )
    parser.add_argument("--timeout", type=int, default=30, help="seconds to wait for the others")
    args = parser.parse_args()
    if args.timeout < 1:
        stop("--timeout must be 1 or more")
    return args


if __name__ == "__main__":
    main()
