"""How do I add up the gradients of several micro-batches, and exchange them only once?

    for i, (inputs, targets) in enumerate(micro_batches):  # all of one size, as many on each rank
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            (mean_loss(model(inputs), targets) / len(micro_batches)).backward()

A large batch may not fit into memory. Gradient accumulation cuts it into micro-batches and adds up
their gradients before optimizer.step(). DistributedDataParallel (DDP) would average the gradients
over the ranks (processes) in every backward(). no_sync() puts that off to the last micro-batch. If
the micro-batches differ in size, weigh them: recipes/unequal_micro_batches.py.

    torchrun --standalone --nproc-per-node=2 recipes/accumulate.py

    [rank 0/2] 4 micro-batches of 8 rows on each of 2 ranks; compared with one batch of 64
    [rank 0/2] DDP as usual           4206592 bytes sent, gradient off by 2.8e-07
    [rank 0/2] no_sync, both passes   1051648 bytes sent, gradient off by 2.8e-07
    [rank 0/2] no_sync, backward      4206592 bytes sent, gradient off by 2.8e-07
    [rank 0/2] flag set in between    1051648 bytes sent, gradient off by 7.6e-01
    [rank 0/2] no_sync around both passes: 1/4 of the bytes, and the gradient of the whole batch

The last two are common mistakes. DDP decides in its forward pass whether the next backward pass
exchanges gradients. no_sync() around backward() alone comes too late and saves nothing. Setting
require_backward_grad_sync yourself, after the forward pass, averages the first micro-batch only: no
error, a wrong gradient, and replicas that drift apart.

FSDP2 has no no_sync(). Before each backward(), call model.set_requires_gradient_sync(is_last) with
True for the last micro-batch. Until then, each rank keeps whole gradients: that costs memory. With
DDP(static_graph=True), take no no_sync() in a job's first step ("INTERNAL ASSERT FAILED").

Now write it yourself: exercises/08_accumulate.py.
"""

import contextlib
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES, ROWS = 4, 8  # on each rank
mean_loss = nn.MSELoss()  # a mean over all elements


def accumulate(model, micro_batches):
    """The right way: the lines above. micro_batches: [(inputs, targets), ...]."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            (mean_loss(model(inputs), targets) / len(micro_batches)).backward()  # both passes


def exchange_each_time(model, micro_batches):
    """Right, but each micro-batch costs an exchange."""
    for inputs, targets in micro_batches:
        (mean_loss(model(inputs), targets) / len(micro_batches)).backward()


def no_sync_too_late(model, micro_batches):
    """Right, and the same cost: the forward pass has decided already."""
    for i, (inputs, targets) in enumerate(micro_batches):
        loss = mean_loss(model(inputs), targets)
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            (loss / len(micro_batches)).backward()


def flag_in_between(model, micro_batches):
    """Wrong: the first backward() exchanges gradients, and the last one does not."""
    for i, (inputs, targets) in enumerate(micro_batches):
        loss = mean_loss(model(inputs), targets)
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        (loss / len(micro_batches)).backward()


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare()
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank makes the same rows, and takes its own ones
    rows = MICRO_BATCHES * ROWS * world_size
    inputs, targets = torch.randn(2, rows, 256)
    whole = new_model()
    mean_loss(whole(inputs), targets).backward()  # one process, one batch
    expected = flat_gradient(whole)
    micro_batches = list(
        zip(
            inputs[rank::world_size].split(ROWS), targets[rank::world_size].split(ROWS), strict=True
        )
    )
    log(
        f"{MICRO_BATCHES} micro-batches of {ROWS} rows on each of {world_size} ranks; compared with"
        f" one batch of {rows}"
    )
    sent, off = {}, {}
    for name, way in [
        ("DDP as usual", exchange_each_time),
        ("no_sync, both passes", accumulate),
        ("no_sync, backward", no_sync_too_late),
        ("flag set in between", flag_in_between),
    ]:
        model = DDP(new_model())
        sent[name] = count_bytes(model)
        way(model, micro_batches)
        sent[name] = sum(sent[name])
        off[name] = ((flat_gradient(model) - expected).norm() / expected.norm()).item()
        log(f"{name:<21} {sent[name]:>8} bytes sent, gradient off by {off[name]:.1e}")
    right, usual = "no_sync, both passes", "DDP as usual"
    if not (sent[right] * MICRO_BATCHES == sent[usual] and off[right] < 1e-6):
        raise RuntimeError("no_sync around both passes does not do what this file says")
    if not (sent["no_sync, backward"] == sent[usual] and off["flag set in between"] > 0.01):
        raise RuntimeError("the mistakes do not show what this file says")
    log(
        f"no_sync around both passes: 1/{MICRO_BATCHES} of the bytes, and the gradient of the whole"
        " batch"
    )


def count_bytes(model):
    """Return a list to which DDP adds the size of each bucket of gradients that it exchanges."""
    sizes = []

    def hook(state, bucket):  # called in place of DDP's own exchange
        sizes.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    return sizes


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
