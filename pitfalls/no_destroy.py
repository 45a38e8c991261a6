"""No destroy_process_group(), or a DDP model that outlives it: a process aborts, all work done.

    python pitfalls/no_destroy.py
    python pitfalls/no_destroy.py --fixed

You see jobs whose rank 0 leaves while collectives are under way. If one of them is done while
Python shuts down, rank 0 aborts, by chance: often here, as rank 1 is slow, else in one job of ten.
Recognise it: "terminate called without an active exception" and exit code -6 after the last epoch
(Gloo, Python 3.11). NCCL, not tried here, warns that it "was not called before program exit".
Cure: let go of the model (train in a function) and gc.collect(), as DDP sits in a reference cycle
and keeps the group's threads alive. Then destroy_process_group(), which waits for the collectives.
"""

import argparse
import gc
import os
import socket
import time
from datetime import timedelta

import torch._dynamo  # DDP loads it: once for all, before the processes are forked
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def work_and_leave(rank, address, destroy, let_go):
    global model  # as in a script without functions
    dist.init_process_group("gloo", address, timedelta(seconds=10), world_size=2, rank=rank)
    model = DDP(torch.nn.Linear(10, 10))
    for _ in range(500):
        time.sleep(0.002 * rank)
        dist.all_reduce(torch.ones(10), async_op=True)
    if let_go:  # the mistake: to leave with the model alive
        model = None
        gc.collect()
    if destroy:  # the mistake: to leave without
        dist.destroy_process_group()
    raise SystemExit


def main(fixed):
    for destroy in [True] if fixed else [False, True]:
        aborted = 0
        for _ in range(6):
            with socket.create_server(("127.0.0.1", 0)) as probe:  # at a free port
                address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
            for rank in (0, 1):
                if os.fork() == 0:
                    work_and_leave(rank, address, destroy, let_go=fixed)
            codes = {os.waitstatus_to_exitcode(os.wait()[1]) for _ in (0, 1)}
            assert codes <= ({0} if fixed else {0, -6}), codes
            aborted += -6 in codes
        what = "cured" if fixed else "symptom" if aborted else "a matter of chance, not this time"
        print(f"{what}: {aborted} of 6 jobs aborted; destroy called: {destroy}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
