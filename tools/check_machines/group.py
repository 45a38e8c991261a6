"""The process group, in which the processes exchange data: is it unchanged, and how fast?"""

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .words import log, stop


def pick_device(local_rank):
    """Return (device, backend): GPU number local_rank with its backend, or the CPU with Gloo."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(gpu or "cpu")
    if backend != "gloo":
        if local_rank >= torch.accelerator.device_count():
            raise SystemExit("each process needs a GPU: start fewer, or set CUDA_VISIBLE_DEVICES=")
        torch.accelerator.set_device_index(local_rank)  # without it, all take memory of GPU 0, too
        return torch.device(gpu.type, local_rank), backend
    # The CPU, also on a Mac: Gloo cannot send tensors of its GPU. One thread for each process:
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # often faster
    return torch.device("cpu"), "gloo"


def make_group(store, place, device, backend):
    """Make the process group. In it, the processes exchange data without the store."""
    # Gloo tries to connect for five times as long as its timeout, here 50 seconds.
    seconds = 10 if backend == "gloo" else 60
    if backend == "nccl":  # it may hang for ever if ports are closed. (Not tried on GPUs.)
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(seconds))  # default: 30 minutes
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=seconds),
        device_id=device if device.type != "cpu" else None,  # for a GPU's backend
    )
    dist.barrier()


def check_sums(device):
    """Stop unless two ways to add up the tensors of all ranks give the same sum."""
    numbers = torch.arange(1024, device=device, dtype=torch.float64) * (dist.get_rank() + 1)
    by_ring = ring_sum(numbers)
    by_all_reduce = numbers.clone()
    dist.all_reduce(by_all_reduce)  # now every rank has the sum
    if not torch.equal(by_all_reduce, by_ring):
        stop("all_reduce and the ring disagree: does the network change data?", status=1)
    log("all_reduce agrees with a ring of send and receive: OK")


def ring_sum(tensor):
    """Return the sum of all ranks' tensors. They travel around the ring from rank to rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(world_size - 1):
        coming = torch.empty_like(passing)
        # Send and receive at once. If all ranks sent first, all would wait for ever.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, passing, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, coming, (rank - 1) % world_size),
            ]
        )
        for work in works:
            work.wait()
        total, passing = total + coming, coming
    return total


def measure_bandwidth(device):
    """Print the bus bandwidth of an all_reduce: the bytes that each rank sends per second."""
    # 16 MiB of integers, as their sum is exact. (NVLink and InfiniBand may need more to be at full
    # speed, which was not tried: benchmarks/collectives.py measures up to 64 MiB.)
    numbers = torch.arange(4 * 2**20, dtype=torch.int32, device=device) % 1000
    world_size, times = dist.get_world_size(), []
    for _ in range(6):
        block = numbers * (dist.get_rank() + 1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(block)
        block[0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
        if not torch.equal(block, numbers * (world_size * (world_size + 1) // 2)):
            stop("a sum of 16 MiB is wrong: does the network change data?", status=1)
    seconds = min(times[1:])  # the first is slower
    sent = 2 * (world_size - 1) / world_size * block.nbytes / seconds
    digits = 1 if seconds < 0.01 else 0
    log(
        f"all_reduce of 16 MiB: {1000 * seconds:.{digits}f} ms, {sent / 1e9:.2f} GB/s bus bandwidth"
    )
