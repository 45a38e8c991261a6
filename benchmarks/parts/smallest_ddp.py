"""The smallest script that trains with DDP: what startup.py and recovery.py compare with.

    torchrun --standalone --nproc-per-node=2 benchmarks/parts/smallest_ddp.py 1
    python benchmarks/parts/smallest_ddp.py 1 2

The numbers: steps, and without torchrun the processes.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, world_size, store, steps):
    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.Backend.default_device_backend_map.get(kind.type, "gloo") if kind else "gloo"
    device = torch.device("cpu") if backend == "gloo" else torch.device(kind.type, rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    model = DDP(torch.nn.Linear(10, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.zeros(1, 10, device=device)).sum().backward()
        optimizer.step()
        time.sleep(0.01)


def spawned(rank, world_size, port, steps):
    worker(rank, world_size, dist.TCPStore("127.0.0.1", port, is_master=False), steps)


if __name__ == "__main__":
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        worker(rank, world_size, dist.PrefixStore(attempt, store), int(sys.argv[1]))
    else:
        world_size = int(sys.argv[2])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(spawned, (world_size, store.port, int(sys.argv[1])), nprocs=world_size)
