"""A port number in the code: the second job on the machine fails, or joins the first one.

    python pitfalls/fixed_port.py
    python pitfalls/fixed_port.py --fixed

You see two jobs on one machine. The same port number is in the code of both, like the "12355" of
many tutorials. Rank 1 of the first job is late. Rank 0 of the second job cannot open its store (the
server through which the processes of a job meet), because the first job has the port. Rank 1 of the
second job finds a store there, that of the first job, and joins that job.

Recognise it: EADDRINUSE, "address already in use"; or a job that hangs or goes wrong when another
one starts. "ss -tanp 'sport = :12355'" names the process that has the port: often an old job.
Cure: ask for port 0. The system picks a free port, and you give its number to the processes.
"torchrun --standalone" does this for you. (Between machines: pitfalls/README.md has a row.)
"""

import argparse
import contextlib
import os
import random
import socket
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(minutes=1)


def broken(rank, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)  # the mistake: every job has this number, say 12355
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=TIMEOUT)


def fixed(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # the cure: the port of open_store()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)


def open_store():
    """Part of the cure: the process that starts the others opens the store, at a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def main(cure):
    if cure:
        stores = [open_store(), open_store()]
        ports = {"first": stores[0].port, "second": stores[1].port}
    else:
        ports = dict.fromkeys(["first", "second"], number_in_the_code())
    # Without the cure, rank 1 of the first job is so late that it does not come at all.
    others = [("second", 0), ("second", 1)] + [("first", 1)] * cure
    processes = mp.spawn(worker, (others, ports, cure), nprocs=len(others), join=False)
    names = meet("first", 0, ports, cure)  # this process is rank 0 of the first job
    while not processes.join():
        pass
    print(
        f"cured: first job on port {ports['first']}, second job on port {ports['second']}"
        if cure
        else f"symptom: the first job's group is {names}"
    )


def worker(index, others, ports, cure):
    job, rank = others[index]
    if cure:
        return meet(job, rank, ports, cure)
    # The second job comes after rank 0 of the first one, and its rank 1 after its rank 0.
    store = dist.TCPStore("127.0.0.1", ports["first"], is_master=False)
    if rank == 1:
        store.wait(["rank 0 has tried"])
    meet(job, rank, ports, cure)
    if rank == 0:
        store.set("rank 0 has tried", "yes")


def meet(job, rank, ports, cure):
    """Join the group of a job; print and return who is in it."""
    try:
        (fixed if cure else broken)(rank, ports[job])
    except dist.DistNetworkError as error:
        if cure or (job, rank) != ("second", 0):
            raise
        return print(f"{job} job, rank {rank}: {error}\n", end="", flush=True)
    names = [None, None]
    dist.all_gather_object(names, f"{job} job, rank {rank}")
    dist.destroy_process_group()
    print(f"{job} job, rank {rank}: my group is {names}\n", end="", flush=True)
    expected = [job, job] if cure else ["first", "second"]
    if names != [f"{job} job, rank {rank}" for rank, job in enumerate(expected)]:
        raise RuntimeError(f"{job} job, rank {rank} met {names}")
    return names


def number_in_the_code():
    """Stands for 12355, so that this script disturbs nobody: a port that no system gives away."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
