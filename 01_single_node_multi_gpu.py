"""Train one model with several processes on one machine: mp.spawn and DistributedDataParallel.

    python 01_single_node_multi_gpu.py           # CPU: 2 processes, 5 epochs
    python 01_single_node_multi_gpu.py 50 10     # GPUs: a process each, 50 epochs, 5 checkpoints

You will see each process say who it is, the gradient of DistributedDataParallel (DDP) checked
against that of one process on the same images, the training, and that all end with equal weights:

    [rank 1/2] pid 4243, cpu, gloo
    [rank 0/2] pid 4242, cpu, gloo
    [rank 0/2] data: 8192 + 2048 generated images (download_mnist.py fetches MNIST)
    [rank 0/2] batch size 64: 2 ranks x 32 images
    [rank 0/2] first batch: one process's gradient on all 64 images, against
    [rank 0/2]   a rank's own gradient: off by 8.8e-01 of the largest entry
    [rank 0/2]   the one DDP leaves on each rank: off by 3.0e-07
    [rank 0/2] epoch  1/5 | loss 1.3184 | accuracy 0.9194 |  31932 images/s | saved in checkpoint.pt
    ...
    [rank 0/2] replicas identical on 2 ranks: max |difference| 0

New here, if you have trained on one GPU. Rank: a process's number, from 0 to world size - 1.
Process group: the processes that talk to each other, through a backend: NCCL between GPUs, Gloo
between CPUs. Collective: a call that every rank of the group must make; broadcast: all get one
rank's tensor; all-reduce: all get the sum (mean, maximum) of everybody's. Replica: a rank's copy of
the model. With a single GPU, put CUDA_VISIBLE_DEVICES= in front and watch two processes on the CPU.
Next: 02_torchrun_elastic.py, which survives a crash.
"""

import argparse
import contextlib
import copy
import fcntl
import gc
import os
import socket
import sys
import tempfile
import time
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
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


def check_gradients(model, images, labels):
    """The idea of DDP: every rank has its own images, and all get the gradient of the whole batch.

    model: the DDP wrapper; images (n, 28, 28), labels (n,): this rank's share of one batch. Raises
    RuntimeError if DDP's gradient is not what one process computes from the images of all ranks, to
    1e-5 of its largest entry; rounding stays well below that.
    """
    if (world_size := dist.get_world_size()) == 1:
        log("one rank: DDP has nothing to average")
        return
    alone = copy.deepcopy(model.module)  # the same weights without DDP: nothing is averaged here

    def gradient(images, labels):
        loss = cross_entropy(alone(images), labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, alone.parameters())])

    def of_all_ranks(tensor):
        tensors = tensor.new_empty(world_size * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(tensors, tensor)
        return tensors

    expected = gradient(of_all_ranks(images), of_all_ranks(labels))
    own = gradient(images, labels)
    cross_entropy(model(images), labels).backward()  # in here DDP averages over the ranks
    averaged = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()

    off = torch.stack([own - expected, averaged - expected]).abs().amax(dim=1)
    off = (off / expected.abs().max()).nan_to_num(nan=torch.inf)  # a maximum may lose a nan
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    log(f"first batch: one process's gradient on all {world_size * len(images)} images, against")
    log(f"  a rank's own gradient: off by {off[0]:.1e} of the largest entry")
    log(f"  the one DDP leaves on each rank: off by {off[1]:.1e}")
    if off[1] >= 1e-5:
        raise RuntimeError(f"DDP's gradient is off by {off[1]:.1e}")


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


def worker(rank, world_size, port, args):
    """One process of the job, started by mp.spawn, which puts the process's number, rank, first."""
    device, backend = pick_device(rank)
    share_cores(world_size)
    listen_locally()
    # The ranks find each other in a store, a small server for keys and values, which the parent
    # keeps at this port: each leaves its address there and waits until all world_size have (NCCL
    # puts that off to the first collective). If one never comes, the others give up after the
    # timeout, which holds for every later collective too.
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    train(device, args)
    # DDP sits in a reference cycle that keeps the process group's threads alive. Left to the end of
    # the interpreter, they abort one run in ten with its work all done ("terminate called without
    # an active exception"). So: train in a function, collect what it leaves, then destroy. Not in a
    # "finally": after an error on one rank, NCCL would wait here for ranks that never come.
    gc.collect()
    dist.destroy_process_group()


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log(f"pid {os.getpid()}, {device}, {dist.get_backend()}", every_rank=True)
    train_set, test_set, source = load_data(args.data_dir)
    share = args.batch_size // world_size
    log(f"data: {len(train_set)} + {len(test_set)} {source}")
    log(f"batch size {share * world_size}: {world_size} ranks x {share} images")

    # Rank r draws the items r, r + world_size, ... of one shuffled list, as many as every other
    # rank: with a batch more than the others it would wait for an all-reduce that nobody joins.
    # drop_last: otherwise the sampler repeats images to fill up, and the last batch is smaller.
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    # collate_fn: a batch comes as two tensors; the default would take them for a list of samples.
    loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=tuple)

    torch.manual_seed(SEED + rank)  # other weights on every rank, on purpose: DDP mends that
    # Move, then wrap: DDP makes its buffers for gradients on the device where it finds the model.
    # Its first act is to broadcast rank 0's weights, so that all ranks start from the same point.
    # After that it exchanges gradients (and buffers, which this model has none of): the same start
    # and the same steps keep the replicas the same. gradient_as_bucket_view: the gradients live in
    # the buffers they are sent from, instead of a second time beside them.
    model = DDP(Net().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    check_gradients(model, *(tensor.to(device) for tensor in next(iter(loader))))

    for epoch in range(1, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # without it, every epoch repeats the order of the first
        loss, speed = train_epoch(model, loader, optimizer, device)
        accuracy = evaluate(model, test_set, device)
        saved = epoch % args.save_every == 0 or epoch == args.total_epochs
        # The replicas are the same, so one writes; if all did, into each other's file. And no
        # collective under this "if": rank 0 would wait there for ranks that never come. Save
        # model.module: the keys of the wrapper's own state begin with "module." and fit no Net.
        if saved and rank == 0:
            save({"model": model.module.state_dict(), "epoch": epoch}, args.checkpoint_path)
        log(f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f}"
            f" | {speed:6.0f} images/s{f' | saved in {args.checkpoint_path}' if saved else ''}")
    check_replicas(model)


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


def main():
    args = parse_args()
    if "LOCAL_RANK" in os.environ:
        stop("this script starts its processes itself: run it with python, not with torchrun")
    gpus = torch.cuda.device_count()
    world_size = args.nprocs or gpus or 2
    if 0 < gpus < world_size:
        stop(f"{world_size} processes want a GPU each and there are {gpus}: use --nprocs {gpus},"
             " or the CPU with CUDA_VISIBLE_DEVICES= in front")
    images = len(load_data(args.data_dir)[0])  # a damaged set ends the run here, in one line
    if not world_size <= args.batch_size <= images:
        stop(f"--batch-size {args.batch_size} is impossible: give a number from {world_size}"
             f" (an image for each rank) to {images} (the training set)")
    check_path(args.checkpoint_path)
    claim(args.checkpoint_path)
    # Port 0: the system picks a free one. A fixed port meets the next job on this machine; a free
    # one that was looked up beforehand may be taken when it is needed. A listening socket of our
    # own, as the store's would listen on all addresses of the machine, whatever host it is given.
    listener = socket.create_server(("127.0.0.1", 0))
    store = dist.TCPStore("127.0.0.1", listener.getsockname()[1], is_master=True,
                          wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        # Every child imports this file anew, hence the "if __name__" at its end. When one fails,
        # spawn ends the others and raises here, with the child's traceback.
        mp.spawn(worker, args=(world_size, store.port, args), nprocs=world_size)
    except mp.ProcessExitedException as error:  # no traceback: it was killed, or has said why
        if error.signal_name is None:
            sys.exit(error.exit_code)
        stop(f"{error}, the others were ended (SIGKILL: out of memory?)", status=1)
    except KeyboardInterrupt:  # Ctrl-C reaches the children as well, a signal to this process not
        for child in mp.active_children():
            child.terminate()
        stop("interrupted", status=130)


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
    parser.add_argument("--nprocs", type=number, help="default: one a GPU, or 2 on a CPU")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--checkpoint-path", default="checkpoint.pt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
