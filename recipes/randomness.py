"""What do I seed when several ranks train with dropout and loader workers?

    workers = torch.Generator()
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, generator=workers)
    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)  # DistributedSampler's order follows from it, on all ranks alike
        workers.manual_seed(SEED + epoch * world_size + rank)  # the loader's worker processes
        for step, batch in enumerate(loader, start=epoch * len(loader)):
            torch.manual_seed(SEED + step * world_size + rank)  # for dropout
            ...  # your step

On one GPU, one torch.manual_seed() at the start is enough. With that alone, all ranks (processes)
draw the same numbers: they drop the same units, and augment their images alike. Nothing fails, but
there is less variety. So give each rank a seed of its own. Give each step one, too: then the
random numbers follow from the step's number, and a snapshot need not hold anything else for them.

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
(RNG), not only those of rank 0. The workers take their seeds when an epoch starts (not if they
persist): save at its end. To go on in its middle, let the dataset seed itself, by epoch and index
of the item. Do so, too, with num_workers=0: there, items and dropout draw from one generator.
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.nn.functional import dropout, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SEED, STEPS, EPOCHS = 0, 6, 3


def seed_step(step, rank, world_size):
    """The right way: other numbers in each step and on each rank."""
    torch.manual_seed(SEED + step * world_size + rank)  # step: counted over all epochs


def seed_sum(step, rank, world_size):
    """Wrong: rank 0 draws in the next step what rank 1 draws in this one."""
    torch.manual_seed(SEED + step + rank)


def seed_alike(step, rank, world_size):
    """Wrong: all ranks drop the same units."""
    torch.manual_seed(SEED + step)


def draw_in_workers(dataset, seed):
    """Return the random numbers that this rank's loader workers draw. seed: a function of epoch."""
    # The sampler must shuffle alike on all ranks: it has a seed of its own. (With shuffle=True
    # instead of a sampler, the generator would shuffle: in another order on each rank.)
    sampler = DistributedSampler(dataset)
    workers = torch.Generator()  # from it, the workers seed torch, random and NumPy
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=2, generator=workers)
    numbers = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        workers.manual_seed(seed(epoch))
        numbers += torch.cat(list(loader)).tolist()
    return numbers


def rng_states(device):
    """What a snapshot must hold of every rank if the script seeds only once, at its start."""
    states = {"cpu": torch.get_rng_state()}  # and random.getstate(), if you use that module
    if device.type != "cpu":  # dropout on a GPU draws from a generator of that GPU
        states["gpu"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_states(states, device):
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["gpu"], device)


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare_masks(device)
    compare_workers()
    compare_resumed(device)
    log("seeds by step and rank: no numbers twice, and a resumed run repeats the whole one")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_masks(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    different = []
    for name, seed in [("SEED + step * world_size + rank", seed_step),
                       ("SEED + step + rank", seed_sum), ("SEED + step", seed_alike)]:
        masks = []
        for step in range(STEPS):
            seed(step, rank, world_size)
            masks.append((dropout(torch.ones(1000, device=device)) > 0).tolist())
        ranks = gathered(masks)
        equal = sum(a == b for a, b in zip(ranks[0][0], ranks[1][0], strict=True)) / 1000
        different.append(len({tuple(mask) for masks in ranks for mask in masks}))
        log(f"dropout, {name:<31}  {equal:>4.0%} equal, {different[-1]:>2} different masks of"
            f" {STEPS * world_size}")
    if different != [STEPS * world_size, STEPS + world_size - 1, STEPS]:
        raise RuntimeError("the dropout masks do not repeat as this file says")


def compare_workers():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    different, dataset = [], Augmented(8 * world_size)
    for name, seed in [
        ("SEED + epoch * world_size + rank", lambda epoch: SEED + epoch * world_size + rank),
        ("SEED + epoch + rank", lambda epoch: SEED + epoch + rank),
        ("SEED + epoch", lambda epoch: SEED + epoch),
    ]:
        ranks = gathered(draw_in_workers(dataset, seed))
        different.append(len(set().union(*ranks)))
        log(f"workers, {name:<32}  {different[-1]:>2} different numbers of {sum(map(len, ranks))}")
    if different != [8 * EPOCHS * world_size, 8 * (EPOCHS + world_size - 1), 8 * EPOCHS]:
        raise RuntimeError("the workers' numbers do not repeat as this file says")


def compare_resumed(device):
    """Stop after half of the steps, and go on: are these the weights of a run without a stop?"""
    off = {}
    for name in ("seeds by step", "no RNG state", "rank 0's RNG state", "each rank's RNG state"):
        by_step = name == "seeds by step"
        whole, _ = train(device, by_step, 0, STEPS)
        half, states = train(device, by_step, 0, STEPS // 2)
        every_state = gathered(states)  # rank 0 would save the list
        states = {"rank 0's RNG state": every_state[0],
                  "each rank's RNG state": every_state[dist.get_rank()]}.get(name)
        resumed, _ = train(device, by_step, STEPS // 2, STEPS, half, states)
        off[name] = (resumed - whole).abs().max().item()
        log(f"resumed with {name:<21}  weights off by {off[name]:.1e}")
    if not (off["seeds by step"] < 1e-6 and off["each rank's RNG state"] < 1e-6):
        raise RuntimeError("a resumed run does not repeat the whole one")
    if not (off["no RNG state"] > 1e-3 and off["rank 0's RNG state"] > 1e-3):
        raise RuntimeError("lost RNG states do not show what this file says")


def train(device, by_step, first_step, last_step, weight=None, states=None):
    """Train with dropout, from this weight on; return the weight and this rank's RNG states."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 8, bias=False)).to(device)
    with torch.no_grad():
        net[1].weight.copy_(torch.zeros(8, 16) if weight is None else weight)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum: nothing to save
    torch.manual_seed(SEED + rank)  # as a script does that seeds only once, at its start
    if states is not None:
        set_rng_states(states, device)
    for step in range(first_step, last_step):
        if by_step:
            seed_step(step, rank, world_size)
        generator = torch.Generator().manual_seed(1000 + step * world_size + rank)  # your data
        inputs = torch.randn(8, 16, generator=generator).to(device)
        optimizer.zero_grad()
        mse_loss(model(inputs), inputs[:, :8]).backward()
        optimizer.step()
    return net[1].weight.detach(), rng_states(device)


class Augmented(Dataset):
    """Your data set: each item comes with a random number, say where to crop an image."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        return torch.randint(10**12, ())


# ---- Helpers that are no part of the lesson ----


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


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


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
