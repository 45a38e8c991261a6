"""Survive a crash: torchrun starts the processes, and starts them again after one has died.

    torchrun --standalone --nproc-per-node=2 02_torchrun_elastic.py 5 1        # CPU, 2 processes
    torchrun --standalone --nproc-per-node=gpu 02_torchrun_elastic.py 50 10    # one a GPU

--standalone: on this machine only, on a free port. 5 1: TOTAL_EPOCHS, and SAVE_EVERY so many epochs
a snapshot. With --crash-epoch 3 one rank is killed in the middle of epoch 3; torchrun then ends the
others and starts all of them again, up to --max-restarts times (0 unless you say so), and they go
on from the snapshot:

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
        02_torchrun_elastic.py 6 1 --crash-epoch 3

    [rank 0/2] epoch  2/6 | loss 0.2023 | accuracy 0.9570 |  23132 images/s | saved in snapshot.pt
    [rank 1/2] crash on purpose: SIGKILL in the middle of the epoch
    [rank 0/2] attempt 1: resumed from snapshot.pt at epoch 3
    ...
    [rank 0/2] replicas identical on 2 ranks: max |difference| 0
    [rank 0/2] sha256 of weights c20660cd6918: compare an uninterrupted run's (equal on a CPU)

A rank that hangs is named after two minutes (TIMEOUT), and the job ends, or starts again.
New here: the environment torchrun sets, snapshots, restarts. To start over, delete the snapshot.
On a machine with one GPU, put CUDA_VISIBLE_DEVICES= in front to see two processes on the CPU.
python -m torch.distributed.launch, torchrun's predecessor, works as well; prefer torchrun.
"""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import itertools
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

SEED = 0
TIMEOUT = timedelta(minutes=2)  # how long a rank waits for the others; the default is 10 to 30


class Digits(TensorDataset):
    """The whole set as two tensors: images, uint8 (N, 28, 28), and labels, int64 (N,)."""

    def __getitems__(self, indices):
        # DataLoader calls this once a batch. Without it, it would call __getitem__ for every single
        # image, and a small model would spend its time waiting for that.
        return self[indices]


def load_data(data_dir):
    """Return (training set, test set, where they come from): MNIST, else a generated stand-in."""
    if not os.path.isdir(os.path.join(data_dir, "MNIST")):
        return *generate_data(), "generated images (download_mnist.py fetches MNIST)"
    from torchvision.datasets import MNIST  # here, as it takes a second or more

    try:
        train, test = MNIST(data_dir, train=True), MNIST(data_dir, train=False)
    except Exception as error:  # each kind of damage raises a type of its own
        stop(f"MNIST in {data_dir} does not load ({type(error).__name__}): fetch it again with"
             f" python download_mnist.py --data-dir {data_dir}", status=1)
    return Digits(train.data, train.targets), Digits(test.data, test.targets), "images of MNIST"


def generate_data(train=8192, test=2048):
    """Return (training set, test set) shaped like MNIST: ten patterns, shifted, with noise."""
    # Seeded here, so that all ranks make the same set. If each rank made its own, its share would
    # not be a part of the others' set any more, and no error would tell.
    generator = torch.Generator().manual_seed(SEED)
    patterns = interpolate(torch.rand(10, 1, 8, 8, generator=generator), 34, mode="bilinear") > 0.5
    windows = patterns[:, 0].unfold(1, 28, 1).unfold(2, 28, 1)  # (10, 7, 7, 28, 28): all shifts
    labels = torch.randint(10, (train + test,), generator=generator)
    rows, columns = torch.randint(7, (2, train + test), generator=generator)
    noise = torch.rand(train + test, 28, 28, generator=generator)
    images = (45 * windows[labels, rows, columns] + 210 * noise).byte()
    return Digits(images[:train], labels[:train]), Digits(images[train:], labels[train:])


class Net(nn.Module):
    """A small CNN: images, uint8 (N, 28, 28), to logits, float32 (N, 10)."""

    def __init__(self):
        super().__init__()
        # No ReLU, no max-pooling: a rounding error can switch a gradient on or off there, and runs
        # on 1, 2 and 4 ranks, which differ by rounding alone, would drift apart in the first epoch.
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.GELU(), nn.Conv2d(16, 32, 5, stride=2), nn.GELU(),
            nn.Flatten(), nn.Linear(512, 10))

    def forward(self, images):
        return self.layers(images.unsqueeze(1).float() / 255)


def resume(path, model, optimizer):
    """Load model and optimizer from the snapshot at path; return (next epoch, run it belongs to).

    Without a snapshot that is (1, None). One that cannot be continued ends the job, untouched.
    Every rank reads the file: on one machine, all see the same. (DDP evens out the model, but
    neither the optimizer nor the epoch.)
    """
    if not os.path.exists(path):
        return 1, None
    try:
        # The archive holds a checksum of each tensor, and torch.load does not look at it.
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"wrong checksum of {damaged}")
        # weights_only: an ordinary pickle may run any code as it is read. map_location: otherwise
        # every rank puts the tensors back on the device they were saved from, rank 0's GPU.
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        if snapshot["format"] != 1:
            raise ValueError(f"format {snapshot['format']}, and this script reads format 1")
        model.load_state_dict(snapshot["model"])
        # Without its momentum the optimizer would go on from the right place at the wrong speed.
        optimizer.load_state_dict(snapshot["optimizer"])
        return snapshot["next_epoch"], snapshot["run"]
    except Exception as error:  # each kind of damage raises a type of its own
        reason = str(error).strip().partition("\n")[0]
        stop(f"cannot continue from {path} ({type(error).__name__}: {reason}):"
             " move it away to start anew, or choose another --snapshot-path", status=1)


def settle_buckets(model, device):
    """Run DDP once without a step, so that a resumed run adds gradients up in the same order."""
    # After its first backward DDP lays out its buckets anew, in the order in which the gradients
    # came. With three ranks or more another layout is another order of summation: without this
    # call, the first step after a restart would be rounded differently from the uninterrupted one.
    model.eval()  # these zeros must not count in a BatchNorm layer, nor draw numbers for a dropout
    model(torch.zeros(1, 28, 28, device=device)).sum().backward()
    model.train()
    model.zero_grad()


def crash_halfway(batches):
    """Yield the first half of the batches, then kill this process as it is: nothing is saved."""
    yield from itertools.islice(batches, len(batches) // 2)
    log("crash on purpose: SIGKILL in the middle of the epoch", every_rank=True)
    os.kill(os.getpid(), signal.SIGKILL)


def check_replicas(model):
    """Raise RuntimeError unless every rank holds the same weights, bit for bit."""
    weights = torch.cat([p.detach().flatten() for p in model.module.parameters()])
    from_rank0 = weights.clone()
    dist.broadcast(from_rank0, src=0)
    difference = (weights - from_rank0).abs().max().nan_to_num(nan=torch.inf)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if difference != 0:
        raise RuntimeError(f"the replicas differ (inf: or hold nan) by up to {difference:.1e}")
    if dist.get_world_size() == 1:
        log("one rank: no other replica to compare with")
    else:
        log(f"replicas identical on {dist.get_world_size()} ranks: max |difference| {difference:g}")


def fingerprint(model):
    """Return the first 12 hexadecimal digits of the sha256 of all weights."""
    weights = torch.cat([p.detach().flatten() for p in model.module.parameters()])
    return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:12]


def train_elastic(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    log(f"attempt {attempt}, local rank {os.environ['LOCAL_RANK']}, pid {os.getpid()}, {device},"
        f" {dist.get_backend()}", every_rank=True)
    train_set, test_set, source = load_data(args.data_dir)
    if not world_size <= args.batch_size <= len(train_set):
        stop(f"--batch-size {args.batch_size} is impossible: give a number from {world_size}"
             f" (an image for each rank) to {len(train_set)} (the training set)")
    share = args.batch_size // world_size
    log(f"data: {len(train_set)} + {len(test_set)} {source}")
    log(f"batch size {share * world_size}: {world_size} ranks x {share} images")
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=tuple)

    torch.manual_seed(SEED)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    first_epoch, saved_run = resume(args.snapshot_path, model, optimizer)
    run = {"seed": SEED, "batch size": share * world_size, "data": source}
    if saved_run:
        log(f"attempt {attempt}: resumed from {args.snapshot_path} at epoch {first_epoch}")
        for name, value in run.items():
            if value != saved_run.get(name):
                log(f"note: {name} was {saved_run.get(name)} before, and is {value} now")
    model = DDP(model, gradient_as_bucket_view=True)
    settle_buckets(model, device)

    for epoch in range(first_epoch, args.total_epochs + 1):
        # The only randomness in an epoch is its shuffle, made from the seed and the epoch, so that
        # no generator's state need be saved. For a model with dropout, also call torch.manual_seed
        # here, with a number made from the seed, the epoch and the rank.
        sampler.set_epoch(epoch)
        crash = epoch == args.crash_epoch and attempt == 0 and rank == world_size - 1
        batches = crash_halfway(loader) if crash else loader
        loss, speed = train_epoch(model, batches, optimizer, device)
        accuracy = evaluate(model, test_set, device)
        saved = epoch % args.save_every == 0 or epoch == args.total_epochs
        if saved and rank == 0:
            # The epoch to go on with, not the one just done, which would be trained twice.
            save({"format": 1, "run": run, "next_epoch": epoch + 1,
                  "model": model.module.state_dict(), "optimizer": optimizer.state_dict()},
                 args.snapshot_path)
        log(f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f}"
            f" | {speed:6.0f} images/s{f' | saved in {args.snapshot_path}' if saved else ''}")
    if first_epoch > args.total_epochs:
        log(f"nothing left to train: {args.snapshot_path} has {first_epoch - 1} epochs behind it,"
            f" accuracy {evaluate(model, test_set, device):.4f}")
    check_replicas(model)
    log(f"sha256 of weights {fingerprint(model)}: compare an uninterrupted run's (equal on a CPU)")


def train_epoch(model, batches, optimizer, device):
    """Train on this rank's batches; return (mean loss, images per second) over all ranks."""
    start, images_seen = time.perf_counter(), 0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    # A progress bar on rank 0 only; disable=None hides it where the output is not a terminal.
    for images, labels in tqdm(batches, leave=False, disable=dist.get_rank() > 0 or None):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        # Here the ranks meet: whenever a bucket (some MB of gradients) is full, DDP all-reduces it
        # to the mean, while backward goes on with the layers below. This model fits in one bucket.
        loss.backward()
        optimizer.step()  # no exchange here: every rank takes the same step from the same gradient
        loss_sum += loss.detach() * len(labels)  # with loss.item() the CPU would wait for the GPU
        images_seen += len(labels)
    dist.all_reduce(loss_sum)
    images_seen *= dist.get_world_size()
    loss = loss_sum.item() / images_seen  # waits for the GPU, so that the clock counts done work
    return loss, images_seen / (time.perf_counter() - start)


@torch.inference_mode()
def evaluate(model, test_set, device):
    """Return the accuracy on the test set, each image counted once over all ranks."""
    # DistributedSampler would count some images twice, to give every rank as many. Here the shares
    # may differ by one, so no rank may wait for another: model.module is the model without DDP.
    share = torch.arange(dist.get_rank(), len(test_set), dist.get_world_size())
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in (test_set[indices] for indices in share.split(1000)):
        answers = model.module(images.to(device)).argmax(dim=1)
        correct += (answers == labels.to(device)).sum()
    model.train()
    # Sum, then divide: the mean of the ranks' means is wrong when their shares differ.
    dist.all_reduce(correct)
    return correct.item() / len(test_set)


def save(state, path):
    """Write state to path, so that path holds the old file or the whole new one at any moment."""
    temporary = f"{path}.tmp"  # in the same folder: a move to another file system is a copy
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name on an empty file
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch turns the first into the second
        if os.path.exists(temporary):
            os.remove(temporary)
        stop(f"cannot write {path}, which stays as it was; is the disk full? ({error})", status=1)


def pick_device(local_rank):
    """Return (device, backend): for each process a GPU and NCCL, or the CPU and Gloo."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    # Without this line every process can end up with a context, and memory, on GPU 0 as well.
    torch.cuda.set_device(local_rank)
    # Convolutions in full float32: TF32's 10 bits are too coarse to compare runs to 1e-5.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    return torch.device("cuda", local_rank), "nccl"


def share_cores(local_world_size):
    """Divide the cores among this machine's processes: by default each takes all, so they fight."""
    # torchrun sets OMP_NUM_THREADS=1 against that, which leaves cores idle; this overrides it.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world_size))
    # For Linux a batch job, whose threads do not interrupt one another: else Gloo's do, and a small
    # all_reduce took ten times as long (Linux 6.18, two cores). A container may forbid it.
    if hasattr(os, "SCHED_BATCH") and not torch.cuda.is_available():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def listen_locally():
    """Let Gloo listen on the loopback interface alone, if the whole job is on this machine."""
    # By default it listens at the address of this machine's name, for whoever connects.
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # lo; on a Mac lo0


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line and no traceback: for what the caller can mend."""
    # torchrun ends all ranks once one has failed. They mostly fail alike: local rank 0 goes first,
    # and says it once. A rank that is still here after 10 seconds is the only one, and speaks up.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def exit_with_launcher():
    """End this process once its launcher is gone, killed so that it could tell nobody."""
    # SIGKILL leaves torchrun no time to end its workers: they would train on unseen, keep their
    # GPUs, and save over the snapshots of the job that you start next.
    def watch(launcher):
        while os.getppid() == launcher:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


def explain_timeout(error, store, rank, world_size):
    """Print which ranks did not come, if error says that this one has waited too long.

    That is for Gloo: NCCL's watchdog does not raise, it ends the process with a report of its own.
    """
    with contextlib.suppress(dist.DistError):  # the store may be gone, too
        store.set_timeout(timedelta(seconds=5))
        store.set(f"rank {rank} failed", "")
        time.sleep(2)  # when one rank gives up, those that wait for it fail a moment later
        if "timed out" in str(error).lower() or "timeout" in str(error):
            absent = [str(r) for r in range(world_size) if not store.check([f"rank {r} failed"])]
            whom = "others, which wait elsewhere: compare the ranks' tracebacks"
            if absent:
                whom = f"rank {', '.join(absent)}: it has stopped, or is slower than the timeout"
            print(f"[rank {rank}/{world_size}] waited in vain for {whom}\n", end="", flush=True)


def check_path(path):
    """Stop unless path can be written, and holds nothing yet or a whole zip archive."""
    folder = os.path.dirname(path) or "."
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        stop(f"cannot write in the folder {folder} ({error.strerror}): choose another path")
    if os.path.isdir(path):
        stop(f"{path} is a directory: give the path of a file")
    if os.path.exists(path) and not zipfile.is_zipfile(path):  # torch.save makes zip archives
        stop(f"{path} is no file of torch.save, or not a whole one: move it or choose another path")


def claim(path, suffix=".lock"):
    """Lock path for as long as this process lives; stop if another living process has it."""
    # Two jobs that save to one path would go on from each other's epochs. The system takes the lock
    # back when the process ends, whatever ends it; the file of the lock stays, hidden and empty.
    folder, name = os.path.split(path)
    lock = os.open(os.path.join(folder, f".{name}{suffix}"), os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the end: lock is never closed
    except BlockingIOError:
        stop(f"another job is running with {path}: end it, or choose another path", 1)


@record  # hands an exception's traceback to torchrun, whose report shows none otherwise
def main():
    args = parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        stop("this script needs a launcher:"
             " torchrun --standalone --nproc-per-node=2 02_torchrun_elastic.py 5 1")
    # torchrun tells each process who it is: RANK in the job of WORLD_SIZE, LOCAL_RANK among the
    # LOCAL_WORLD_SIZE of this machine, and where they meet: MASTER_ADDR and MASTER_PORT.
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_world_size:
        stop(f"{local_world_size} processes want a GPU each and there are {gpus}:"
             " use --nproc-per-node=gpu, or the CPU with CUDA_VISIBLE_DEVICES= in front")
    exit_with_launcher()
    check_path(args.snapshot_path)
    if os.environ["RANK"] == "0":  # the one that saves
        claim(args.snapshot_path)
    device, backend = pick_device(local_rank)
    share_cores(local_world_size)
    listen_locally()
    # torchrun keeps one store for all attempts. Without a prefix for each attempt, restarted ranks
    # read the addresses that the dead ones left there, and are refused or wait until the timeout.
    # (That is the cure on one machine: between machines the counts of attempts can differ.)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
        train_elastic(device, args)
    except RuntimeError as error:
        explain_timeout(error, store, rank, world_size)
        raise
    # Collect, then destroy, and not in a "finally": 01_single_node_multi_gpu.py says why.
    gc.collect()
    dist.destroy_process_group()


def parse_args():
    def number(text):
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("total_epochs", type=number, nargs="?", default=5, help="5 by default")
    parser.add_argument("save_every", type=number, nargs="?", default=1, help="1 by default")
    parser.add_argument("--batch-size", type=number, default=64, help="images a step, all ranks")
    parser.add_argument("--snapshot-path", default="snapshot.pt")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--crash-epoch", type=number, help="kill the last rank there, on attempt 0")
    # torch.distributed.launch passes this on every command line; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
