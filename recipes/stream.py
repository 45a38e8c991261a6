"""How do I split an IterableDataset over ranks and DataLoader workers?

    def __iter__(self):  # of your dataset; it runs in each worker of each rank
        worker = get_worker_info()
        workers, me = (worker.num_workers, worker.id) if worker else (1, 0)
        start, step = self.rank * workers + me, self.world_size * workers
        return itertools.islice(self.samples(), start, None, step)

An IterableDataset yields samples one after the other, from a file or a queue, and has no index. So
DistributedSampler cannot split it over the ranks (processes), and DataLoader does not split it over
its workers: each worker of each rank iterates over a copy of the dataset, from the first sample on.
Give rank and world_size to your dataset when you make it: only forked workers can ask dist.

    torchrun --standalone --nproc-per-node=2 recipes/stream.py

    [rank 0/2] a stream of 100 samples; 2 workers on each of 2 ranks
    [rank 0/2] no split                 400 samples delivered, 100 of them different
    [rank 0/2] split by rank            200 samples delivered, 100 of them different
    [rank 0/2] split by rank and worker 100 samples delivered, 100 of them different
    [rank 0/2] so, but each shuffles    100 samples delivered, 70 of them different
    [rank 0/2] batches on each rank, as if a filter had dropped some: 5, 2
    [rank 0/2] steps that each rank takes with all_have():            2, 2

Without a split, or split by rank only, an epoch shows each sample several times, and nothing fails.
Each worker of each rank still goes through the whole stream. So let samples() yield what is cheap,
such as lines, keys or names of files, and decode it behind the islice: else more ranks or workers
make nothing faster. Or give whole files to each worker.
samples() must come in one order everywhere, but each worker draws random numbers of its own. So
shuffle by random.Random(SEED + self.epoch), or after the split: otherwise some samples come twice,
and others never. Set dataset.epoch before each epoch, and leave out persistent_workers: these would
keep the first one, and its order. Use the same num_workers on all ranks. Shares of a stream often
differ in length, for example after a filter. DistributedDataParallel (DDP) would then wait in
backward() for a rank that has no batch left. all_have() below ends the epoch on all ranks before,
and drops what the others have left. To train on it, use Join (pitfalls/uneven_inputs.py).
"""

import itertools
import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SAMPLES, BATCH_SIZE, WORKERS = 100, 10, 2  # BATCH_SIZE and WORKERS: on each rank


class Stream(IterableDataset):
    """Your stream. rank and world_size come from the main process."""

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


class Shuffled(SplitByRankAndWorker):
    """Wrong: each worker takes its share of another order."""

    def samples(self):
        return iter(random.sample(range(SAMPLES), SAMPLES))


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
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    deliver()
    end_together()
    dist.destroy_process_group()


def deliver():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log(f"a stream of {SAMPLES} samples; {WORKERS} workers on each of {world_size} ranks")
    for name, split, copies in [
        ("no split", Whole, world_size * WORKERS),
        ("split by rank", SplitByRank, WORKERS),
        ("split by rank and worker", SplitByRankAndWorker, 1),
        ("so, but each shuffles", Shuffled, None),
    ]:
        torch.manual_seed(rank)  # the workers' random numbers follow from it
        loader = DataLoader(split(rank, world_size), BATCH_SIZE, num_workers=WORKERS)
        samples = list(itertools.chain(*gathered(torch.cat(list(loader)).tolist())))
        log(f"{name:<24} {len(samples)} samples delivered, {len(set(samples))} of them different")
        if copies and sorted(samples) != sorted([*range(SAMPLES)] * copies):
            raise RuntimeError(f"{name}: not every sample is delivered {copies} times")


def end_together():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = list(DataLoader(SplitByRankAndWorker(rank, world_size), BATCH_SIZE))  # no workers
    batches = batches[: len(batches) // 2] if rank > 0 else batches
    steps = 0
    for _ in all_have(batches):
        dist.all_reduce(torch.ones(1))  # your step: DDP waits in backward(), too
        steps += 1
    have, took = gathered(len(batches)), gathered(steps)
    log(f"batches on each rank, as if a filter had dropped some: {', '.join(map(str, have))}")
    log(f"steps that each rank takes with all_have():            {', '.join(map(str, took))}")
    if min(have) == max(have) or took != [min(have)] * world_size:
        raise RuntimeError(f"batches {have}, steps {took}: not the steps of the shortest share")


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
