"""What is printed: about machines, and why the check ends."""

import contextlib
import os
import re
import sys
import threading
import time

import torch.distributed as dist

CLOSED_PORTS = (
    "the machines reach the first one, but not each other: open all ports between"
    " them. A rank listens at a port chosen at random"
)
CUT = (
    "the network was cut, a machine hangs, or large packets are lost, as MTUs differ (ip link"
    " shows it; a switch has one, too): all had just exchanged data"
)


def show(machines):
    """Print what is on each machine. machines: the first Process of each."""
    for machine in machines:
        ranks = "ranks" if machine.processes > 1 else "rank"
        log(
            f"{machine.machine}: {ranks} {machine.ranks}, {machine.address}, {machine.gpus} GPUs,"
            f" torch {machine.torch}"
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
    known = [text for pattern, text in causes.items() if re.search(pattern, said)]
    cause = known[0] if known else "failed"
    return f"{cause} ({type(error).__name__}: {said})"


@contextlib.contextmanager
def time_limit(seconds, message):
    """End this process with the message if the block takes longer than this."""

    def end():
        print_error(message)
        os._exit(1)  # an exception would not reach the main thread, which hangs in torch

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log(message):
    """Print a line with the rank in front: rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print_error(message)
    sys.exit(status)


def print_error(message):
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
