"""One process fewer than world_size: the others wait for it in init_process_group.

    python pitfalls/rank_never_arrives.py
    python pitfalls/rank_never_arrives.py --fixed

You see two processes of a job that should have three. Both wait for rank 2 until the timeout, which
is 5 seconds here. The default is 30 minutes with Gloo.

Recognise it: the job starts, and then nothing happens. If rank 0 opens the store itself (with
MASTER_PORT, without torchrun), rank 0 reports "Timed out after 6 seconds waiting for clients. 2/3
clients joined." The others then name rank 0, which did come. To see who is missing, let each rank
first leave a key in the store, as here.
Cure: start as many processes as world_size says. torchrun takes both from one number. A rank that
died before it came, in an import, say, has its own error further up, or on its own machine.
"""

import argparse
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=5)


def broken(port):
    mp.spawn(worker, (3, port), nprocs=2)  # the mistake: world_size is 3, and nprocs is 2


def fixed(port):
    world_size = 3
    mp.spawn(worker, (world_size, port), nprocs=world_size)  # the cure: one number for both


def worker(rank, world_size, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    store.set(f"rank {rank}", "is here")
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
    except dist.DistStoreError as error:
        print(f"[rank {rank}/{world_size}] {error}\n", end="", flush=True)
        store.add("gave up", 1)
    else:
        dist.barrier()
        dist.destroy_process_group()


def main(cure):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (fixed if cure else broken)(store.port)
    missing = [rank for rank in range(3) if not store.check([f"rank {rank}"])]
    gave_up = store.add("gave up", 0)
    if (missing, gave_up) != (([], 0) if cure else ([2], 2)):
        raise RuntimeError(f"missing: {missing}, gave up: {gave_up}")
    print(
        f"{'cured' if cure else 'symptom'}: {3 - len(missing)} of 3 processes started,"
        f" {gave_up} gave up; missing ranks: {missing}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
