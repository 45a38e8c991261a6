"""A machine does not know its own name: torchrun starts the ranks, and they wait for minutes.

    python pitfalls/own_name_unknown.py
    python pitfalls/own_name_unknown.py --fixed

You see torchrun give the ranks the machine's own name, at which they shall find its store. Here the
option --local-addr stands for such a name. Nobody knows it, and the ranks ask again and again:
after some 10 minutes they fail. (The script ends them after 10 seconds.)

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
WAIT = 10  # seconds


def broken():
    return "--local-addr=name-of-this-machine.invalid"  # as without the option, on such a machine


def fixed():
    return "--local-addr=localhost"  # the cure, for a job on one machine


def worker():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: the ranks add up to {total.item():.0f}\n", end="", flush=True)
    dist.destroy_process_group()


def main(cure):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.Popen([*torchrun, fixed() if cure else broken(), *sys.argv],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, limits = [], []
    for line in job.stdout:
        lines.append(line)
        if UNKNOWN in line and not limits:
            limits.append(threading.Timer(WAIT, job.terminate))  # torchrun ends the ranks then
            limits[0].start()
    job.wait()
    output = "".join(lines)
    met = re.findall(r"^rank \d: .*", output, re.MULTILINE)
    said = re.findall(f"The IPv6 .*{re.escape(UNKNOWN)}.*", output)
    if cure != (job.returncode == 0 and len(met) == 2) or cure == bool(said):
        raise RuntimeError(output)
    print("\n".join(sorted(met)) if cure else re.sub(r", \d+\)", ", PORT)", said[0]))
    print("cured: the ranks have met" if cure
          else f"symptom: {WAIT} s later, no rank has met another")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        worker()
    else:
        main(args.fixed)
