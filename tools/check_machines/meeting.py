"""The store, through which all processes find each other: reach it, and exchange values."""

import json
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from .place import LOOPBACK, address_of, fault_of_name
from .words import stop


def wait_for_listener(host, port, timeout):
    """Return once host accepts connections at port. Stop if it does not within the timeout."""
    if fault := fault_of_name(host):
        stop(fault, status=1)
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
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


def reach_store(place, timeout):
    """Return the store. If torchrun starts the processes again, they find no old entries in it."""
    store = dist.TCPStore(
        place.host,
        place.port,
        is_master=place.runs_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return dist.PrefixStore(f"check {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def collect(store, place, key, mine, timeout):
    """Return what each process has put into the store under key. Stop if one does not come.

    init_process_group alone would wait for that process, and not say which it is.
    mine: what this process puts there, of plain types.
    """
    store.set(f"{key} {place.rank}", json.dumps(mine))
    keys = [f"{key} {rank}" for rank in range(place.world_size)]
    # Rank 0 may run the store, from which the others read who is missing. It waits longer.
    seconds = timeout + 2 if place.rank == 0 else timeout
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistStoreError:  # the time is over
        missing = [place.everyone[rank] for rank, k in enumerate(keys) if not store.check([k])]
        stop(
            f"{', '.join(missing)} did not come within {timeout} s: is the check running there,"
            " with the names in the same order, and what does it say?",
            status=1,
        )
    return [json.loads(store.get(each)) for each in keys]
