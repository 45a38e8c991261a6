"""Survive a crash: torchrun starts the processes, and starts them again when one has died.

    torchrun --standalone --nproc-per-node=2 02_torchrun_elastic.py 5 1       # CPU: 2 processes
    torchrun --standalone --nproc-per-node=gpu 02_torchrun_elastic.py 50 10   # one for each GPU

50 10: 50 epochs, with a snapshot (all that a restart needs) after every 10. To see a crash, delete
snapshot.pt, and let a process kill itself in epoch 3. torchrun restarts all, at most 3 times:

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
        02_torchrun_elastic.py 6 1 --crash-epoch 3

    [rank 1/2] crash on purpose, before this epoch is saved
    [rank 0/2] attempt 1: resumed from snapshot.pt at epoch 3
    ...
    [rank 0/2] 2 replicas are identical, sha256 04064526e58c

Delete snapshot.pt, and start without --crash-epoch 3: both sha256 are equal (on GPUs, they may
differ). A crash costs what was done since the last snapshot, and the time to start again.
New here: torchrun (main), a snapshot (save, resume), the same bits after a crash
(settle_buckets). For a job, begin in template/. Next: 04_collectives.py (03: several machines).
"""

import argparse
import contextlib
import copy
import gc
import hashlib
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; without it, torch 2.11 to 2.15 may abort at the end
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

SEED = 0


@record  # when a process fails, torchrun's report shows its traceback
def main():
    args = parse_args()
    # Part 1: start. New in 02: torchrun starts this file N times, and tells each process by
    # environment variables who it is. LOCAL_RANK, its number on this machine, also chooses its GPU.
    # Part 2: meet. The ranks leave their addresses in a store, a dictionary that torchrun serves.
    # After a restart, it still holds the addresses of the dead. So, new in 02: get the store, as
    # init_process_group would, and put the attempt before each key (pitfalls/stale_addresses.py).
    store, rank, world_size = next(dist.rendezvous("env://"))  # from torchrun's variables
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    device = join(int(os.environ["LOCAL_RANK"]), store=store, rank=rank, world_size=world_size)
    train(device, args)  # parts 3, 4 and 5
    # Part 6: leave. Free DDP, which still holds the connections. Then close them.
    gc.collect()
    dist.destroy_process_group()


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])  # torchrun's restarts, from 0
    # Part 3: share the data equally: of the shuffled order, rank r takes places r, r + N, ...
    train_set, test_set, source = load_data(args.data_dir)  # your data: two Datasets, a name
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    share = min(args.batch_size, len(train_set)) // world_size
    loader = fast_loader(train_set, sampler, share, drop_last=True)  # your loader: full batches
    log(f"{len(train_set)} + {len(test_set)} {source}; batch {world_size} ranks x {share} images")

    # Part 4: build the model, and wrap it. New in 02: first load the snapshot. All ranks
    # read it: DDP copies rank 0's weights to the others, but not the state of the optimizer.
    torch.manual_seed(SEED)
    model = Net().to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)  # your optimizer
    first_epoch = resume(args.snapshot_path, model, optimizer)
    if first_epoch > 1:
        log(f"attempt {attempt}: resumed from {args.snapshot_path} at epoch {first_epoch}")
    model = DDP(model, gradient_as_bucket_view=True)  # saves memory
    settle_buckets(model, next(iter(loader))[0].to(device))

    # Part 5: train. No random state is saved: manual_seed, in each epoch, fixes what torch draws.
    for epoch in range(first_epoch, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(SEED + epoch * world_size + rank)  # dropout, augmentation vary by rank
        loss, speed = train_epoch(model, loader, optimizer, device)
        if epoch == args.crash_epoch and attempt == 0 and rank == world_size - 1:
            log("crash on purpose, before this epoch is saved", every_rank=True)
            os.kill(os.getpid(), signal.SIGKILL)  # others fail, or wait until torchrun ends them
        accuracy = evaluate(model, test_set, device)
        check_replicas(model)  # a collective, so outside the "if" below
        due = epoch % args.save_every == 0 or epoch == args.total_epochs
        if due and rank == 0:  # save what changes (a schedule, too), as tensors and numbers
            save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "next_epoch": epoch + 1,
                },
                args.snapshot_path,
            )
        log(
            f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f} |"
            f" {speed:6.0f} images/s" + (f" | saved in {args.snapshot_path}" if due else "")
        )
    if first_epoch > args.total_epochs:
        log("nothing left to train: ask for more epochs, or delete the snapshot")
    log(f"{world_size} replicas are identical, sha256 {check_replicas(model)}")


def train_epoch(model, loader, optimizer, device):
    """Train on this rank's batches; return (mean loss, images per second) over all ranks."""
    model.train()
    start = time.perf_counter()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of the losses, images
    no_bar = dist.get_rank() > 0 or None  # None (rank 0): tqdm draws a bar on a terminal
    for images, labels in tqdm(loader, leave=False, disable=no_bar):
        images, labels = images.to(device), labels.to(device)
        loss = cross_entropy(model(images), labels)  # your loss: a mean over the examples
        optimizer.zero_grad()
        loss.backward()  # the ranks wait for each other here
        optimizer.step()
        total[0] += loss.detach() * len(labels)  # loss.item() would make the CPU wait for the GPU
        total[1] += len(labels)
    dist.all_reduce(total)  # in place: the sums over all ranks
    loss_sum, count = total.tolist()
    return loss_sum / count, count / (time.perf_counter() - start)


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the accuracy on the test set. Each image counts once over all ranks."""
    share = range(dist.get_rank(), len(test_set), dist.get_world_size())
    for buffer in model.module.buffers():  # BatchNorm's means differ by rank (Net has none)
        dist.broadcast(buffer, src=0)  # rank 0's go to all
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in fast_loader(test_set, share, 1000, drop_last=False):
        # Not model(...): DDP's forward may wait for all ranks, and one may have no batch left.
        answers = model.module(images.to(device)).argmax(dim=1)  # your metric
        correct += (answers == labels.to(device)).sum()
    dist.all_reduce(correct)  # shares may differ: add up first, then divide
    return correct.item() / len(test_set)


def save(state, path):
    """Write state to path. A crash meanwhile leaves the old file whole."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut can leave an empty file
    os.replace(f"{path}.tmp", path)


def resume(path, model, optimizer):
    """Load the snapshot at path, if there is one; return the epoch to go on with."""
    if not os.path.exists(path):
        return 1
    try:
        # weights_only: an ordinary pickle can run any code. map_location: otherwise all ranks load
        # the tensors onto the GPU that they were saved from.
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        return snapshot["next_epoch"]
    except Exception as error:  # a damaged file can raise almost anything
        sys.exit(f"cannot go on from {path}: {error}\nTo start anew, move it away.")


def settle_buckets(model, images):
    """DDP reorders its buckets after its first backward. Let it do that now, without a step."""
    # Else a resumed run would begin in the old order, while an unbroken run goes on in the new.
    # Sums would be rounded differently. (Not on two ranks: a + b = b + a.)
    before = copy.deepcopy(model.state_dict())  # forward changes BatchNorm's means
    model(images).sum().backward()  # any one number that uses all outputs of your model
    model.load_state_dict(before)
    model.zero_grad()


def check_replicas(model):
    """Return the sha256 of the weights. Raise RuntimeError unless all ranks have the same."""
    sha256 = hashlib.sha256()
    for weights in model.parameters():
        sha256.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    digests = gathered(sha256.hexdigest()[:12])
    if len(set(digests)) > 1:
        raise RuntimeError(f"the replicas differ: {digests}")
    return digests[0]


# ---- The lesson ends here. Below: the model, the data, and what all scripts share. ----


class Net(nn.Module):
    """Your model. This is a small CNN: images, uint8 (N, 28, 28), to logits, float32 (N, 10)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2),
            nn.GELU(),
            nn.Conv2d(16, 32, 5, stride=2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def forward(self, images):
        return self.layers(images.unsqueeze(1).float() / 255)


def load_data(folder):
    """Your data. Return (training set, test set, name): pairs (image, label), real or generated."""
    if os.path.isdir(os.path.join(folder, "MNIST")):
        from torchvision.datasets import MNIST

        sets = MNIST(folder, train=True), MNIST(folder, train=False)
        return *(TensorDataset(s.data, s.targets) for s in sets), "images of MNIST"
    sets = zip(*(part.split(8192) for part in generate_data(10240)))
    return *(TensorDataset(*s) for s in sets), "generated images (download_mnist.py fetches MNIST)"


def generate_data(count):
    """Return images, uint8 (count, 28, 28), and labels: ten patterns, shifted, with noise."""
    generator = torch.Generator().manual_seed(SEED)  # all ranks must generate the same set
    patterns = interpolate(torch.rand(10, 1, 8, 8, generator=generator), 34, mode="bilinear") > 0.5
    windows = patterns[:, 0].unfold(1, 28, 1).unfold(2, 28, 1)  # (10, 7, 7, 28, 28): all shifts
    labels = torch.randint(10, (count,), generator=generator)
    rows, columns = torch.randint(7, (2, count), generator=generator)
    noise = torch.rand(count, 28, 28, generator=generator)
    return (45 * windows[labels, rows, columns] + 210 * noise).byte(), labels


def fast_loader(dataset, sampler, batch_size, drop_last):
    """Return a DataLoader that reads a whole batch of a TensorDataset at once."""
    # Or, item by item: return DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last,
    #                                 num_workers=2, multiprocessing_context="fork")
    # No persistent_workers=True: such workers keep their first seed, whatever manual_seed says.
    lists = BatchSampler(sampler, batch_size, drop_last)  # the indices of each batch
    return DataLoader(dataset, batch_size=None, sampler=lists)


def join(local_rank, **meeting):
    """Take a device, connect to all other processes, and return the device: parts 1 and 2."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend = dist.get_default_backend_for_device(device)
    if backend == "gloo":  # a CPU, or a Mac: Gloo cannot send tensors of its GPU
        device = torch.device("cpu")
        torch.set_num_threads(1)  # one core for each process
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # Gloo is faster this way
    elif local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)  # without it, all take memory of GPU 0, too
        device = meeting["device_id"] = torch.device(device.type, local_rank)  # NCCL sends from it
    else:
        raise SystemExit("each process needs a GPU: start fewer, or set CUDA_VISIBLE_DEVICES=")
    # Let Gloo listen on the loopback (interface 1 of Linux): no other machine can reach it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))
    # torch.distributed.nn is imported above: if DDP imported it, connections would stay open.
    dist.init_process_group(backend, **meeting)
    return device


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("total_epochs", type=int, nargs="?", default=5, help="5 by default")
    parser.add_argument("save_every", type=int, nargs="?", default=1, help="epochs; 1 by default")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, all ranks")
    parser.add_argument("--data-dir", default="data", help="the folder of MNIST")
    parser.add_argument("--snapshot-path", default="snapshot.pt")
    parser.add_argument("--crash-epoch", type=int, help="kill the last rank there, on attempt 0")
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # of the old launcher
    args = parser.parse_args()
    # On one machine, these are equal. Without torchrun, they are None and "0": not equal.
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE", "0"):
        parser.error(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]} 5 1")
    path, folder = args.snapshot_path, os.path.dirname(args.snapshot_path) or "."
    if not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.path.isfile(path)):
        parser.error(f"cannot write into the folder of {path}, or {path} is not a file")
    share = args.batch_size // int(os.environ["WORLD_SIZE"])
    if min(args.total_epochs, args.save_every, share) < 1:
        parser.error("TOTAL_EPOCHS, SAVE_EVERY and the images of each rank must be 1 or more")
    return args


if __name__ == "__main__":
    main()
