"""One process fewer than world_size: the others wait for it in init_process_group.

    python pitfalls/rank_never_arrives.py
    python pitfalls/rank_never_arrives.py --fixed

You see 2 processes of a world of 3. Both wait for rank 2 until the timeout: 5 seconds here, 30
minutes with Gloo by default. The key in the error ends with the rank that is missing.

Recognise it: nothing happens after the start. Where rank 0 opens the store itself (MASTER_PORT, no
torchrun), it reports "Timed out after 6 seconds waiting for clients. 2/3 clients joined." and the
others name rank 0, which did come. Who is missing shows when each rank first leaves a key, as here.
Cure: start as many processes as world_size says: torchrun does both from one number. A rank that
died before it came, in an import, say, has its own error further up, or on its own machine.
"""

import argparse
import socket
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE, TIMEOUT = 3, timedelta(seconds=5)


def worker(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    store.set(f"rank {rank}", socket.gethostname())
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=TIMEOUT)
    except dist.DistStoreError as error:
        print(f"[rank {rank}/{WORLD_SIZE}] {error}\n", end="", flush=True)
        return store.add("gave up", 1)
    dist.barrier()
    dist.destroy_process_group()


def main(fixed):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = WORLD_SIZE if fixed else WORLD_SIZE - 1  # the mistake: one fewer
    mp.spawn(worker, (store.port,), nprocs=started)
    missing = [rank for rank in range(WORLD_SIZE) if not store.check([f"rank {rank}"])]
    gave_up = store.add("gave up", 0)
    if (missing, gave_up) != (([], 0) if fixed else ([2], 2)):
        raise RuntimeError(f"missing: {missing}, gave up: {gave_up}")
    print(f"{'cured' if fixed else 'symptom'}: {started} of {WORLD_SIZE} processes started,"
          f" {gave_up} gave up; missing ranks: {missing}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
