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
import re
import time

import torch.distributed as dist

# The folder beside this file: Python prefers it to a file of the same name.
from check_machines.group import check_sums, make_group, measure_bandwidth, pick_device
from check_machines.machines import compare
from check_machines.meeting import reach_store, wait_for_listener
from check_machines.place import find_place
from check_machines.words import CLOSED_PORTS, CUT, diagnose, log, show, stop, time_limit

CONNECT_LIMIT = 70  # seconds


def main():
    """Find the others, look at the network, and print what is there. Stop at the first fault."""
    args = parse_args()
    place = find_place(args.machines)
    device, backend = pick_device(place.local_rank)  # the backend, NCCL or Gloo, moves the data
    by_name = has_names(args.machines)
    if not place.runs_store:
        wait_for_listener(place.host, place.port, args.timeout)
    silent = CLOSED_PORTS  # what it means if torch does not answer
    try:
        store, machines = meet(place, backend, by_name, args.timeout)
        with time_limit(CONNECT_LIMIT, CLOSED_PORTS):
            make_group(store, place, device, backend)
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
    different = {(machine.machine, machine.address) for machine in machines}
    if len(different) < len(machines):
        log(
            "note: a machine is there twice. torchrun starts all processes of a machine: start one"
            " on each (under Slurm: --ntasks-per-node=1)"
        )
    count = f"{len(different)} machine{'s' if len(different) > 1 else ''}"
    log(f"check passed: {place.world_size} ranks on {count}")
    dist.destroy_process_group()


def meet(place, backend, by_name, timeout):
    """Return (the store, the first Process of each machine). Stop if one sees a fault."""
    # Some waits of the store have no timeout.
    with time_limit(
        timeout + 15,
        f"{place.host}:{place.port} accepts connections, but does not"
        " answer: is it another program, or was the network cut?",
    ):
        store = reach_store(place, timeout)
        machines, faults = compare(store, place, backend, by_name, timeout)
    if faults:
        if place.runs_store:  # it ends with this process: let the others read
            time.sleep(2)
        stop("; also: ".join(faults), status=1)
    return store, machines


def has_names(machines):
    """Return whether one of the machines is given by a name.

    Whoever gives addresses has no names, and starts torchrun with addresses, too.
    """
    return any(not re.fullmatch(r"[\d.]+|.*:.*", machine) for machine in machines)


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
