"""What do I seed when several ranks train with dropout and loader workers?

    workers = torch.Generator()
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, generator=workers)
    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)  # DistributedSampler's order follows from it, on all ranks alike
        workers.manual_seed(SEED + epoch * world_size + rank)  # the loader's, unless they persist
        for step, batch in enumerate(loader, start=epoch * len(loader)):
            torch.manual_seed(SEED + step * world_size + rank)  # for dropout
            ...  # your step

On one GPU, one torch.manual_seed() at the start is enough. With that alone, all ranks (processes)
draw the same numbers: they drop the same units, and augment their images alike. Nothing fails, but
there is less variety. So give each rank a seed of its own. Give each step one, too: then the random
numbers of torch follow from the step's number, and a snapshot need hold nothing else for them.
(Seed random and NumPy alike, if you use them. For other runs, take a SEED that is far away. No seed
reaches a generator that your Dataset has made, numpy.random.default_rng(), say: then all workers of
all ranks draw alike. Make one in __getitem__: recipes/resume_mid_epoch.py, seed_all.)

    torchrun --standalone --nproc-per-node=2 recipes/randomness.py

    [rank 0/2] dropout, SEED + step * world_size + rank   48% equal, 12 different masks of 12
    [rank 0/2] dropout, SEED + step + rank                48% equal,  7 different masks of 12
    [rank 0/2] dropout, SEED + step                      100% equal,  6 different masks of 12
    [rank 0/2] workers, SEED + epoch * world_size + rank  48 different numbers of 48
    [rank 0/2] workers, SEED + epoch + rank               32 different numbers of 48
    [rank 0/2] workers, SEED + epoch                      24 different numbers of 48
    [rank 0/2] resumed with seeds by step          weights off by 0.0e+00
    [rank 0/2] resumed with no RNG state           weights off by 3.7e-02
    [rank 0/2] resumed with rank 0's RNG state     weights off by 2.7e-02
    [rank 0/2] resumed with each rank's RNG state  weights off by 0.0e+00
    [rank 0/2] seeds by step and rank: no numbers twice, and a resumed run repeats the whole one

The masks of ranks 0 and 1 in one step should be equal in half of their places: by chance. A sum
like SEED + step + rank repeats masks: rank 1 has now what rank 0 will have in the next step. With
tensor parallelism, rank and world_size are mesh["dp"].get_local_rank() and mesh["dp"].size(): the
ranks of a group need the same masks for what they all hold. For split activations, see
recipes/tensor_parallel.py. For what must be alike on all ranks, say the share of a mixup, use
torch.Generator().manual_seed(SEED + step).

If you seed only once, the snapshot must hold the states of each rank's random number generators
(RNG), not only those of rank 0: torch.get_rng_state(), random.getstate(), numpy.random.get_state()
and, for dropout on a GPU, torch.get_device_module().get_rng_state(). The workers take their seeds
when an epoch starts: save at its end. To go on in its middle, let the dataset seed itself, by epoch
and index of the item. Do so, too, with num_workers=0, where items and dropout draw from one
generator, and with persistent_workers=True, where the workers take a seed in the first epoch only.
"""

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.nn.functional import dropout, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SEED, STEPS, EPOCHS = 0, 6, 3  # STEPS: of all epochs
SEEDS = {  # number: of a step or an epoch, counted from 0
    # The right way: other numbers in each step and on each rank.
    " * world_size + rank": lambda number, world_size, rank: SEED + number * world_size + rank,
    # Wrong: rank 0 draws in the next step what rank 1 draws in this one.
    " + rank": lambda number, world_size, rank: SEED + number + rank,
    # Wrong: all ranks draw the same.
    "": lambda number, world_size, rank: SEED + number,
}


def draw(seed):
    """The loop above, with these seeds. Return this rank's masks and its workers' numbers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset, batch_size, first_epoch, masks, numbers = Augmented(8 * world_size), 4, 0, [], []
    # The sampler must shuffle alike on all ranks: it has a seed of its own. (With shuffle=True
    # instead of a sampler, the generator would shuffle: in another order on each rank.)
    sampler = DistributedSampler(dataset)
    workers = torch.Generator()  # from it, the workers seed torch, random and NumPy
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, generator=workers)
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        workers.manual_seed(seed(epoch, world_size, rank))
        for step, batch in enumerate(loader, start=epoch * len(loader)):
            torch.manual_seed(seed(step, world_size, rank))
            masks.append((dropout(torch.ones(1000)) > 0).tolist())  # stands for your step
            numbers += batch.tolist()
    return masks, numbers


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare_seeds()
    compare_resumed()
    log("seeds by step and rank: no numbers twice, and a resumed run repeats the whole one")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_seeds():
    world_size, masks, numbers, lines = dist.get_world_size(), [], [], []
    for name, seed in SEEDS.items():
        masks_of_ranks, numbers_of_ranks = zip(*gathered(draw(seed)), strict=True)
        first, second = (masks[0] for masks in masks_of_ranks[:2])
        equal = sum(a == b for a, b in zip(first, second, strict=True)) / 1000
        masks.append(len({tuple(mask) for masks in masks_of_ranks for mask in masks}))
        numbers.append(len(set().union(*numbers_of_ranks)))
        log(
            f"dropout, {'SEED + step' + name:<31}  {equal:>4.0%} equal, {masks[-1]:>2} different"
            f" masks of {STEPS * world_size}"
        )
        lines.append(
            f"workers, {'SEED + epoch' + name:<32}  {numbers[-1]:>2} different numbers of"
            f" {8 * EPOCHS * world_size}"
        )
    for line in lines:
        log(line)
    if masks != [STEPS * world_size, STEPS + world_size - 1, STEPS]:
        raise RuntimeError(f"the dropout masks do not repeat as this file says: {masks}")
    if numbers != [8 * EPOCHS * world_size, 8 * (EPOCHS + world_size - 1), 8 * EPOCHS]:
        raise RuntimeError(f"the workers' numbers do not repeat as this file says: {numbers}")


def compare_resumed():
    """Stop after half of the steps, and go on: are these the weights of a run without a stop?"""
    off = {}
    for name in ("seeds by step", "no RNG state", "rank 0's RNG state", "each rank's RNG state"):
        by_step = name == "seeds by step"
        whole, _ = train(by_step, 0, STEPS)
        half, state = train(by_step, 0, STEPS // 2)
        states = gathered(state)  # rank 0 would save the list
        state = {
            "rank 0's RNG state": states[0],
            "each rank's RNG state": states[dist.get_rank()],
        }.get(name)
        resumed, _ = train(by_step, STEPS // 2, STEPS, half, state)
        off[name] = (resumed - whole).abs().max().item()
        log(f"resumed with {name:<21}  weights off by {off[name]:.1e}")
    if not (off["seeds by step"] < 1e-6 and off["each rank's RNG state"] < 1e-6):
        raise RuntimeError("a resumed run does not repeat the whole one")
    if not (off["no RNG state"] > 1e-3 and off["rank 0's RNG state"] > 1e-3):
        raise RuntimeError("lost RNG states do not show what this file says")


def train(by_step, first_step, last_step, weight=None, state=None):
    """Train with dropout, from this weight on; return the weight and this rank's RNG state."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 8, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.zeros(8, 16) if weight is None else weight)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum: nothing to save
    torch.manual_seed(SEED + rank)  # as a script does that seeds only once, at its start
    if state is not None:
        torch.set_rng_state(state)
    for step in range(first_step, last_step):
        if by_step:
            torch.manual_seed(SEED + step * world_size + rank)
        generator = torch.Generator().manual_seed(1000 + step * world_size + rank)  # your data
        inputs = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        mse_loss(model(inputs), inputs[:, :8]).backward()
        optimizer.step()
    return net[1].weight.detach(), torch.get_rng_state()


class Augmented(Dataset):
    """Your data set: each item comes with a random number, say where to crop an image."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        return torch.randint(10**12, ())


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
