"""Several machines: the rank says who you are in the job, the local rank which GPU is yours.

Start the same command on each machine (node). They meet at one of them, here node1:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --nproc-per-node=gpu --max-restarts=3 \
        --rdzv-id=345 --rdzv-backend=c10d --rdzv-endpoint=node1:29603 03_multinode.py 50 10

(The variable: see part 2.) rdzv is the rendezvous: they meet at a free port of node1, here 29603,
by a name of your choice, here 345. Each machine needs this file and the data. More, and several
machines on one computer: launch/README.md. To begin on one machine, delete snapshot.pt, and:

    torchrun --standalone --nproc-per-node=2 03_multinode.py 5 1

The job begins with a map. Rank 0, which prints it, is on the machine whose name sorts first:

    [rank 0/4] machine         node rank  global rank  local rank  device  pid
    [rank 0/4] node1                   0            0           0  cuda:0  4711
    [rank 0/4] node1                   0            1           1  cuda:1  4712
    [rank 0/4] node2                   1            2           0  cuda:0  4720
    [rank 0/4] node2                   1            3           1  cuda:1  4721

With --nnodes=1:2 (at least 1, at most 2), the job survives the loss of node2: that costs a restart.
node2 rejoins when you start the command there again: that costs none. Each time, all ranks start
anew, from the newest snapshot of any machine. node1's torchrun must stay: the machines meet there.
What is new here is marked "New in 03". Next: template/, for a job of your own.
"""

import argparse
import contextlib
import copy
import gc
import hashlib
import os
import socket
import sys
import time
from datetime import timedelta

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
    # Part 1: start. New in 03: RANK, the global rank, counts through the whole job: it decides
    # which share of the data a process takes. LOCAL_RANK starts at 0 on each machine: it decides
    # which GPU. With two GPUs on each machine, rank 2 is the first process of the second machine,
    # and takes GPU 0 there.
    # Part 2: meet. New in 03: each attempt gets a new store, without addresses of the dead, by
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. (02's prefix will not do: each machine counts its own
    # restarts.) The timeout alone ends the wait if a cable is cut. A save must take less than it.
    device = join(int(os.environ["LOCAL_RANK"]), timeout=timedelta(seconds=args.timeout))
    show_map(device)
    train(device, args)  # parts 3, 4 and 5
    # Part 6: leave. Free DDP, which still holds the connections. Then close them.
    gc.collect()
    dist.destroy_process_group()


# New in 03: who is who.
def show_map(device):
    """Print which process of the job runs where, as each of them says of itself."""
    mine = (
        dist.get_rank(),
        socket.gethostname(),
        os.environ.get("GROUP_RANK", "-"),
        os.environ["LOCAL_RANK"],
        str(device),
        os.getpid(),
    )  # GROUP_RANK: the node rank
    log(f"{'machine':<15} node rank  global rank  local rank  device  pid")
    for rank, machine, node, local_rank, its_device, pid in gathered(mine):
        log(f"{machine:<15} {node:>9}  {rank:>11}  {local_rank:>10}  {its_device:>6}  {pid}")


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Part 3: share the data equally: of the shuffled order, rank r takes places r, r + N, ...
    train_set, test_set, source = load_data(args.data_dir)  # your data: two Datasets, a name
    # New in 03: each machine reads its own disk. Different data would spoil the training without an
    # error. (This compares names and sizes alone.)
    everywhere = gathered((socket.gethostname(), source, len(train_set), len(test_set)))
    if len({its[1:] for its in everywhere}) > 1:
        sys.exit(f"the machines have different data: {everywhere}")
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    share = min(args.batch_size, len(train_set)) // world_size
    loader = fast_loader(train_set, sampler, share, drop_last=True)  # your loader: full batches
    log(f"{len(train_set)} + {len(test_set)} {source}; batch {world_size} ranks x {share} images")

    # Part 4: build the model, go on from the snapshot, and wrap it.
    torch.manual_seed(SEED)
    model = Net().to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)  # your optimizer
    first_epoch = resume(args.snapshot_path, model, optimizer)
    if first_epoch > 1:
        log(f"resumed from {args.snapshot_path} at epoch {first_epoch}")
    model = DDP(model, gradient_as_bucket_view=True)  # saves memory
    settle_buckets(model, next(iter(loader))[0].to(device))

    # Part 5: train. No random state is saved: manual_seed, in each epoch, fixes what torch draws.
    for epoch in range(first_epoch, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(SEED + epoch * world_size + rank)  # dropout, augmentation vary by rank
        loss, speed = train_epoch(model, loader, optimizer, device)
        accuracy = evaluate(model, test_set, device)
        check_replicas(model)  # a collective, so outside the "if" below
        due = epoch % args.save_every == 0 or epoch == args.total_epochs
        # New in 03: one rank of each machine saves, as any machine may be missing next time.
        # (On a shared disk, each writes the same.) After the barrier, "saved" holds for all.
        if due and os.environ["LOCAL_RANK"] == "0":
            save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "next_epoch": epoch + 1,
                },
                args.snapshot_path,
            )
        dist.barrier()
        log(
            f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f} |"
            f" {speed:6.0f} images/s" + (f" | saved in {args.snapshot_path}" if due else "")
        )
    if first_epoch > args.total_epochs:
        log("nothing left to train: ask for more epochs, or delete the snapshot (on all machines)")
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
    temporary = f"{path}.{dist.get_rank()}.tmp"  # New in 03: for a shared disk
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut can leave an empty file
    os.replace(temporary, path)


def resume(path, model, optimizer):
    """Load the newest snapshot, if a machine has one; return the epoch to go on with."""
    snapshot = take_newest(path)  # New in 03
    if snapshot is None:
        return 1
    try:
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
    except Exception as error:  # it may be of another model
        sys.exit(f"cannot go on from {path}: {error}\nTo start anew, move it away.")
    if os.environ["LOCAL_RANK"] == "0":
        save(snapshot, path)  # New in 03: now each machine has it
    return snapshot["next_epoch"]


# New in 03: a machine that comes back has an old snapshot, or none.
def take_newest(path):
    """Return the newest of the snapshots that the ranks find at path; None if nobody has one."""
    mine, epoch = None, 1
    try:
        if os.path.exists(path):
            # weights_only: an ordinary pickle can run any code. map_location: otherwise all ranks
            # load the tensors onto the GPU that they were saved from.
            mine = torch.load(path, map_location="cpu", weights_only=True)
            epoch = mine["next_epoch"]
    except Exception as error:  # a damaged file can raise almost anything
        sys.exit(f"cannot go on from {path}: {error}\nTo start anew, move it away.")
    epochs = gathered(epoch)
    newest = [mine]  # sent even if epochs agree: the files may be of different runs
    dist.broadcast_object_list(newest, src=epochs.index(max(epochs)))
    return newest[0]


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
    # New in 03: Gloo listens for other machines, too. So its interface is not set here.
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
    parser.add_argument("--timeout", type=int, default=600, help="wait for others, in seconds")
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # of the old launcher
    args = parser.parse_args()
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        parser.error(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]} 5 1")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        parser.error(
            "for restarts: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend=c10d ..."
        )
    path, folder = args.snapshot_path, os.path.dirname(args.snapshot_path) or "."
    if not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.path.isfile(path)):
        parser.error(f"cannot write into the folder of {path}, or {path} is not a file")
    share = args.batch_size // int(os.environ["WORLD_SIZE"])
    if min(args.total_epochs, args.save_every, share, args.timeout) < 1:
        parser.error("TOTAL_EPOCHS, SAVE_EVERY, --timeout, images of each rank: must be 1 or more")
    return args


if __name__ == "__main__":
    main()
