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
True for the last micro-batch. Until then, each rank keeps whole gradients: that costs memory.

Now write it yourself: exercises/07_accumulate.py.
"""

import argparse
import contextlib
import gc
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES, ROWS = 4, 8  # on each rank


def accumulate(model, micro_batches):
    """The right way. micro_batches: [(inputs, targets), ...], all of one size."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = mse_loss(model(inputs), targets)  # the forward pass is inside, too
            (loss / len(micro_batches)).backward()  # the mean over all rows, not a sum of means


def exchange_each_time(model, micro_batches):
    """Right, but each micro-batch costs an exchange."""
    for inputs, targets in micro_batches:
        (mse_loss(model(inputs), targets) / len(micro_batches)).backward()


def no_sync_too_late(model, micro_batches):
    """Right, and the same cost: the forward pass has decided already."""
    for i, (inputs, targets) in enumerate(micro_batches):
        loss = mse_loss(model(inputs), targets)
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            (loss / len(micro_batches)).backward()


def flag_in_between(model, micro_batches):
    """Wrong: the first backward() exchanges gradients, and the last one does not."""
    for i, (inputs, targets) in enumerate(micro_batches):
        loss = mse_loss(model(inputs), targets)
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        (loss / len(micro_batches)).backward()


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare(device)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank makes the same rows, and takes its own ones
    rows = MICRO_BATCHES * ROWS * world_size
    inputs, targets = torch.randn(2, rows, 256, device=device)
    whole = new_model(device)
    mse_loss(whole(inputs), targets).backward()  # one process, one batch
    expected = flat_gradient(whole)
    micro_batches = list(zip(inputs[rank::world_size].split(ROWS),
                             targets[rank::world_size].split(ROWS), strict=True))
    log(f"{MICRO_BATCHES} micro-batches of {ROWS} rows on each of {world_size} ranks; compared with"
        f" one batch of {rows}")

    sent, off = {}, {}
    for name, way in [("DDP as usual", exchange_each_time), ("no_sync, both passes", accumulate),
                      ("no_sync, backward", no_sync_too_late),
                      ("flag set in between", flag_in_between)]:
        model = DDP(new_model(device))
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
    log(f"no_sync around both passes: 1/{MICRO_BATCHES} of the bytes, and the gradient of the whole"
        " batch")


def count_bytes(model):
    """Return a list to which DDP adds the size of each bucket of gradients that it exchanges."""
    sizes = []

    def hook(state, bucket):  # called in place of DDP's own exchange
        sizes.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    return sizes


def new_model(device):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(device)


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


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
