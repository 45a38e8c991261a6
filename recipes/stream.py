"""How do I split an IterableDataset over ranks and DataLoader workers?

    def __iter__(self):  # of your dataset; it runs in each worker of each rank
        worker = get_worker_info()
        workers, me = (worker.num_workers, worker.id) if worker else (1, 0)
        start, step = self.rank * workers + me, self.world_size * workers
        return itertools.islice(self.samples(), start, None, step)

An IterableDataset yields samples one after the other, from a file or a queue, and has no index. So
DistributedSampler cannot split it over the ranks (processes), and DataLoader does not split it over
its workers: each worker of each rank iterates over a copy of the dataset, from the first sample on.
Give rank and world_size to your dataset when you make it: in a worker, dist does not know them.

    torchrun --standalone --nproc-per-node=2 recipes/stream.py

    [rank 0/2] a stream of 100 samples; 2 workers on each of 2 ranks
    [rank 0/2] no split                 400 samples delivered, 100 of them different
    [rank 0/2] split by rank            200 samples delivered, 100 of them different
    [rank 0/2] split by rank and worker 100 samples delivered, 100 of them different
    [rank 0/2] batches on each rank, as if a filter had dropped some: 5, 2
    [rank 0/2] steps that each rank takes with all_have():            2, 2

Without a split, or split by rank only, an epoch shows each sample several times, and nothing fails.
Use the same num_workers on all ranks. Shares of a stream often differ in length, for example after
a filter. DistributedDataParallel (DDP) would then wait in backward() for a rank that has no
batch left. all_have() below ends the epoch on all ranks before that, and drops what the others have
left. To train on those batches as well, use Join (pitfalls/uneven_inputs.py).
"""

import argparse
import itertools
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SAMPLES, BATCH_SIZE, WORKERS = 100, 10, 2  # BATCH_SIZE and WORKERS: on each rank


class Stream(IterableDataset):
    """Your stream. rank and world_size come from the main process: dist cannot tell a worker."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def samples(self):
        """All samples, in the same order in every process. Here numbers; yours: lines of a file."""
        yield from range(SAMPLES)


class Whole(Stream):
    """Wrong: every worker delivers every sample."""

    def __iter__(self):
        return self.samples()


class SplitByRank(Stream):
    """Wrong with num_workers > 1: the workers of a rank deliver the same samples."""

    def __iter__(self):
        return itertools.islice(self.samples(), self.rank, None, self.world_size)


class SplitByRankAndWorker(Stream):
    """The right way: of all workers of all ranks, each takes its turn."""

    def __iter__(self):
        worker = get_worker_info()  # None with num_workers=0: the main process reads by itself
        workers, me = (worker.num_workers, worker.id) if worker else (1, 0)
        start, step = self.rank * workers + me, self.world_size * workers
        # Every worker still reads all samples. If yours lie in many files, split the files alike.
        return itertools.islice(self.samples(), start, None, step)


def all_have(batches):
    """Yield batches until one rank has none left. All ranks must iterate over it.

    The tensor is on the CPU, so that .item() does not wait for the work of a GPU, in every step.
    On CUDA, that takes init_process_group("cpu:gloo,cuda:nccl"): Gloo for tensors on the CPU.
    """
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        have = torch.tensor(float(batch is not None))
        dist.all_reduce(have, op=dist.ReduceOp.MIN)  # 0 as soon as one rank says 0
        if have.item() == 0:
            return
        yield batch


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    if device.type != "cpu":  # not run here: one backend for each kind of tensor
        backend = f"cpu:gloo,{device.type}:{backend}"  # "cpu:gloo,cuda:nccl", say
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    deliver()
    end_together(device)
    dist.destroy_process_group()


def deliver():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log(f"a stream of {SAMPLES} samples; {WORKERS} workers on each of {world_size} ranks")
    for name, split, copies in [("no split", Whole, world_size * WORKERS),
                                ("split by rank", SplitByRank, WORKERS),
                                ("split by rank and worker", SplitByRankAndWorker, 1)]:
        loader = DataLoader(split(rank, world_size), BATCH_SIZE, num_workers=WORKERS)
        samples = list(itertools.chain(*gathered(torch.cat(list(loader)).tolist())))
        log(f"{name:<24} {len(samples)} samples delivered, {len(set(samples))} of them different")
        if sorted(samples) != sorted([*range(SAMPLES)] * copies):
            raise RuntimeError(f"{name}: not every sample is delivered {copies} times")


def end_together(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = list(DataLoader(SplitByRankAndWorker(rank, world_size), BATCH_SIZE))  # no workers
    if rank > 0:
        del batches[len(batches) // 2 :]
    steps = 0
    for _ in all_have(batches):
        dist.all_reduce(torch.ones(1, device=device))  # your step: DDP waits in backward(), too
        steps += 1
    have, took = gathered(len(batches)), gathered(steps)
    log(f"batches on each rank, as if a filter had dropped some: {', '.join(map(str, have))}")
    log(f"steps that each rank takes with all_have():            {', '.join(map(str, took))}")
    if min(have) == max(have) or took != [min(have)] * world_size:
        raise RuntimeError(f"batches {have}, steps {took}: not the steps of the shortest share")


# ---- Helpers that are no part of the lesson ----


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def pick_device(local_rank):
    """Return (device, backend): a GPU for each process and its backend, or the CPU and Gloo."""
    kind = torch.accelerator.current_accelerator()  # cuda (ROCm's name, too), xpu, mps, or None
    if count_gpus():
        torch.accelerator.set_device_index(local_rank)  # else each process takes memory on GPU 0
        return torch.device(kind.type, local_rank), dist.get_default_backend_for_device(kind)
    why = ""
    if torch.accelerator.is_available():
        why = f"no backend exchanges tensors of {kind.type}"
    elif torch.cuda.device_count():  # the driver counts GPUs, but torch has none
        why = f"torch cannot use its GPU: is the driver too old for CUDA {torch.version.cuda}?"
    if why and local_rank == 0:
        print(f"note: this machine takes the CPU: {why}\n", end="", flush=True)
    return torch.device("cpu"), "gloo"


def count_gpus():
    """Return how many GPUs, or other accelerators, the ranks on this machine can use."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    # For Apple's GPUs (mps) torch names Gloo, but Gloo exchanges tensors on the CPU alone.
    carried = kind and dist.Backend.default_device_backend_map.get(kind.type, "gloo") != "gloo"
    return torch.accelerator.device_count() if carried else 0


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    """Stop if the way of starting cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
