"""Where do clipping and GradScaler go with DDP and accumulation?

    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            scaler.scale(loss_of(model, inputs, targets) / len(micro_batches)).backward()
    scaler.unscale_(optimizer)  # after the last backward(), which averages the gradients
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)  # without a scaler: if norm.isfinite(): optimizer.step()
    scaler.update()
    optimizer.zero_grad()

Clipping limits the norm of the gradient. GradScaler multiplies the loss, so that small gradients do
not become 0 in float16. DistributedDataParallel (DDP) averages the gradients over the ranks
(processes): the exchange. With no_sync() it comes in the last micro-batch's backward() (see
recipes/accumulate.py). Unscale and clip after it. Then all ranks have the same gradient, so they
find the same norm, without an all_reduce of it, and skip the same steps. loss_of() is your forward
pass, under autocast. Freeze (requires_grad_(False)) what no optimizer has: its gradient stays
scaled, and would be in the norm.

    torchrun --standalone --nproc-per-node=2 recipes/clip_and_scale.py

    [rank 0/2] one process, float32     norm 0.23015, step of 5.0e-02
    [rank 0/2] clip after the exchange  norm 0.23015, step of 5.0e-02, off by 5.5e-04
    [rank 0/2] clip each micro-batch    norm 0.15918, step of 5.0e-02, off by 6.0e-01
    [rank 0/2] clip before unscale_     norm 15083, step of 7.8e-07, off by 1.0e+00
    [rank 0/2] inf on rank 1 alone: every rank skips the step, and goes on with 32768 for 65536
    [rank 0/2] inf on rank 1 alone, no scaler: 8320 of 8320 weights are nan; if isfinite(): 0
    [rank 0/2] nan for one of two optimizers: 4160 weights of the other are nan; if isfinite(): 0

Clipping each micro-batch changes the direction: it shrinks the ranks' gradients by different
factors before they are averaged. Clipping before unscale_() limits the scaled gradient: the step is
65536 times too small. An inf on one rank is in the average, so all ranks skip that step. Do not
skip a bad batch on one rank yourself: the others would wait for it in backward(). A snapshot must
hold scaler.state_dict(). With several optimizers, see step_of_several().

With bfloat16, leave the scaler out, and look at the norm: it is the same on all ranks. (FSDP2
returns a DTensor: norm.full_tensor().) Otherwise one inf makes weights nan for good, since clipping
multiplies it by 0. If several steps in a row are skipped, stop. A skipped step may have changed
BatchNorm's buffers: the forward pass has put the inf into its running mean. Copy the buffers before
each step, and put them back after a skip.

Now write it yourself: exercises/17_clip_shards.py.
"""

import contextlib
import gc
import math
import os
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
    """The right way, the lines above. Return the norm of the gradient before it was clipped."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            scaler.scale(loss_of(model, inputs, targets) / len(micro_batches)).backward()
    scaler.unscale_(optimizer)  # once in a step, when all gradients are added up and averaged
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)  # the same on all ranks: no all_reduce
    scaler.step(optimizer)  # skips the step if it has seen inf or nan
    scaler.update()
    optimizer.zero_grad()
    return norm.item()


def step_of_several(model, optimizers, scaler, look=True):
    """The right way with several optimizers, if look: after unscale_(), clipping spreads a nan."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    if not look or norm.isfinite():  # the scaler skips only those in which it saw one itself
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    model.zero_grad()


def step_without_scaler(model, optimizer, inputs, targets, look):
    """The right way without a scaler, if look. Else wrong: clipping makes an inf nan."""
    mse_loss(model(inputs), targets).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    if norm.isfinite() or not look:
        optimizer.step()
    optimizer.zero_grad()


def clip_each_micro_batch(model, optimizer, scaler, micro_batches):
    """Wrong: clips each partial sum; before the exchange, each rank its own."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            scaler.scale(loss_of(model, inputs, targets) / len(micro_batches)).backward()
        scale = scaler.get_scale()  # the limit is scaled like the gradient: that much is right
        norm = clip_grad_norm_(model.parameters(), MAX_NORM * scale)
    scaler.step(optimizer)
    return norm.item() / scale


def clip_before_unscale(model, optimizer, scaler, micro_batches):
    """Wrong: clips the scaled gradient. Then step() divides what is left by the scale."""
    for inputs, targets in micro_batches:
        scaler.scale(loss_of(model, inputs, targets) / len(micro_batches)).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    return norm.item()


def loss_of(model, inputs, targets):
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        return mse_loss(model(inputs), targets)


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare_clipping()
    overflow_on_one_rank()
    overflow_without_scaler()
    nan_for_one_of_two_optimizers()
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_clipping():
    inputs, targets = make_rows()
    whole = new_model()  # one process, one batch, float32
    mse_loss(whole(inputs), targets).backward()
    expected_norm = clip_grad_norm_(whole.parameters(), MAX_NORM).item()
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()])
    log(f"{'one process, float32':<23}  norm {expected_norm:.5g}, step of {expected.norm():.1e}")
    off = {}
    for name, way in [
        ("clip after the exchange", clip_after_exchange),
        ("clip each micro-batch", clip_each_micro_batch),
        ("clip before unscale_", clip_before_unscale),
    ]:
        model, optimizer, scaler = new_model_and_scaler()
        before = flat_weights(model)
        norms = gathered(way(model, optimizer, scaler, own_micro_batches(inputs, targets)))
        step = before - flat_weights(model)  # the clipped gradient, as the learning rate is 1
        off[name] = ((step - expected).norm() / expected.norm()).item()
        log(f"{name:<23}  norm {norms[0]:.5g}, step of {step.norm():.1e}, off by {off[name]:.1e}")
        if way is clip_after_exchange and not (
            len(set(norms)) == 1 and abs(norms[0] / expected_norm - 1) < 0.01
        ):
            raise RuntimeError(f"one process has the norm {expected_norm}, the ranks {norms}")
    if not (off.pop("clip after the exchange") < 0.01 and min(off.values()) > 0.1):
        raise RuntimeError("clipping after the exchange does not give the step of one process")


def overflow_on_one_rank():
    last, found = dist.get_world_size() - 1, []
    model, optimizer, scaler = new_model_and_scaler()
    micro_batches, before = own_micro_batches(*make_rows()), flat_weights(model)
    for factor in (1e6 if dist.get_rank() == last else 1, 1):  # float16 ends at 65504
        (inputs, targets), *others = micro_batches
        clip_after_exchange(model, optimizer, scaler, [(inputs * factor, targets), *others])
        moved = not torch.equal(flat_weights(model), before)
        found.append(gathered((scaler.get_scale(), moved)))
    if found != [[(32768, False)] * (last + 1), [(32768, True)] * (last + 1)]:
        raise RuntimeError(f"scale, and whether the weights have moved, on each rank: {found}")
    log(f"inf on rank {last} alone: every rank skips the step, and goes on with 32768 for 65536")


def overflow_without_scaler():
    last, nans = dist.get_world_size() - 1, []
    for look in (False, True):
        model, optimizer, _ = new_model_and_scaler()
        before = flat_weights(model)
        inputs, targets = own_micro_batches(*make_rows())[0]
        inputs = inputs * (math.inf if dist.get_rank() == last else 1)
        step_without_scaler(model, optimizer, inputs, targets, look)
        after = flat_weights(model)
        nans.append(set(gathered(after.isnan().sum().item())))
    log(
        f"inf on rank {last} alone, no scaler: {max(nans[0])} of {after.numel()} weights are nan;"
        f" if isfinite(): {max(nans[1])}"
    )
    if nans != [{after.numel()}, {0}] or not torch.equal(after, before):
        raise RuntimeError(f"nan weights without and with the check: {nans}")


def nan_for_one_of_two_optimizers():
    found = []
    for look in (False, True):
        model, _, scaler = new_model_and_scaler()
        optimizers = [torch.optim.SGD(model.module[i].parameters(), lr=1.0) for i in (0, 2)]
        scaler.scale(loss_of(model, *own_micro_batches(*make_rows())[0])).backward()
        model.module[0].bias.grad.fill_(math.nan)  # as if its layer's backward() had overflowed
        step_of_several(model, optimizers, scaler, look)
        found.append((flat_weights(model).isnan().sum().item(), scaler.get_scale()))
    log(
        f"nan for one of two optimizers: {found[0][0]} weights of the other are nan; if isfinite():"
        f" {found[1][0]}"
    )
    if found != [(4160, 32768), (0, 32768)]:
        raise RuntimeError(f"two optimizers: nan weights, and the scale: {found}")


def make_rows():
    """The same on every rank. Some rows are larger, so that the ranks' norms differ."""
    rows = MICRO_BATCHES * ROWS * dist.get_world_size()
    inputs, targets = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(0))
    return inputs * torch.linspace(0.1, 2, rows)[:, None], targets


def own_micro_batches(inputs, targets):
    first = dist.get_rank() * MICRO_BATCHES
    batches = list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True))
    return batches[first : first + MICRO_BATCHES]


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def new_model_and_scaler():
    model = DDP(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, torch.amp.GradScaler("cpu")  # starts with the scale 65536


def flat_weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
