"""Where do clipping and GradScaler go with DDP and accumulation?

    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            scaler.scale(mean_loss(model(inputs), targets) / len(micro_batches)).backward()
    scaler.unscale_(optimizer)  # after the last backward(), which averages the gradients
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)  # without a scaler: if norm.isfinite(): optimizer.step()
    scaler.update()
    optimizer.zero_grad()

Clipping limits the norm of the gradient. GradScaler multiplies the loss, so that small gradients do
not become 0 in float16. DistributedDataParallel (DDP) averages the gradients over the ranks
(processes): the exchange. With no_sync() it comes in the last micro-batch's backward() (see
recipes/accumulate.py). Unscale and clip after it. Then all ranks have the same gradient, so they
find the same norm, and skip the same steps.

    torchrun --standalone --nproc-per-node=2 recipes/clip_and_scale.py

    [rank 0/2] one process, float32     norm 0.23015, step of 5.0e-02
    [rank 0/2] clip after the exchange  norm 0.23015, step of 5.0e-02, off by 5.5e-04
    [rank 0/2] clip each micro-batch    norm 0.15918, step of 5.0e-02, off by 6.0e-01
    [rank 0/2] clip before unscale_     norm 15083, step of 7.8e-07, off by 1.0e+00
    [rank 0/2] inf on rank 1 alone: every rank skips the step, and goes on with 32768 for 65536
    [rank 0/2] inf on rank 1 alone, no scaler: 8320 of 8320 weights are nan; if isfinite(): 0

Clipping each micro-batch changes the direction: it shrinks the ranks' gradients by different
factors before they are averaged. Clipping before unscale_() limits the scaled gradient: the step is
65536 times too small. An inf on one rank is in the average, so all ranks skip that step. Do not
skip a bad batch on one rank yourself: the other ranks would wait for it in backward(). A snapshot
must hold scaler.state_dict().

With bfloat16, leave the scaler out. Then look at the norm yourself: it is the same on all ranks.
(FSDP2 returns a DTensor: norm.full_tensor().) Otherwise one inf makes weights nan for good, since
clipping multiplies it by 0. If several steps in a row are skipped, stop.
With or without a scaler, a skipped step has changed BatchNorm's buffers: the forward pass has put
the inf into its running mean. Copy the buffers before each step, and put them back after a skip.
"""

import argparse
import contextlib
import gc
import math
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

MICRO_BATCHES, ROWS = 3, 8  # on each rank
MAX_NORM = 0.05


def clip_after_exchange(model, optimizer, scaler, micro_batches):
    """The right way. Return the norm of the gradient before it was clipped."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = half_precision_loss(model, inputs, targets) / len(micro_batches)
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # once in a step, when all gradients are added up and averaged
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)  # the same on all ranks: no all_reduce
    scaler.step(optimizer)  # skips the step if it has seen inf or nan
    scaler.update()
    optimizer.zero_grad()
    return norm.item()


def skip_what_is_not_finite(model, optimizer, inputs, targets):
    """The right way without a scaler."""
    mse_loss(model(inputs), targets).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()


def step_in_any_case(model, optimizer, inputs, targets):
    """Wrong: what is inf in the gradient is nan when it is clipped, and then in the weights."""
    mse_loss(model(inputs), targets).backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def clip_each_micro_batch(model, optimizer, scaler, micro_batches):
    """Wrong: clips each partial sum, and before the exchange each rank clips its own."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = half_precision_loss(model, inputs, targets) / len(micro_batches)
            scaler.scale(loss).backward()
        scale = scaler.get_scale()  # the limit is scaled like the gradient: that much is right
        norm = clip_grad_norm_(model.parameters(), MAX_NORM * scale)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm.item() / scale


def clip_before_unscale(model, optimizer, scaler, micro_batches):
    """Wrong: clips the scaled gradient. Then step() divides what is left by the scale."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = half_precision_loss(model, inputs, targets) / len(micro_batches)
            scaler.scale(loss).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm.item()


def half_precision_loss(model, inputs, targets):
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        return mse_loss(model(inputs), targets)


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare_clipping(device)
    overflow_on_one_rank(device)
    overflow_without_scaler(device)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_clipping(device):
    inputs, targets = make_rows(device)
    whole = new_model_and_scaler(device, ddp=False)[0]  # one process, one batch, float32
    mse_loss(whole(inputs), targets).backward()
    expected_norm = clip_grad_norm_(whole.parameters(), MAX_NORM).item()
    expected = flat_gradient(whole)
    log(f"{'one process, float32':<23}  norm {expected_norm:.5g}, step of {expected.norm():.1e}")

    off = {}
    for name, way in [("clip after the exchange", clip_after_exchange),
                      ("clip each micro-batch", clip_each_micro_batch),
                      ("clip before unscale_", clip_before_unscale)]:
        model, optimizer, scaler = new_model_and_scaler(device)
        before = flat_weights(model)
        norms = gathered(way(model, optimizer, scaler, own_micro_batches(inputs, targets)))
        step = before - flat_weights(model)  # the clipped gradient, as the learning rate is 1
        off[name] = ((step - expected).norm() / expected.norm()).item()
        log(f"{name:<23}  norm {norms[0]:.5g}, step of {step.norm():.1e}, off by {off[name]:.1e}")
        if way is clip_after_exchange and not (
                len(set(norms)) == 1 and abs(norms[0] / expected_norm - 1) < 0.01):
            raise RuntimeError(f"one process has the norm {expected_norm}, the ranks {norms}")
    if not off.pop("clip after the exchange") < 0.01:
        raise RuntimeError("clipping after the exchange does not give the step of one process")
    if not all(value > 0.1 for value in off.values()):
        raise RuntimeError("the mistakes do not show what this file says")


def overflow_on_one_rank(device):
    last = dist.get_world_size() - 1
    model, optimizer, scaler = new_model_and_scaler(device)
    micro_batches = own_micro_batches(*make_rows(device))
    before, first_scale = flat_weights(model), scaler.get_scale()
    found = []
    for factor in (1e6 if dist.get_rank() == last else 1, 1):  # float16 ends at 65504
        (inputs, targets), *others = micro_batches
        clip_after_exchange(model, optimizer, scaler, [(inputs * factor, targets), *others])
        moved = not torch.equal(flat_weights(model), before)
        found.append(gathered((scaler.get_scale(), moved)))
    scale = first_scale / 2
    if found != [[(scale, False)] * (last + 1), [(scale, True)] * (last + 1)]:
        raise RuntimeError(f"scale, and whether the weights have moved, on each rank: {found}")
    log(f"inf on rank {last} alone: every rank skips the step, and goes on with {scale:.0f} for"
        f" {first_scale:.0f}")


def overflow_without_scaler(device):
    last = dist.get_world_size() - 1
    nans = []
    for way in (step_in_any_case, skip_what_is_not_finite):
        model, optimizer, _ = new_model_and_scaler(device)
        before = flat_weights(model)
        inputs, targets = own_micro_batches(*make_rows(device))[0]
        way(model, optimizer, inputs * (math.inf if dist.get_rank() == last else 1), targets)
        after = flat_weights(model)
        nans.append(set(gathered(after.isnan().sum().item())))
    log(f"inf on rank {last} alone, no scaler: {max(nans[0])} of {after.numel()} weights are nan;"
        f" if isfinite(): {max(nans[1])}")
    if nans != [{after.numel()}, {0}] or not torch.equal(after, before):
        raise RuntimeError(f"nan weights without and with the check: {nans}")


def make_rows(device):
    """Your data; the same on every rank. Some rows are larger, so that the ranks' norms differ."""
    generator = torch.Generator().manual_seed(0)
    rows = MICRO_BATCHES * ROWS * dist.get_world_size()
    inputs, targets = torch.randn(2, rows, 64, generator=generator)
    inputs *= torch.linspace(0.1, 2, rows)[:, None]
    return inputs.to(device), targets.to(device)


def own_micro_batches(inputs, targets):
    first = dist.get_rank() * MICRO_BATCHES  # each rank takes its own ones
    batches = list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True))
    return batches[first : first + MICRO_BATCHES]


def new_model_and_scaler(device, ddp=True):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)
    model = DDP(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, torch.amp.GradScaler(device.type)  # starts with the scale 65536


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def flat_weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
