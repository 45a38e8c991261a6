"""How do I go on in the middle of an epoch, also with another number of ranks?

    steps = range(snapshot["step"], total_steps)  # counted over all epochs
    batches = GlobalBatches(steps, len(dataset), batch_size, rank, world_size)  # classes: below
    loader = DataLoader(SeededItems(dataset), batch_sampler=batches)
    for step, batch in zip(steps, loader):
        ...  # one optimizer step; when you save: {"step": step + 1, ...}

Each rank (process) loads its own share of every batch. batch_size is that of all ranks together:
the global batch. Keep it when the number of ranks (world_size) changes. Then the number of steps
done says what all ranks have seen, and any number of ranks that divides it can go on. (With others,
weigh the loss: see GlobalBatches.) If your dataset draws random numbers, say where to crop an
image: SeededItems seeds them by epoch and item. So they depend neither on the ranks nor on the
loader's workers. (With num_workers=0, as here, that seeds your model's dropout, too: seed it by the
step and the rank.)

    torchrun --standalone --nproc-per-node=2 recipes/resume_mid_epoch.py

    [rank 0/2] 96 items, 8 in a batch over all ranks; a job stops after 5 of 12 steps
    [rank 0/2] 4 to 2 ranks, skip on each rank: 20 items twice,  0 never, 76 drawn anew
    [rank 0/2] 4 to 2 ranks, go on by the step:  0 items twice,  0 never,  0 drawn anew
    [rank 0/2] 2 to 4 ranks, skip on each rank:  0 items twice, 40 never, 16 drawn anew
    [rank 0/2] 2 to 4 ranks, go on by the step:  0 items twice,  0 never,  0 drawn anew
    [rank 0/2] same global batch, same global step: each item once, on any number of ranks

"Drawn anew": an item came with other random numbers than in a run without a stop. The common
mistake keeps each rank's batch size, and skips as many batches as each rank had done. That is right
only on the same number of ranks, and loads all that it skips. Count the steps in the training loop,
as above: the loader's workers are ahead of it. Up to torch 2.15, DataLoader has no state_dict(),
and DistributedSampler cannot start in the middle. StatefulDataLoader in torchdata 0.11 can do it on
the same number of ranks: its state is that of one rank. Its maintainers repair it, but do not
develop it further (June 2026, github.com/meta-pytorch/data/issues/1549).

Now write it yourself: exercises/19_middle_of_an_epoch.py.
"""

import functools
import itertools
import os
import random
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

SEED = 0
ITEM_SEEDS = 10**9  # the seeds of items begin here: no step has one of them
EPOCH, STEPS, STOP = 3, 12, 5  # the job stops in epoch 3, after 5 of its 12 steps


class GlobalBatches(Sampler):
    """A rank's share of each step's batch. For DataLoader(SeededItems(...), batch_sampler=...)."""

    def __init__(self, steps, items, batch_size, rank, world_size):
        """steps: a range, counted from 0 over all epochs. batch_size: that of all ranks."""
        self.steps, self.items, self.batch_size = steps, items, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self):
        return len(self.steps)

    def __iter__(self):
        # An epoch is a shuffle of all items; each step takes the next slice of it. (The rest, less
        # than a batch, is left out; another epoch leaves out others.) The number of ranks plays no
        # part, so a job can go on with more or fewer. Keep its batch size: it makes the slices.
        for step in self.steps:
            epoch, place = divmod(step, self.items // self.batch_size)
            batch = shuffled(epoch, self.items)[place * self.batch_size :][: self.batch_size]
            # If world_size does not divide batch_size, some ranks have one item more. The loss must
            # then be weighed by len(share) * world_size / batch_size.
            share = batch[self.rank :: self.world_size]
            yield [(epoch, item) for item in share.tolist()]


@functools.lru_cache(maxsize=1)  # so that a step need not shuffle again
def shuffled(epoch, items):
    """Return the indices from 0 to items - 1 in the order of an epoch: the same on all ranks."""
    return torch.randperm(items, generator=torch.Generator().manual_seed(SEED + epoch))


class SeededItems(Dataset):
    """Asked for (epoch, item): what your Dataset draws at random for it follows from these two."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, epoch_and_item):
        epoch, item = epoch_and_item
        seed_all(ITEM_SEEDS + epoch * len(self.dataset) + item)
        return self.dataset[item]


def seed_all(seed):
    """Seed all that your model and your data may draw random numbers from."""
    # (A generator of your Dataset's own does not follow. Make it anew in each __getitem__:
    # seed = torch.randint(2**62, ()).item(), and then, say, numpy.random.default_rng(seed).)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # for GPUs, too; and the workers of a DataLoader start from it


def go_on(dataset, batch_size, rank, world_size, first_step):
    """The right way. All that the stopped job must hand over is the number of steps done."""
    steps = range(EPOCH * STEPS + first_step, (EPOCH + 1) * STEPS)
    batches = GlobalBatches(steps, len(dataset), batch_size, rank, world_size)
    return DataLoader(SeededItems(dataset), batch_sampler=batches)


def skip_on_each_rank(dataset, batch_size, rank, world_size, first_step):
    """Wrong, unless world_size and batch_size (a rank's own) are those of the stopped job."""
    sampler = DistributedSampler(dataset, world_size, rank)
    sampler.set_epoch(EPOCH)
    torch.manual_seed(SEED + EPOCH * world_size + rank)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    return itertools.islice(loader, first_step, None)  # also loads all the items that it skips


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare_ways_to_go_on()
    dist.destroy_process_group()


def compare_ways_to_go_on():
    world_size = dist.get_world_size()
    batch_size = 4 * world_size
    dataset = Augmented(STEPS * batch_size)
    log(
        f"{len(dataset)} items, {batch_size} in a batch over all ranks; a job stops after {STOP}"
        f" of {STEPS} steps"
    )
    for old, new in [(2 * world_size, world_size), (world_size, 2 * world_size)]:
        skipped = count_items(skip_on_each_rank, dataset, batch_size // old, old, new)
        right = count_items(go_on, dataset, batch_size, old, new)
        for name, (twice, never, anew) in [
            ("skip on each rank", skipped),
            ("go on by the step", right),
        ]:
            log(
                f"{old} to {new} ranks, {name}: {twice:>2} items twice, {never:>2} never,"
                f" {anew:>2} drawn anew"
            )
        if right != (0, 0, 0):
            raise RuntimeError("going on by the global step does not show each item once")
        if skipped[:2] == (0, 0) or skipped[2] == 0:
            raise RuntimeError("skipping on each rank does not show what this file says")
    log("same global batch, same global step: each item once, on any number of ranks")


def count_items(way, dataset, batch_size, old, new):
    """A job stops on old ranks, and goes on on new ones: how many items are not as in a whole run?

    Return three numbers: items that come twice, items that never come, and items whose random
    numbers are not those of a job that goes through the whole epoch on old ranks.
    """
    whole = items_of_job(way, dataset, batch_size, old, 0)
    found = whole[: STOP * old] + items_of_job(way, dataset, batch_size, new, STOP)
    expected = {item: number for item, number in torch.cat(whole).tolist()}
    pairs = torch.cat(found).tolist()
    seen = {item for item, _ in pairs}
    anew = sum(number != expected.get(item) for item, number in pairs)
    return len(pairs) - len(seen), len(dataset) - len(seen), anew


def items_of_job(way, dataset, batch_size, world_size, first_step):
    """What the ranks load from first_step on: a list of batches, step by step."""
    if world_size == dist.get_world_size():  # this very job: each rank loads its own batches
        ranks = gathered(list(way(dataset, batch_size, dist.get_rank(), world_size, first_step)))
    else:  # a job of another size, played in one process
        ranks = [
            list(way(dataset, batch_size, rank, world_size, first_step))
            for rank in range(world_size)
        ]
    return [batch for step in zip(*ranks, strict=True) for batch in step]


class Augmented(Dataset):
    """Your data set: each item comes with a random number, say where to crop an image."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        return torch.stack([torch.tensor(index), torch.randint(10**12, ())])


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
