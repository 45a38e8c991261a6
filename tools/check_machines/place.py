"""Which process this is, how it reaches the others, and what the names of machines mean here."""

import contextlib
import os
import socket
from dataclasses import dataclass

from .words import stop

PORT = 29613  # of a check with names. Not the port of a job, as a check must not disturb a job
LOOPBACK = ("127.", "::1")


@dataclass
class Place:
    """Which process this is, and how it finds the others: through a store.

    The store is a small server of keys and values.
    """

    rank: int
    everyone: list[str]  # what all processes are called, in the order of their ranks
    host: str  # of the store
    port: int
    runs_store: bool  # whether this process has to run the store
    # The local rank counts the processes of one machine. It selects the GPU.
    local_rank: int = 0
    local_world_size: int = 1  # how many processes this machine has

    @property
    def world_size(self):
        return len(self.everyone)


def find_place(names):
    """Return the Place of this process. Stop if nothing tells it.

    torchrun tells each process its rank and the store's address. Without torchrun, the names of all
    machines give both.
    """
    under_torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if under_torchrun == bool(names):
        stop(
            "name all machines (python tools/check_machines.py node1 node2), or use torchrun"
            " without names"
        )
    if names:
        rank = own_rank(names)
        place = Place(rank, names, names[0], PORT, runs_store=rank == 0)
    else:
        place = place_under_torchrun()
    if place.world_size == 1:
        stop("one process has no other to find: name all machines, or start more processes")
    place.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return place


def place_under_torchrun():
    """Return the Place that the variables of torchrun tell."""
    try:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        world_size = int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        stop(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers ({error}): torchrun sets them")
    everyone = [f"rank {other}" for other in range(world_size)]
    # Usually torchrun itself runs the store. Otherwise rank 0 must run it.
    runs_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Place(rank, everyone, os.environ["MASTER_ADDR"], port, runs_store)


def own_rank(names):
    """Return which of the named machines this one is, counted from 0. Stop if it is none."""
    own = None
    if "" in names or len({*names}) < len(names):
        stop(
            f"a name is empty or stands there twice: {' '.join(map(repr, names))}. Name each"
            " machine once, in the same order on all"
        )
    for rank, name in enumerate(names):
        if fault := fault_of_name(name):
            stop(fault, status=1)
        address = address_of(name)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe, contextlib.suppress(OSError):  # another machine's
            probe.bind((address, 0))
            if own is not None:
                stop(f"{names[own]} and {name} are both this machine: name each machine once")
            own = rank
    if own is None:
        stop(f"this machine, {socket.gethostname()}, is none of {' '.join(names)}")
    return own


def address_of(name):
    """Return the address that this machine has for a name, of IPv4 or IPv6; else an OSError."""
    _, _, _, _, address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
    return address[0]


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
