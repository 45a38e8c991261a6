"""A machine does not know its own name: torchrun waits for its own store, and starts no rank.

    python pitfalls/own_name_unknown.py
    python pitfalls/own_name_unknown.py --fixed

You see torchrun open a store, and ask for it by the machine's own name. Here the option
--local-addr stands for such a name. Nobody knows it. So torchrun asks again and again, and starts
no rank: after some 10 minutes it fails. (The script ends it after 10 seconds.)

Recognise it: "The IPv6 network addresses of (NAME, PORT) cannot be retrieved (gai error: -2", with
this machine's name, as `hostname` prints it. It happens in containers, and on laptops that have
left their network.
Cure: torchrun --local-addr=localhost on one machine; or a line "127.0.0.1 NAME" in /etc/hosts. With
several machines, give each its own address: --local-addr=ITS_ADDRESS.
"""

import argparse
import os
import re
import subprocess
import sys
import threading

import torch
import torch.distributed as dist

UNKNOWN = "cannot be retrieved (gai error"
STARTED = "a rank has been started"
WAIT = 10  # seconds


def broken():
    return "--local-addr=name-of-this-machine.invalid"  # as without the option, on such a machine


def fixed():
    return "--local-addr=localhost"  # the cure, for a job on one machine


def worker():
    print(f"{STARTED}\n", end="", flush=True)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: the ranks add up to {total.item():.0f}\n", end="", flush=True)
    dist.destroy_process_group()


def main(cure):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.Popen(
        [*torchrun, fixed() if cure else broken(), *sys.argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, limits = [], []
    for line in job.stdout:
        lines.append(line)
        if UNKNOWN in line and not limits:
            limits.append(threading.Timer(WAIT, job.terminate))
            limits[0].start()
    job.wait()
    output = "".join(lines)
    met = re.findall(r"^rank \d: .*", output, re.MULTILINE)
    said = re.findall(f"The IPv6 .*{re.escape(UNKNOWN)}.*", output)
    started = output.count(STARTED)
    if (started, len(met), job.returncode == 0) != (2 * cure, 2 * cure, cure) or cure == bool(said):
        raise RuntimeError(output)
    print("\n".join(sorted(met)) if cure else re.sub(r", \d+\)", ", PORT)", said[0]))
    print(
        "cured: the ranks have met"
        if cure
        else f"symptom: {WAIT} s later, no rank has been started"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        worker()
    else:
        main(args.fixed)
