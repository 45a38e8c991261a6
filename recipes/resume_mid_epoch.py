"""How do I go on in the middle of an epoch, also with another number of ranks?

    batches = GlobalBatches(len(dataset), global_batch, rank, world_size)  # the class is below
    loader = DataLoader(dataset, batch_sampler=batches)
    for epoch in range(snapshot["epoch"], epochs):
        batches.start_at(epoch, snapshot["step"] if epoch == snapshot["epoch"] else 0)
        for step, batch in enumerate(loader, batches.first_step):
            ...  # one optimizer step; when you save: {"epoch": epoch, "step": step + 1, ...}

Each rank (process) loads its own share of every batch. A step means the batches of all ranks
together: the global batch. Keep its size when the number of ranks (world_size) changes. Then the
epoch and the number of steps done say what all ranks have seen, and any number of ranks can go on.

    torchrun --standalone --nproc-per-node=2 recipes/resume_mid_epoch.py

    [rank 0/2] 96 items, 8 in a batch over all ranks; a job stops after 5 of 12 steps
    [rank 0/2] 4 to 2 ranks, skip on each rank:  20 items twice,  0 never
    [rank 0/2] 4 to 2 ranks, go on by the step:   0 items twice,  0 never
    [rank 0/2] 2 to 4 ranks, skip on each rank:   0 items twice, 40 never
    [rank 0/2] 2 to 4 ranks, go on by the step:   0 items twice,  0 never
    [rank 0/2] same global batch, same global step: each item once, on any number of ranks

The common mistake keeps each rank's batch size, and skips as many batches as each rank had done.
That is right only on the same number of ranks. Count the steps in the training loop, as above: the
loader's workers are ahead of it. In torch 2.15, DataLoader has no state_dict(), and
DistributedSampler cannot start in the middle. StatefulDataLoader in torchdata 0.11 (February 2025)
can do it on the same number of ranks: its state is that of one rank. Its maintainers repair it, but
do not develop it further (June 2026, github.com/meta-pytorch/data/issues/1549). A pull request to
move it into PyTorch is open (github.com/pytorch/pytorch/pull/166732).
"""

import argparse
import itertools
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

EPOCH, STEPS, STOP = 3, 12, 5  # the job stops in epoch 3, after 5 of its 12 steps


class GlobalBatches(Sampler):
    """Gives a rank its share of every global batch. For DataLoader(batch_sampler=...)."""

    def __init__(self, items, global_batch, rank, world_size, seed=0):
        self.items, self.global_batch, self.seed = items, global_batch, seed
        self.rank, self.world_size = rank, world_size
        self.start_at(0)

    def start_at(self, epoch, first_step=0):
        """Call it before each epoch. first_step: how many steps of this epoch are done."""
        self.epoch, self.first_step = epoch, first_step

    def __len__(self):  # the batches left; those of a whole epoch only after start_at(epoch)
        return self.items // self.global_batch - self.first_step

    def __iter__(self):
        # One order for all ranks and any number of them: the seed must not depend on the rank.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.items, generator=generator)
        # A last batch that is not full is left out: with few items, a rank would get none of it.
        for step in range(self.first_step, self.items // self.global_batch):
            batch = order[step * self.global_batch :][: self.global_batch]
            # If world_size does not divide global_batch, some ranks have one item more. The loss
            # must then be weighed by len(batch) * world_size / global_batch.
            yield batch[self.rank :: self.world_size].tolist()


def go_on(dataset, global_batch, rank, world_size, first_step):
    """The right way. All that the stopped job must hand over is the epoch and the step."""
    batches = GlobalBatches(len(dataset), global_batch, rank, world_size)
    batches.start_at(EPOCH, first_step)
    return DataLoader(dataset, batch_sampler=batches)


def skip_on_each_rank(dataset, batch_size, rank, world_size, first_step):
    """Wrong, unless world_size and batch_size (a rank's own) are those of the stopped job."""
    sampler = DistributedSampler(dataset, world_size, rank)
    sampler.set_epoch(EPOCH)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    return itertools.islice(loader, first_step, None)  # also loads all the items that it skips


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if backend == "nccl" else None)
    compare_ways_to_go_on()
    dist.destroy_process_group()


def compare_ways_to_go_on():
    world_size = dist.get_world_size()
    global_batch = 4 * world_size
    dataset = range(STEPS * global_batch)  # your data set
    log(f"{len(dataset)} items, {global_batch} in a batch over all ranks; a job stops after {STOP}"
        f" of {STEPS} steps")
    for old, new in [(2 * world_size, world_size), (world_size, 2 * world_size)]:
        skipped = count_items(skip_on_each_rank, dataset, global_batch // old, old, new)
        right = count_items(go_on, dataset, global_batch, old, new)
        for name, (twice, never) in [("skip on each rank", skipped), ("go on by the step", right)]:
            log(f"{old} to {new} ranks, {name}:  {twice:>2} items twice, {never:>2} never")
        if right != (0, 0):
            raise RuntimeError("going on by the global step does not show each item once")
        if skipped == (0, 0):
            raise RuntimeError("skipping on each rank does not show what this file says")
    log("same global batch, same global step: each item once, on any number of ranks")


def count_items(way, dataset, batch_size, old, new):
    """A job stops on old ranks, and goes on on new ones: how many items come twice, and never?"""
    seen = items_of_job(way, dataset, batch_size, old, 0)[: STOP * old]
    seen += items_of_job(way, dataset, batch_size, new, STOP)
    items = torch.cat(seen).tolist()
    return len(items) - len(set(items)), len(dataset) - len(set(items))


def items_of_job(way, dataset, batch_size, world_size, first_step):
    """What the ranks load from first_step on: a list of batches, step by step."""
    if world_size == dist.get_world_size():  # this very job: each rank loads its own batches
        ranks = gathered(list(way(dataset, batch_size, dist.get_rank(), world_size, first_step)))
    else:  # a job of another size, played in one process
        ranks = [way(dataset, batch_size, rank, world_size, first_step)
                 for rank in range(world_size)]
    return [batch for step in zip(*ranks, strict=True) for batch in step]


# ---- Helpers that are no part of the lesson ----


def pick_device(local_rank):
    """Return (device, backend): for each process a GPU and NCCL, or the CPU and Gloo."""
    if not torch.cuda.is_available():
        if torch.cuda.device_count() and local_rank == 0:  # the driver counts GPUs, torch has none
            print("note: torch cannot use the GPU of this machine, and takes the CPU: is its driver"
                  f" too old for CUDA {torch.version.cuda}?\n", end="", flush=True)
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)  # otherwise every process also takes memory on GPU 0
    return torch.device("cuda", local_rank), "nccl"


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
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
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node=gpu, or the CPU"
             " with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
