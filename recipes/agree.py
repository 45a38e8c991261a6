"""How do all ranks stop in the same step?

    flags = dist.new_group(backend="gloo")  # over the CPU, so that nothing waits for a GPU

    def any_rank(condition, group):
        flag = torch.tensor(float(condition))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return flag.item() > 0

    if any_rank(no_progress or time.monotonic() > deadline, flags):
        break

Each rank is a process of its own. In every step of the training the ranks wait for each other,
because they average their gradients. If one rank leaves the loop alone, the others wait for it
until their process group times out: after 10 minutes on GPUs (NCCL), 30 on CPUs (Gloo). So every
rank tells the others whether it wants to stop, and all leave as soon as one of them does.

    torchrun --standalone --nproc-per-node=2 recipes/agree.py

    [rank 0/2] alone:  early stopping  rank 0 left after epoch 3; the others failed in epoch 4
    [rank 0/2] agreed: early stopping  wanted by rank 0; all left after epoch 3
    [rank 0/2] agreed: stop file       wanted by rank 0; all left after epoch 2
    [rank 0/2] agreed: time limit      wanted by rank 1; all left after epoch 4
    [rank 0/2] agreed: loss is nan     wanted by rank 1; all left after epoch 1

"alone" is the common mistake. It is shown with Gloo and a timeout of 2 s, so that this script can
go on; with NCCL, a timeout ends the process. All ranks must call any_rank(), in the same step. So
this is wrong, too: "if no_progress or any_rank(time_is_up, flags)". Where no_progress is true,
Python skips the rest: that rank leaves, and the others wait for it in any_rank(). No flag is needed
if all ranks decide by the same number, such as a validation loss that they have all-reduced.

Now write it yourself: exercises/09_stop_together.py.
"""

import math
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

EPOCHS = 6
TIMEOUT = timedelta(seconds=2)  # for the demonstration; yours is that of init_process_group()


def any_rank(condition, group):
    """Return True on every rank if condition is true on any of them. All ranks must call it."""
    flag = torch.tensor(float(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag.item() > 0


def train_agreed(wants_to_stop, finished, group):
    """The right way. wants_to_stop(epoch): what this rank alone would decide."""
    for epoch in range(1, EPOCHS + 1):
        exchange_gradients(group)
        finished.append(epoch)
        if any_rank(wants_to_stop(epoch), group):
            break


def train_alone(wants_to_stop, finished, group):
    """Wrong: the ranks that stay wait in the next epoch for the one that has left."""
    for epoch in range(1, EPOCHS + 1):
        exchange_gradients(group)
        finished.append(epoch)
        if wants_to_stop(epoch):
            break


def exchange_gradients(group):
    """Stands for your epoch: DistributedDataParallel waits for all ranks in each backward()."""
    dist.all_reduce(torch.ones(1), group=group)


def reasons_to_stop(rank, world_size, folder):
    """{reason: function}: each is true on a single rank first, as it happens in real jobs."""
    last = rank == world_size - 1

    def early_stopping(epoch):  # each rank has the loss of its own share of the validation set
        losses = [0.9, 0.91, 0.92, 0.93, 0.94, 0.95] if rank == 0 else [1, 0.9, 0.8, 0.7, 0.6, 0.5]
        return epoch - losses.index(min(losses[:epoch])) > 2  # two epochs without progress

    def stop_file(epoch):  # "touch STOP" on one machine; the others do not see it, or see it later
        path = os.path.join(folder, "STOP")
        if rank == 0 and epoch == 2:
            open(path, "w").close()
        return os.path.exists(path)

    def time_limit(epoch):  # an epoch takes 10 minutes; the clock of one machine is ahead
        return 10 * epoch + (3 if last else 0) > 42

    def loss_is_nan(epoch):  # in your loop, ask in every step, before backward() spreads the nan
        loss = math.nan if last else 0.5
        return not math.isfinite(loss)

    return {
        "early stopping": early_stopping,
        "stop file": stop_file,
        "time limit": time_limit,
        "loss is nan": loss_is_nan,
    }


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with tempfile.TemporaryDirectory() as folder:  # each rank has its own: a disk of its own
        stop_alone_and_together(folder)
    dist.destroy_process_group()


def stop_alone_and_together(folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reasons = reasons_to_stop(rank, world_size, folder)
    epochs, _, errors = watch(train_alone, reasons["early stopping"])
    if epochs != [3] * world_size or errors[0] or not all(errors[1:]):
        raise RuntimeError(f"one rank left alone, but: epochs {epochs}, errors {errors}")
    log(
        f"alone:  early stopping  rank 0 left after epoch {epochs[0]}; the others failed in epoch"
        f" {epochs[1] + 1}"
    )
    last = world_size - 1
    expected = {
        "early stopping": (0, 3),
        "stop file": (0, 2),
        "time limit": (last, 4),
        "loss is nan": (last, 1),
    }  # the rank that wants to stop, and after which epoch
    for name, (who, epoch) in expected.items():
        epochs, wanted, errors = watch(train_agreed, reasons[name])
        if epochs != [epoch] * world_size or wanted != [who] or any(errors):
            raise RuntimeError(f"not all left together: {name}, epochs {epochs}, errors {errors}")
        log(f"agreed: {name:<15} wanted by rank {who}; all left after epoch {epoch}")


def watch(train, wants_to_stop):
    """Return each rank's last epoch, the ranks that wanted to stop then, and each rank's error."""
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # a timeout breaks it: a new one here
    finished, error = [], ""
    try:
        train(wants_to_stop, finished, group)
    except RuntimeError as caught:  # "Timed out waiting ..." or "Connection closed by peer ..."
        error = str(caught).rpartition("] ")[2]
    wish = bool(finished) and wants_to_stop(finished[-1])
    epochs, wishes, errors = zip(*gathered((len(finished), wish, error)), strict=True)
    dist.destroy_process_group(group)
    return list(epochs), [rank for rank, wish in enumerate(wishes) if wish], list(errors)


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
