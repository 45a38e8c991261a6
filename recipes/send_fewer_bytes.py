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

The MB are those of the tensors that each rank gives to all_reduce(). PowerSGD sends its first 10
steps whole here. "No error feedback" and "rank 0's weights" show two mistakes. Error feedback, on
by default, adds what was not sent in one step to the gradient of the next. Without it, that part is
lost. With local SGD, the ranks' weights differ between two averages. Average them on all ranks
before you evaluate or save, and a BatchNorm's buffers, too. The losses are those of a small
example: compare your own, after equal steps and after equal minutes. Fewer bytes help only where
training waits for the network. To see if it does, time steps with and without model.no_sync().
"""

import argparse
import contextlib
import gc
import os
import sys
import time
from datetime import timedelta
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
    """Round the gradients to 8 significant bits before they are sent, and add them up as such.

    Each addition rounds, too. Random gradients, added up by Gloo, were off by 0.25% on 2 ranks, by
    0.40% on 8 and by 0.53% on 16.
    """
    # fp16_compress_hook keeps 11 bits, but makes a gradient above 65504 inf, and a tiny one 0.
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def power_sgd(model, use_error_feedback=True):
    """Send an m x n matrix as m x 4 and n x 4 numbers (Vogels et al. 2019, arXiv:1905.13727).

    With Gloo, all gradients must be in one bucket, as here: for a larger model, DDP(model,
    bucket_cap_mb=1000). With several buckets, PowerSGD's exchanges come in different orders on the
    ranks, and the job aborts or hangs (seen with torch 2.15). NCCL was not tried.
    """
    # The first 10 steps are sent whole. Biases always are: they have one dimension.
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10,
                          use_error_feedback=use_error_feedback)
    # It holds what was not sent yet: torch.save() it on each rank, with your snapshot. To resume,
    # torch.load(..., weights_only=False), your own file only, after init_process_group(). Then take
    # two passes of forward and backward before you register the hook: DDP sorts the gradients anew
    # at the second one, and what was not sent would be added to others.
    # An inf stays in the state, and makes all later gradients nan: if you skip such a step, clear()
    # state.error_dict, state.p_memory_dict and state.q_memory_dict on all ranks.
    model.register_comm_hook(state, powerSGD_hook)


def power_sgd_forgetful(model):
    """Wrong: what the thin matrices cannot hold is lost."""
    power_sgd(model, use_error_feedback=False)


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
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare(device)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device):
    teacher = new_model(7, device)  # the model learns to do what this one does
    world_size = dist.get_world_size()
    test_rows = rows(1024, STEPS * world_size, teacher, device)  # the same on all ranks
    sent, last, loss = {}, {}, {}  # bytes of all steps, bytes of the last one, loss after it

    def train_and_test(name, hook, way=train, then_average=False):
        model = DDP(new_model(1, device))
        hook(model)
        begin = 0

        def batches():  # different rows in each step, and on each rank
            nonlocal begin
            for step in range(STEPS):
                begin = len(counted)
                yield rows(ROWS, step * world_size + dist.get_rank(), teacher, device)

        with count_bytes() as counted:
            way(model, batches())
            last[name] = sum(counted[begin:])
            if then_average:
                average_parameters(model.parameters(), None)
        sent[name], loss[name] = sum(counted), loss_of(model.module, test_rows)
        log(f"{name:<28} {sent[name] / 1e6:>6.2f} MB sent, loss {loss[name]:.4f}")

    untrained = loss_of(new_model(1, device), test_rows)
    log(f"{STEPS} steps on {world_size} ranks; the loss before them: {untrained:.4f}")
    train_and_test("exact", exact)
    train_and_test("bfloat16", bfloat16)
    train_and_test("PowerSGD", power_sgd)
    train_and_test("local SGD", exact, train_locally, then_average=True)
    train_and_test("PowerSGD, no error feedback", power_sgd_forgetful)
    train_and_test("local SGD, rank 0's weights", exact, train_locally)
    check(sent, last, loss)


def check(sent, last, loss):
    bfloat16, power = last["exact"] / last["bfloat16"], last["exact"] / last["PowerSGD"]
    if not (bfloat16 == 2 and power > 30 and sent["exact"] / sent["local SGD"] > PERIOD - 1):
        raise RuntimeError(f"the bytes are not as few as this file says: {sent}, {last}")
    if not (abs(loss["bfloat16"] / loss["exact"] - 1) < 0.02
            and loss["PowerSGD"] < loss["PowerSGD, no error feedback"]
            and loss["local SGD"] < loss["local SGD, rank 0's weights"]):
        raise RuntimeError(f"the losses do not order as this file says: {loss}")
    log(f"in a step, bfloat16 sends 1/{bfloat16:.0f} of the bytes of exact; PowerSGD, after its"
        f" start, 1/{power:.0f}")


@contextlib.contextmanager
def count_bytes():
    """Yield a list to which every dist.all_reduce() adds the size of its tensor, in bytes."""
    sizes, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):  # the hooks call it by this name
        yield sizes


def rows(count, seed, teacher, device):
    """Return (inputs, targets), each of count x 256."""
    torch.manual_seed(seed)
    inputs = torch.randn(count, 256).to(device)
    with torch.no_grad():
        return inputs, 2 * teacher(inputs)


def loss_of(model, test_rows):
    inputs, targets = test_rows
    with torch.no_grad():
        return mse_loss(model(inputs), targets).item()


def new_model(seed, device):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(device)


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
