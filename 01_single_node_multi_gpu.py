"""Train one model with several processes on one machine: mp.spawn and DistributedDataParallel.

    python 01_single_node_multi_gpu.py          # one process per GPU; on a CPU: 2
    python 01_single_node_multi_gpu.py 50 10    # 50 epochs, saved after every 10

The parts are those of docs/many_processes.py. Each process, a rank, has a copy of the model, its
replica. A call that all ranks must make, such as all_reduce, is a collective. Never put one under
an "if" that only some ranks enter: they would wait for the others without an error. You see that
DDP puts the gradient of the whole batch on each rank, and that all replicas end up equal:

    [rank 0/2] epoch  1/5 | loss 1.3184 | accuracy 0.9194 |  18592 images/s | saved in checkpoint.pt
    ...
    [rank 0/2] gradient of a rank on its own images: differs from the whole batch's by 9.8e-01
    [rank 0/2] gradient that DDP leaves on each rank: differs from the whole batch's by 1.8e-06
    [rank 0/2] 2 replicas are identical, sha256 d9b99a4f6aed

Below the divider: join (parts 1 and 2), log (prints), gathered (lists all ranks' values), the data.
To try your own model, change what is marked "your"; for a job: template/. Next: exercises/ 1 to 3.
"""

import argparse
import contextlib
import copy
import gc
import hashlib
import os
import socket
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; without it, torch 2.11 to 2.15 may abort at the end
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

SEED = 0


def main():
    args = parse_args()
    # Each process is a new Python. It imports this file (so main() stands under "if __name__"), and
    # calls worker(rank, ...). The processes leave their addresses in a file, to find each other.
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.nprocs, f"file://{folder}/meet", args), nprocs=args.nprocs)


def worker(rank, world_size, meeting_point, args):
    # Part 1: start (in join, below the divider). Each process takes a GPU of its own.
    # Part 2: meet. join gives the named arguments to init_process_group. There each process waits
    # for all others. Then they are connected.
    device = join(rank, init_method=meeting_point, rank=rank, world_size=world_size)
    train(device, args)  # parts 3, 4 and 5
    # Part 6: leave. Free DDP, which still holds the connections. Then close them.
    gc.collect()
    dist.destroy_process_group()


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Part 3: share the data equally: of the shuffled order, rank r takes places r, r + N, ...
    train_set, test_set, source = load_data(args.data_dir)  # your data: two Datasets, a name
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    share = min(args.batch_size, len(train_set)) // world_size
    loader = fast_loader(train_set, sampler, share, drop_last=True)  # your loader: full batches
    log(f"{len(train_set)} + {len(test_set)} {source}; batch {world_size} ranks x {share} images")

    # Part 4: build the model, and wrap it. DDP copies rank 0's weights to all. backward() now
    # averages all processes' gradients, bucket by bucket. So the replicas stay equal.
    torch.manual_seed(SEED)
    model = Net().to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)  # your optimizer
    model = DDP(model, gradient_as_bucket_view=True)  # saves memory

    # Part 5: train. The models stay equal, so one process, rank 0, prints and saves.
    for epoch in range(1, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(SEED + epoch * world_size + rank)  # dropout, augmentation vary by rank
        loss, speed = train_epoch(model, loader, optimizer, device)
        accuracy = evaluate(model, test_set, device)
        check_replicas(model)  # a collective, so outside the "if" below
        due = epoch % args.save_every == 0 or epoch == args.total_epochs
        if due and rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, args.checkpoint_path)
        log(
            f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f} |"
            f" {speed:6.0f} images/s" + (f" | saved in {args.checkpoint_path}" if due else "")
        )
    # The proofs. evaluate() has set eval mode. If your model then skips layers, drop the next line.
    compare_gradients(model, loader, device)
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


def compare_gradients(model, loader, device):
    """Print how far, relatively, a rank's own gradient, and DDP's, are from the whole batch's."""

    def gradient(net, images, labels):
        net.zero_grad()
        cross_entropy(net(images.to(device)), labels.to(device)).backward()
        return torch.cat([weights.grad.flatten() for weights in net.parameters()])

    images, labels = next(iter(loader))
    alone = copy.deepcopy(model.module)  # without DDP: waits for nobody
    whole = gradient(alone, torch.cat(gathered(images)), torch.cat(gathered(labels)))
    own, ddp = gradient(alone, images, labels), gradient(model, images, labels)
    errors = torch.stack([(own - whole).abs().max(), (ddp - whole).abs().max()]) / whole.abs().max()
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)  # the largest of all ranks
    log(f"gradient of a rank on its own images: differs from the whole batch's by {errors[0]:.1e}")
    log(f"gradient that DDP leaves on each rank: differs from the whole batch's by {errors[1]:.1e}")
    if not errors[1] < 1e-3:
        raise RuntimeError("DDP's gradient is not that of the whole batch")


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
    parser.add_argument("--checkpoint-path", default="checkpoint.pt")
    gpus = 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()
    parser.add_argument("--nprocs", type=int, default=gpus or 2, help="one per GPU; 2 on a CPU")
    args = parser.parse_args()
    path, folder = args.checkpoint_path, os.path.dirname(args.checkpoint_path) or "."
    if not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.path.isfile(path)):
        parser.error(f"cannot write into the folder of {path}, or {path} is not a file")
    if min(args.total_epochs, args.save_every, args.nprocs) < 1 or args.batch_size < args.nprocs:
        parser.error("TOTAL_EPOCHS, SAVE_EVERY, --nprocs, images of each rank: must be 1 or more")
    return args


if __name__ == "__main__":
    main()
