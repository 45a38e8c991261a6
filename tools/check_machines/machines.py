"""What the processes tell each other about themselves, and the faults that this shows."""

import os
import socket
from dataclasses import asdict, dataclass

import torch

from .meeting import collect
from .place import LOOPBACK, address_of, fault_of_name


@dataclass
class Process:
    """What the others must know of a process, in plain types."""

    local_rank: int
    machine: str  # the machine's own name for itself
    address: str  # what Gloo gives the others: the address of its name, an interface, or "none"
    name: str  # what torchrun gives the others, without --local-addr
    ranks: str  # those of all processes of its machine: "2 3"
    processes: int  # how many its machine has
    backend: str  # "gloo" or a GPU's
    gpus: int  # how many its machine has
    torch: str  # its version


def describe_process(place, backend):
    """Return this Process."""
    # Gloo (on CPUs, and for a group beside a GPU's) gives the others one address of this machine:
    # of the interface that GLOO_SOCKET_IFNAME names, or else the address of the machine's own name.
    address = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    try:
        address = address or address_of(socket.gethostname())
    except OSError:
        address = "none"  # this machine does not know its own name
    first = place.rank - place.local_rank
    return Process(
        local_rank=place.local_rank,
        machine=socket.gethostname(),
        address=address,
        name=socket.getfqdn(),
        ranks=" ".join(str(rank) for rank in range(first, first + place.local_world_size)),
        processes=place.local_world_size,
        backend=backend,
        gpus=0 if backend == "gloo" else torch.accelerator.device_count(),
        torch=torch.__version__,
    )


def compare(store, place, backend, by_name, timeout):
    """Return (the first Process of each machine, the faults that any process sees)."""
    mine = describe_process(place, backend)
    found = collect(store, place, "came", asdict(mine), timeout)
    machines = [Process(**values) for values in found if values["local_rank"] == 0]
    seen = find_faults(machines, mine, by_name)
    seen_by_each = collect(store, place, "sees", seen, timeout)
    return machines, dict.fromkeys(fault for seen in seen_by_each for fault in seen)


def find_faults(machines, mine, by_name):
    """Return a list of sentences, each a fault that this process sees.

    machines: the first Process of each. mine: this Process. by_name: whether a job needs the names
    of the machines. (Under torchrun, it has already used them.)
    """
    faults = []
    if len(machines) > 1 and (fault := fault_of_address(mine)):
        if mine.backend == "gloo":
            faults.append(fault)
        elif mine.local_rank == 0:
            note = f"note: a Gloo group beside {mine.backend} would fail. {fault}"
            print(f"{note}\n", end="", flush=True)
    if by_name:
        others = [other for other in machines if other.ranks != mine.ranks]
        of_names = [fault_of_name(other.name, other.machine) for other in others]
        faults += [fault for fault in of_names if fault]
    return faults + differences(machines)


def fault_of_address(mine):
    """Return a sentence if the address that this machine gives the others is of no use to them."""
    interfaces = [name for index, name in socket.if_nameindex() if index > 1]  # 1 is loopback
    by_interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if by_interface:
        usable = mine.address in interfaces
    else:
        usable = not mine.address.startswith((*LOOPBACK, "none"))
    if usable:
        return None
    if by_interface and mine.address != "lo":
        what = "has no interface with this name"
    else:
        what = "gives the others an address that only it can use"
    return (
        f"{mine.machine} {what} ({mine.address}): on {mine.machine}, set GLOO_SOCKET_IFNAME to"
        f" one of {' '.join(interfaces)}"
    )


def differences(machines):
    """Return a list of sentences about what must be the same on all machines, and is not."""
    faults = []
    for what, cure in {
        "torch": "install the same version everywhere",
        "backend": "where it is gloo, does nvidia-smi (rocm-smi, xpu-smi) work?",
        "processes": "use the same --nproc-per-node everywhere",
    }.items():
        values = [getattr(machine, what) for machine in machines]
        if len({*values}) > 1:
            pairs = zip(machines, values, strict=True)
            each = ", ".join(f"{machine.machine} {value}" for machine, value in pairs)
            faults.append(f"the machines differ in {what} ({each}): {cure}")
    return faults
