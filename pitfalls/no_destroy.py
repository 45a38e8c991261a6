"""No destroy_process_group(), or a DDP model that outlives it: a process aborts after its work.

    python pitfalls/no_destroy.py
    python pitfalls/no_destroy.py --fixed

You see a job of two processes, started again until one of them aborts at its exit. They leave while
the threads of the process group still work on collectives. If such a thread is alive when Python
shuts down, the process aborts. It is a matter of chance: likely here, because rank 1 is slow; one
job in ten without that.

Recognise it: all work is done, and then "terminate called without an active exception", with exit
code -6, SIGABRT (Gloo on Python 3.11). NCCL (one rank, torch 2.11) warns: "destroy_process_group()
was not called before program exit".
Cure: destroy_process_group() waits for the collectives and ends the threads, if nothing else holds
the group. Two things do. DDP is part of a reference cycle: train in a function, then gc.collect().
And torch.distributed.nn holds the group that exists when it is imported (torch 2.11 to 2.15). The
first DDP() imports it: import it before.
"""

import argparse
import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def broken(rank, port):
    start(rank, port)
    model = DDP(torch.nn.Linear(10, 10))
    train_slowly(model, rank)
    # The mistake: the process ends without destroy_process_group().


def broken_too(rank, port):
    start(rank, port)
    model = DDP(torch.nn.Linear(10, 10))
    train_slowly(model, rank)
    dist.destroy_process_group()  # the mistake: the model still holds the group and its threads


def fixed(rank, port):
    # The cure: imported here, before there is a group that it could hold.
    import torch.distributed.nn  # noqa: F401

    start(rank, port)
    make_and_train_model(rank)  # the cure: the model is gone when this returns,
    gc.collect()  # and its reference cycle after this
    dist.destroy_process_group()


def make_and_train_model(rank):
    model = DDP(torch.nn.Linear(10, 10))
    train_slowly(model, rank)


def start(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1)
    )


def train_slowly(model, rank):
    model(torch.ones(1, 10)).sum().backward()
    for _ in range(500):
        time.sleep(0.002 * rank)  # rank 1 is slow
        dist.all_reduce(torch.ones(10), async_op=True)


def main(cure):
    for worker in [fixed] if cure else [broken, broken_too]:
        aborted, jobs = 0, 0
        while jobs < (3 if cure else 20) and not aborted:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            try:
                mp.spawn(worker, (store.port,), nprocs=2)
            except mp.ProcessExitedException as error:
                print(error)
                aborted += error.signal_name == "SIGABRT"
            jobs += 1
        if bool(aborted) == cure:
            raise RuntimeError(f"{worker.__name__}: {aborted} of {jobs} jobs aborted")
        print(
            f"{'cured' if cure else 'symptom'}: {worker.__name__}(): {aborted} of {jobs} jobs"
            " aborted",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
