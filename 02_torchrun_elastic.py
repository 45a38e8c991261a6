"""Survive a crash: torchrun starts the processes, and starts them again after one has died.

    torchrun --standalone --nproc-per-node=2 02_torchrun_elastic.py 5 1        # CPU, 2 processes
    torchrun --standalone --nproc-per-node=gpu 02_torchrun_elastic.py 50 10    # one per GPU

5 1: five epochs, and a snapshot after each. The processes, called ranks, share a batch of 64 images
in each step. (On many GPUs, --batch-size 4096 gives each enough to do.) Now delete snapshot.pt, and
let one rank kill itself in epoch 3. torchrun ends the others and starts all again, at most
--max-restarts times:

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
        02_torchrun_elastic.py 6 1 --crash-epoch 3

    [rank 0/2] epoch  2/6 | loss 0.2023 | accuracy 0.9570 |  16648 images/s | saved in snapshot.pt
    [rank 1/2] crash on purpose: SIGKILL in the middle of the epoch
    [rank 0/2] attempt 1: resumed from snapshot.pt at epoch 3
    ...
    [rank 0/2] 2 replicas are identical, sha256 04064526e58c

Delete snapshot.pt again, and leave out --crash-epoch 3: the sha256 is the same (on a CPU, with the
same number of ranks).
New here: what torchrun tells a process (main), a snapshot to go on from (train, resume), the same
result to the last bit (settle_buckets); helpers LAUNCHER, exit_with_launcher, lock, roll_call,
warn_of_other_batches, crash_halfway, stop, parse_args. The rest is as in
01_single_node_multi_gpu.py. Next: 03_multinode.py.
"""

import argparse
import contextlib
import errno
import fcntl
import gc
import hashlib
import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
import zipfile
from datetime import timedelta

# New in 02: the process that started this one, as it may end while torch is being imported.
LAUNCHER = os.getppid()

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # else DDP imports it later, which keeps the group alive to the end
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

SEED = 0
TIMEOUT = timedelta(minutes=10)  # how long ranks wait for each other: longer than a save may take


@record
def main():
    # New in 02: torchrun starts this file once per process: main does what worker did in 01.
    # @record: if a process fails, torchrun's report shows its traceback.
    args = parse_args()
    exit_with_launcher()  # if torchrun is killed, exit too

    # Step 1: start. Every process learns who it is, and takes its device.
    # New in 02: torchrun says it in environment variables. RANK: the number of the process in the
    # job of WORLD_SIZE processes. LOCAL_RANK: its number among the LOCAL_WORLD_SIZE processes of
    # this machine, and the number of its GPU. On one machine, RANK equals LOCAL_RANK.
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))  # torchrun has given each one thread only
    listen_locally()  # nobody else has to reach these processes

    # Step 2: meet. Every process leaves its network address at the meeting point, and waits until
    # all others have done so. Then they are connected: they are a process group.
    # New in 02: the meeting point is a store, a dictionary that torchrun serves to all ranks. It
    # outlives a restart. With its own prefix, an attempt does not find the addresses of dead ranks.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # reads RANK, ...
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    if rank == 0:
        lock(args.snapshot_path)  # two jobs must not write one snapshot
    roll_call(store, rank, world_size)  # if a rank does not come, say which
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT,
        device_id=device if backend == "nccl" else None)  # NCCL wants to know its GPU

    train(device, args)  # steps 3, 4 and 5

    # Step 6: leave. First free what train has left: otherwise Python may abort as it exits. Not in
    # a "finally": after an error on one rank, NCCL would hang here.
    gc.collect()
    dist.destroy_process_group()


def train(device, args):
    # New in 02: attempt counts torchrun's restarts, from 0.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log(f"attempt {attempt}, pid {os.getpid()}, {device}, {dist.get_backend()}", every_rank=True)

    # Step 3: share the data. Rank r gets the items r, r + world_size, ... of one shuffled list.
    train_set, test_set, source = load_data(args.data_dir)  # your data: any map-style Dataset
    check_items(train_set, test_set)  # whatever they are: the loop needs images and labels
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)

    # What the ranks cannot share equally is not used: pitfalls/mean_of_unequal_shards.py cures it.
    share = args.batch_size // world_size
    if not 1 <= share <= len(sampler):
        stop(f"--batch-size must be from {world_size} (an image for each rank) to {len(train_set)}")
    loader = batches_of(train_set, BatchSampler(sampler, share, drop_last=True))
    log(f"data: {len(train_set)} + {len(test_set)} {source}")
    batch = f"{world_size} ranks x {share} images"
    log(f"batch size {share * world_size}: {batch}")

    torch.manual_seed(SEED)  # every run starts from the same weights
    model = Net().to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    # New in 02: go on from the snapshot. All ranks read it: DDP copies rank 0's weights to the
    # others, but not the optimizer's state.
    snapshot = resume(args.snapshot_path, model, optimizer)
    first_epoch = snapshot["next_epoch"]
    if first_epoch > 1:
        log(f"attempt {attempt}: resumed from {args.snapshot_path} at epoch {first_epoch}")
        warn_of_other_batches(snapshot, batch)

    # Step 4: wrap the model. DDP copies rank 0's weights to all replicas (each rank has one).
    # Inside loss.backward(), it then collects gradients in buckets of some MB, and replaces each
    # bucket by its mean over all ranks as soon as it is full. So all ranks take the same step.
    model = DDP(model, gradient_as_bucket_view=True)
    # New in 02: one pass without a step, so that a resumed run adds up gradients in the same order.
    images, labels = torch.utils.data.default_collate([test_set[0]])
    settle_buckets(model, images.to(device), labels.to(device))

    # Step 5: train. Every step averages the gradients; rank 0 reports and saves.
    # New in 02: begin at first_epoch. No random state is in the snapshot: all that is random
    # follows from the seed, the epoch and the rank.
    for epoch in range(first_epoch, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # without this line, every epoch repeats the order of the first
        # Dropout, or a Dataset that augments, must draw other numbers in each epoch, on each rank.
        seed_all(SEED + epoch * world_size + rank)  # (SEED + epoch + rank would repeat some)
        crash = epoch == args.crash_epoch and attempt == 0 and rank == world_size - 1
        batches = crash_halfway(loader) if crash else loader
        loss, speed = train_epoch(model, batches, optimizer, device)
        accuracy = evaluate(model, test_set, device)  # each rank its share, then the sum

        # New in 02: save the optimizer's state (momentum), too, and the epoch to go on with. Rank 0
        # alone writes a new file, then moves it over the old one: a crash leaves that intact. The
        # others wait meanwhile: a save that outlasts TIMEOUT would end the job, again and again.
        saved = epoch % args.save_every == 0 or epoch == args.total_epochs
        if saved and rank == 0:
            save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                  "next_epoch": epoch + 1, "batch": batch}, args.snapshot_path)
        note = f" | saved in {args.snapshot_path}" if saved else ""
        log(f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f}"
            f" | {speed:6.0f} images/s{note}")

    # New in 02: the snapshot may have all epochs already.
    if first_epoch > args.total_epochs:
        log("nothing left to train: ask for more epochs, or delete the snapshot")
    check_replicas(model)


# New in 02: a restarted rank calls this to go on.
def resume(path, model, optimizer):
    """Load the snapshot at path; return what else it holds. Without one, begin with epoch 1."""
    if not os.path.exists(path):
        return {"next_epoch": 1}
    try:
        with zipfile.ZipFile(path) as archive:  # the format of torch.save
            if damaged := archive.testzip():  # torch.load does not look at the checksums
                raise ValueError(f"wrong checksum of {damaged}")
        # weights_only: an ordinary pickle can run any code while it is read. map_location:
        # otherwise the tensors go to the GPU that they were saved from, rank 0's.
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot.pop("model"))
        optimizer.load_state_dict(snapshot.pop("optimizer"))
        return {"next_epoch": snapshot.pop("next_epoch"), **snapshot}
    except Exception as error:  # a damaged file can raise almost any exception
        reason = str(error).strip().partition("\n")[0]
        stop(f"cannot continue from {path} ({type(error).__name__}: {reason}): move it away to"
             " start anew, or choose another --snapshot-path if it is another script's", status=1)


# New in 02: without it, a resumed run with three or more ranks has other last bits.
def settle_buckets(model, images, labels):
    """Run DDP once without a step, so that a resumed run adds up gradients in the same order."""
    # DDP regroups its buckets once, after its first backward: in epoch 1, or, if resumed, in a
    # later one. That changes the order of additions and, with three ranks or more, the rounding.
    model.eval()  # this pass must not change a BatchNorm layer, or use up random numbers
    batch_loss(model, images, labels).backward()
    model.train()
    model.zero_grad()


def check_replicas(model):
    """Raise RuntimeError unless every rank holds the same weights and buffers, bit for bit."""
    sha256 = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())  # its bytes, of any type
    digest = sha256.hexdigest()[:12]
    digests = gathered(digest)
    if set(digests) != {digest}:
        raise RuntimeError(f"the replicas differ: sha256 {', '.join(digests)}")
    same = f"{len(digests)} replicas are identical" if len(digests) > 1 else "one replica"
    log(f"{same}, sha256 {digest}")


# ---- What any training script needs: an epoch, the evaluation, saving, the model, the data ----


def seed_all(seed):
    """Seed all that your model and your data may draw random numbers from."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # for GPUs, too; and the workers of a DataLoader start from it


def train_epoch(model, batches, optimizer, device):
    """Train on this rank's batches; return (mean loss, images per second) over all ranks."""
    start, images_seen = time.perf_counter(), 0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    # A progress bar on rank 0. None tells tqdm to hide it unless the output is a terminal.
    hidden = True if dist.get_rank() > 0 else None
    for images, labels in tqdm(batches, leave=False, disable=hidden):
        # non_blocking: the CPU does not wait for the copy. (The copy itself overlaps with work of
        # the GPU only if the batch is in pinned memory.)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = batch_loss(model, images, labels)
        loss.backward()  # the ranks meet here: DDP averages the gradients
        optimizer.step()  # no exchange here: every rank takes the same step
        loss_sum += loss.detach() * len(labels)  # loss.item() would make the CPU wait for the GPU
        images_seen += len(labels)
    dist.all_reduce(loss_sum)
    images_seen *= dist.get_world_size()
    loss = (loss_sum / images_seen).item()  # waits for the GPU: count finished work
    return loss, images_seen / (time.perf_counter() - start)


@torch.inference_mode()
def evaluate(model, test_set, device):
    """Return the accuracy on the test set. Every image counts once over all ranks."""
    # DistributedSampler would repeat images to give every rank equally many. Here the shares may
    # differ by one, so no rank may wait for another: model.module is the model without DDP.
    share = range(dist.get_rank(), len(test_set), dist.get_world_size())
    # BatchNorm has buffers: each rank's running mean is of its own images. Give all ranks those of
    # rank 0, which are saved. (The model below has no buffers.)
    for buffer in model.module.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    # 1000 images at a time: choose fewer if yours need much memory.
    for images, labels in batches_of(test_set, BatchSampler(share, 1000, drop_last=False)):
        answers = model.module(images.to(device)).argmax(dim=1)  # your metric
        correct += (answers == labels.to(device)).sum()
    model.train()
    dist.all_reduce(correct)  # sum, then divide: a mean of means is wrong when shares differ
    return correct.item() / len(test_set)


def save(state, path):
    """Write state to path. If the process dies meanwhile, path still holds the old file, whole."""
    temporary = f"{path}.tmp"  # in the same folder: a move to another disk would be a slow copy
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave an empty file at path
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        if os.path.exists(temporary):
            os.remove(temporary)
        stop(f"cannot write {path}, which stays as it was; is the disk full? ({error})", status=1)


def batch_loss(model, images, labels):
    """Your loss. Return its mean over the images: DDP takes the mean over the ranks."""
    return cross_entropy(model(images), labels)  # your loss


class Net(nn.Module):
    """Your model. This is a small CNN: images, uint8 (N, 28, 28), to logits, float32 (N, 10)."""

    def __init__(self):
        super().__init__()
        # Yours may have ReLU and max-pooling. Here, runs on 1, 2 and 4 ranks are compared. They
        # differ by rounding errors, which can switch a gradient on or off there.
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.GELU(), nn.Conv2d(16, 32, 5, stride=2), nn.GELU(),
            nn.Flatten(), nn.Linear(512, 10))

    def forward(self, images):
        return self.layers(images.unsqueeze(1).float() / 255)  # for bytes, from 0 to 255


def load_data(folder):
    """Your data. Return (training set, test set, their name): MNIST, or generated images."""
    if not os.path.isdir(os.path.join(folder, "MNIST")):
        images, labels = generate_data(10240)
        sets = (images[:8192], labels[:8192]), (images[8192:], labels[8192:])
        source = "generated images (download_mnist.py fetches MNIST)"
        return *(TensorDataset(*s) for s in sets), source
    from torchvision.datasets import MNIST  # imported here because it takes a second or more

    try:
        sets = MNIST(folder, train=True), MNIST(folder, train=False)
    except Exception as error:  # a damaged file can raise almost any exception
        stop(f"MNIST in {folder} does not load ({type(error).__name__}): fetch it again with"
             f" python download_mnist.py --data-dir {folder}", status=1)
    return *(TensorDataset(s.data, s.targets) for s in sets), "images of MNIST"


def generate_data(count):
    """Return images, uint8 (count, 28, 28), and labels: ten patterns, shifted, with noise."""
    generator = torch.Generator().manual_seed(SEED)  # all ranks must generate the same set
    patterns = interpolate(torch.rand(10, 1, 8, 8, generator=generator), 34, mode="bilinear") > 0.5
    windows = patterns[:, 0].unfold(1, 28, 1).unfold(2, 28, 1)  # (10, 7, 7, 28, 28): all shifts
    labels = torch.randint(10, (count,), generator=generator)
    rows, columns = torch.randint(7, (2, count), generator=generator)
    noise = torch.rand(count, 28, 28, generator=generator)
    return (45 * windows[labels, rows, columns] + 210 * noise).byte(), labels


def check_items(train_set, test_set):
    """Stop unless both sets give pairs, an image and its label, of which a batch can be made."""
    for name, dataset in ("training", train_set), ("test", test_set):
        if len(dataset) == 0:
            stop(f"the {name} set is empty", status=1)
        items = [dataset[0], dataset[len(dataset) - 1]]
        try:
            images, labels = torch.utils.data.default_collate(items)  # as a DataLoader does
        except (TypeError, ValueError, RuntimeError):
            images = labels = None
        pairs = isinstance(items[0], tuple | list)
        if not (pairs and torch.is_tensor(images) and torch.is_tensor(labels)):
            found = [[tuple(part.shape) if torch.is_tensor(part) else type(part).__name__
                      for part in (item if pairs else [item])] for item in items]
            stop(f"the {name} set must give tensors of one size, each with a number; its first and"
                 f" last item are {found}. Has it a transform that makes such tensors?", status=1)


def batches_of(dataset, lists):
    """Return a DataLoader that yields a batch, (images, labels), for each list of indices."""
    if isinstance(dataset, TensorDataset):  # it can read a whole list at once: dataset[indices]
        return DataLoader(dataset, batch_size=None, sampler=lists)
    # Any other Dataset is read item by item, by two more processes for each rank, which take the
    # batches in turn. What they draw at random (say, to augment images) follows from seed_all.
    return DataLoader(dataset, batch_sampler=lists, num_workers=2)


# ---- Helpers that are no part of the lesson ----


# New in 02: torchrun killed with SIGKILL cannot end its workers. They would go on training.
def exit_with_launcher():
    """End this process when torchrun is gone."""
    def watch():
        while os.getppid() == LAUNCHER:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def pick_device(local_rank):
    """Return (device, backend): for each process a GPU and NCCL, or the CPU and Gloo."""
    if not torch.cuda.is_available():
        if torch.cuda.device_count() and local_rank == 0:  # the driver counts GPUs, torch has none
            print("note: torch cannot use the GPU of this machine, and takes the CPU: is its driver"
                  f" too old for CUDA {torch.version.cuda}?\n", end="", flush=True)
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)  # otherwise every process also takes memory on GPU 0
    return torch.device("cuda", local_rank), "nccl"


def share_cores(local_world_size):
    """Divide this machine's cores among its processes."""
    # By default each process uses all cores (or, under torchrun, only one).
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world_size))
    # Linux: run as a batch job. Otherwise Gloo's threads preempt each other.
    if not torch.cuda.is_available():
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a container forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def listen_locally():
    """Let Gloo listen on this machine only: by default, anyone on its network can connect."""
    # Interface 1 is the loopback interface: lo on Linux, lo0 on a Mac.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))


# New in 02: with another number of ranks, training goes on, but the result is another one.
def warn_of_other_batches(snapshot, batch):
    """Print a note if the snapshot was written with another batch, or another number of ranks."""
    if snapshot.get("batch", batch) != batch:
        log(f"note: saved by {snapshot['batch']}: not the bits of an unbroken run from here on")


# New in 02: two jobs with one snapshot would go on from each other's epochs.
def lock(path):
    """Stop if path cannot be written, or if another job has it. The lock ends with the process."""
    try:
        file = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT)  # never closed
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a loader's workers do not inherit it
    except BlockingIOError:
        stop(f"another job is running with {path}: end it, or choose another path", status=1)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            stop(f"cannot write {path} ({error.strerror}): choose another path")
        print(f"note: {path} is on a disk without locks: start no second job with it\n", end="",
              flush=True)


# New in 02: init_process_group would wait for a missing rank, but not name it (NCCL: for ever).
def roll_call(store, rank, world_size):
    """Return when all ranks have come; stop if that takes too long, and name the missing ones."""
    store.set(f"rank {rank}", "here")
    missing, deadline = [], time.monotonic() + store.timeout.total_seconds()
    for number in range(world_size):
        try:  # (check() would ask without a limit, and the store may be gone, too)
            store.wait([f"rank {number}"], timedelta(seconds=max(1, deadline - time.monotonic())))
        except dist.DistStoreError:
            missing.append(f"rank {number}")
    if missing:
        stop(f"{', '.join(missing)} did not come within {store.timeout.total_seconds():g} s: look"
             " for an error above, or for a process that hangs", status=1)


# New in 02: a crash at a known moment, to see that nothing is lost.
def crash_halfway(batches):
    """Yield the first half of the batches, then kill this process."""
    yield from itertools.islice(batches, len(batches) // 2)
    log("crash on purpose: SIGKILL in the middle of the epoch", every_rank=True)
    os.kill(os.getpid(), signal.SIGKILL)


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


# New in 02: torchrun starts the ranks, so LOCAL_RANK tells who speaks, from the first line on.
def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


# New in 02: --snapshot-path, --crash-epoch, and no --nprocs: torchrun says how many.
def parse_args():
    """Return the arguments; stop if they, or the way of starting, cannot work."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("total_epochs", type=int, nargs="?", default=5, help="5 by default")
    parser.add_argument("save_every", type=int, nargs="?", default=1, help="1 by default")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, all ranks")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--snapshot-path", default="snapshot.pt")
    parser.add_argument("--crash-epoch", type=int, help="kill the last rank there, on attempt 0")
    # torch.distributed.launch, the predecessor of torchrun, passes this; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.total_epochs, args.save_every) < 1:
        stop("TOTAL_EPOCHS and SAVE_EVERY must be 1 or more")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]} 5 1")
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        stop("this script is for one machine: use 03_multinode.py on several")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node=gpu, or the CPU"
             " with CUDA_VISIBLE_DEVICES= in front")
    return args


if __name__ == "__main__":
    main()
