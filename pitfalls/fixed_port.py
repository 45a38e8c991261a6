"""A port number in the code: the second job on the machine fails, or joins the first one.

    python pitfalls/fixed_port.py
    python pitfalls/fixed_port.py --fixed

You see two jobs with the same port in their code, like the 12355 of tutorials. Rank 0 of the second
cannot open its store there. Its rank 1 finds a store, the first job's, and joins that job.

Recognise it: EADDRINUSE, "address already in use"; or a job that hangs or goes wrong when another
one starts. ss -ltnp 'sport = :12355' names the process that has the port: an old job, often.
Cure: port 0, for which the system picks a free one; hand on the number. torchrun --standalone does.
"""

import argparse
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def meet(store, rank, name):
    """Join the group that meets in the store; return the names of its members."""
    names = [None, None]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1))
    dist.all_gather_object(names, name)
    dist.destroy_process_group()
    return names


def worker(rank, port, fixed):
    try:  # init_process_group does the same with MASTER_PORT: rank 0 opens, the others connect
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0 and not fixed)
    except dist.DistNetworkError as error:
        return print(f"second job, rank 0: {error}\n", end="", flush=True)
    names = meet(store, rank, f"second job, rank {rank}")
    if (names[0] == "second job, rank 0") != fixed:
        raise RuntimeError(f"met {names}")
    print(f"second job, rank {rank}: my group is {names}\n", end="", flush=True)


def main(fixed):
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = own.port if fixed else first.port  # the mistake: the number that the first job has too
    second = mp.spawn(worker, (port, fixed), nprocs=2, join=False)
    names = None if fixed else meet(first, 0, "first job, rank 0")
    while not second.join():
        pass
    if names != (None if fixed else ["first job, rank 0", "second job, rank 1"]):
        raise RuntimeError(f"the first job met {names}")
    assert (port != first.port) == fixed
    print(f"cured: second job on port {port}, first job on port {first.port}" if fixed else
          f"symptom: the first job's group is {names}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
