"""How do I send fewer bytes between the ranks in each step?

    model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # model: DDP. Half the bytes
    # or, after 1000 steps that are sent whole, with far fewer bytes and a rougher gradient (with
    # Gloo, in one bucket only: see power_sgd below):
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=1000)
    model.register_comm_hook(state, powerSGD_hook)

DistributedDataParallel (DDP) sends the gradients of all weights in every step, 4 bytes for each. A
communication hook takes the place of this exchange. bfloat16 has 2 bytes a number. PowerSGD sends
two thin matrices for each matrix: their product is close to it. Local SGD sends no gradients: each
rank (process) takes its own steps, and every few steps the ranks average their weights.

    torchrun --standalone --nproc-per-node=2 recipes/send_fewer_bytes.py

    [rank 0/2] 60 steps on 2 ranks; the loss before them: 0.2723
    [rank 0/2] exact                         63.10 MB sent, loss 0.0824
    [rank 0/2] bfloat16                      31.55 MB sent, loss 0.0824
    [rank 0/2] PowerSGD                      11.90 MB sent, loss 0.1028
    [rank 0/2] local SGD                      8.41 MB sent, loss 0.0828
    [rank 0/2] PowerSGD, no error feedback   11.90 MB sent, loss 0.1350
    [rank 0/2] local SGD, rank 0's weights    7.36 MB sent, loss 0.0845
    [rank 0/2] in a step, bfloat16 sends 1/2 of the bytes of exact; PowerSGD, after its start, 1/38
    [rank 0/2] PowerSGD keeps 1.05 MB of what it did not send: those of the gradients

The MB are those of the tensors that each rank gives to all_reduce(). PowerSGD sends its first 10
steps whole here. "No error feedback" and "rank 0's weights" show two mistakes. Error feedback, on
by default, adds what was not sent in one step to the gradient of the next. Without it, that part is
lost. It costs memory; while it sends, PowerSGD holds two more copies of a bucket (with one bucket,
of all gradients). With local SGD, the ranks' weights differ between two averages. Average them on
all ranks before you evaluate or save, and a BatchNorm's buffers, too. PostLocalSGDOptimizer in
torch.distributed.optim averages after your optimizer's step, with a PeriodicModelAverager. Unless
you call no_sync(), DDP sends the gradients, too; with post_localSGD_hook, within a machine only.

The losses are those of a small example: compare your own, after equal minutes, too. Fewer bytes
help only where training waits for the network: time steps with and without model.no_sync().
"""

import contextlib
import gc
import os
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ROWS = 60, 32  # rows of each rank in a step
PERIOD = 8  # steps from one average of local SGD to the next


def exact(model):
    """DDP's own exchange, as a hook. So count_bytes() sees it, like the exchange of the others."""
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def bfloat16(model):
    """Round the gradients to 8 significant bits before they are sent. Each addition rounds, too."""
    # fp16_compress_hook keeps 11 bits, but makes a gradient above 65504 inf, and a tiny one 0.
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def power_sgd(model, use_error_feedback=True):
    """Send an m x n matrix as m x 4 and n x 4 numbers (Vogels et al. 2019, arXiv:1905.13727).

    With Gloo, all gradients must be in one bucket, as here: for a larger model, DDP(model,
    bucket_cap_mb=1000). With several buckets, or find_unused_parameters=True, exchanges come in
    different orders on the ranks, and the job aborts or hangs (torch 2.14, 2.15). NCCL: not tried.
    """
    # Biases always are sent whole: they have one dimension.
    state = PowerSGDState(
        None,
        matrix_approximation_rank=4,
        start_powerSGD_iter=10,
        use_error_feedback=use_error_feedback,
    )
    # It holds what was not sent yet: torch.save() it on each rank, with your snapshot. To resume,
    # torch.load(..., weights_only=False), your own file only, after init_process_group(). Then take
    # two passes of forward and backward before you register the hook: DDP sorts the gradients anew
    # at the second one, and what was not sent would be added to others.
    # An inf stays in the state, and makes all later gradients nan: if you skip such a step, clear()
    # state.error_dict, state.p_memory_dict and state.q_memory_dict on all ranks.
    model.register_comm_hook(state, powerSGD_hook)
    return state


def train(model, batches):
    """Train a DDP model. The hook, if it has one, sends the gradients during backward()."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


def train_locally(model, batches):
    """Train a DDP model with local SGD. Afterwards each rank has weights of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for step, (inputs, targets) in enumerate(batches, start=1):
        optimizer.zero_grad()
        with model.no_sync():  # no exchange of gradients
            mse_loss(model(inputs), targets).backward()
        optimizer.step()  # the momentum stays each rank's own
        if step % PERIOD == 0:
            average_parameters(model.parameters(), None)  # over all ranks


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare()
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare():
    teacher, world_size = new_model(7), dist.get_world_size()  # the model learns to do as it does
    test_rows = rows(1024, STEPS * world_size, teacher)  # the same on all ranks
    sent, last, loss, state = {}, {}, {}, {}  # bytes of all steps, of the last one, loss after it
    log(
        f"{STEPS} steps on {world_size} ranks; the loss before them:"
        f" {loss_of(new_model(1), test_rows):.4f}"
    )
    for name, hook, way in [
        ("exact", exact, train),
        ("bfloat16", bfloat16, train),
        ("PowerSGD", power_sgd, train),
        ("local SGD", exact, train_locally),
        ("PowerSGD, no error feedback", partial(power_sgd, use_error_feedback=False), train),
        ("local SGD, rank 0's weights", exact, train_locally),
    ]:
        model = DDP(new_model(1))
        state[name] = hook(model)
        with count_bytes() as counted:
            begins = []

            def batches(counted=counted, begins=begins):  # other rows in each step, on each rank
                for step in range(STEPS):
                    begins.append(len(counted))
                    yield rows(ROWS, step * world_size + dist.get_rank(), teacher)

            way(model, batches())
            last[name] = sum(counted[begins[-1] :])
            if name == "local SGD":
                average_parameters(model.parameters(), None)
        sent[name], loss[name] = sum(counted), loss_of(model.module, test_rows)
        log(f"{name:<28} {sent[name] / 1e6:>6.2f} MB sent, loss {loss[name]:.4f}")
    check(sent, last, loss, sum(error.nbytes for error in state["PowerSGD"].error_dict.values()))


def check(sent, last, loss, kept):
    bfloat16, power = last["exact"] / last["bfloat16"], last["exact"] / last["PowerSGD"]
    if not (bfloat16 == 2 and power > 30 and sent["exact"] / sent["local SGD"] > PERIOD - 1):
        raise RuntimeError(f"the bytes are not as few as this file says: {sent}, {last}")
    if not (
        abs(loss["bfloat16"] / loss["exact"] - 1) < 0.02
        and loss["PowerSGD"] < loss["PowerSGD, no error feedback"]
        and loss["local SGD"] < loss["local SGD, rank 0's weights"]
    ):
        raise RuntimeError(f"the losses do not order as this file says: {loss}")
    if kept != last["exact"]:
        raise RuntimeError(f"PowerSGD keeps {kept} bytes")
    log(
        f"in a step, bfloat16 sends 1/{bfloat16:.0f} of the bytes of exact; PowerSGD, after its"
        f" start, 1/{power:.0f}"
    )
    log(f"PowerSGD keeps {kept / 1e6:.2f} MB of what it did not send: those of the gradients")


@contextlib.contextmanager
def count_bytes():
    """Yield a list to which every dist.all_reduce() adds the size of its tensor, in bytes."""
    sizes, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):  # the hooks call it by this name
        yield sizes


def rows(count, seed, teacher):
    """Return (inputs, targets), each of count x 256."""
    torch.manual_seed(seed)
    inputs = torch.randn(count, 256)
    with torch.no_grad():
        return inputs, 2 * teacher(inputs)


def loss_of(model, test_rows):
    with torch.no_grad():
        return mse_loss(model(test_rows[0]), test_rows[1]).item()


def new_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
