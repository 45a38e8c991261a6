"""Train one model with several processes on one machine: mp.spawn and DistributedDataParallel.

    python 01_single_node_multi_gpu.py           # CPU: 2 processes, 5 epochs
    python 01_single_node_multi_gpu.py 50 10     # GPUs: one process each, 50 epochs, saved every 10

New here, if you have trained on one GPU:
- rank: the number of a process, from 0 up. World size: how many processes there are.
- process group: the processes that exchange tensors, through a backend: NCCL on GPUs, Gloo on CPUs.
- all-reduce: every rank gives a tensor, and gets the sum (or the mean) of all of them. Such a
  call, which all ranks must make, is a collective.
You see that DistributedDataParallel (DDP) leaves on every rank the gradient that one process would
compute on the whole batch, and that all replicas (each rank's copy of the model) end up equal:

    [rank 0/2] 8192 + 2048 generated images (download_mnist.py fetches MNIST); batch 2 ranks x 32
    [rank 0/2] gradient of a rank on its own images: differs from the whole batch's by 8.8e-01
    [rank 0/2] gradient that DDP leaves on each rank: differs from the whole batch's by 3.2e-07
    [rank 0/2] epoch  1/5 | loss 1.3184 | accuracy 0.9194 |  18592 images/s | saved in checkpoint.pt
    ...
    [rank 0/2] 2 replicas are identical, sha256 11d74c37bfba

One GPU only? To see two processes, on the CPU, put CUDA_VISIBLE_DEVICES= before python. To try a
model of your own, change what is marked "your"; for a real job, begin in template/. The code has
six steps, in worker and train. Next: 02_torchrun_elastic.py survives a crash.
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
import torch.distributed.nn  # unused, but keep it: else the group cannot be closed
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

SEED = 0


def main():
    args = parse_args()
    # mp.spawn starts the processes. Each imports this file anew (so "if __name__" stands below),
    # and calls worker(rank, ...). When one fails, mp.spawn ends the others and raises here.
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.nprocs, f"file://{folder}/meet", args), nprocs=args.nprocs)


def worker(rank, world_size, meeting_point, args):
    # Step 1: start. Every process takes its device: rank 0 takes GPU 0, and so on.
    device, backend = pick_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback only

    # Step 2: meet. Every process leaves its address at the meeting point (here a file), and waits
    # until all others have done so. Then they are connected: they are a process group.
    dist.init_process_group(
        backend, meeting_point, rank=rank, world_size=world_size,
        device_id=device if device.type != "cpu" else None)  # ties the group to my GPU

    train(device, args)  # steps 3, 4 and 5

    # Step 6: leave. While DDP is in memory, it keeps threads of the group; the exit could crash.
    # As train has returned, gc.collect() frees it. Then close the connections.
    gc.collect()
    dist.destroy_process_group()


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Step 3: share the data. Rank r gets the items r, r + world_size, ... of one shuffled list.
    # drop_last: the sampler leaves out items that would come twice, the loader a smaller batch.
    train_set, test_set, source = load_data(args.data_dir)  # your data: two Datasets, a name
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    share = min(args.batch_size, len(train_set)) // world_size  # batch_size is for all ranks
    loader = fast_loader(train_set, sampler, share, drop_last=True)  # your loader: see there
    log(f"{len(train_set)} + {len(test_set)} {source}; batch {world_size} ranks x {share} images")

    # Step 4: build the model, and wrap it. DDP copies rank 0's weights to all ranks. Then, inside
    # loss.backward(), it collects the gradients in buckets of some MB. As soon as a bucket is full,
    # DDP replaces it by its mean over all ranks, while backward goes on with earlier layers. With
    # equal shares, that is the gradient of the whole batch (BatchNorm apart). All ranks take the
    # same step from the same weights: the replicas stay equal.
    torch.manual_seed(SEED)
    model = Net().to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)  # your optimizer
    model = DDP(model, gradient_as_bucket_view=True)  # no second copy of the gradients
    compare_gradients(model, *(part.to(device) for part in next(iter(loader))))

    # Step 5: train. Every step averages the gradients; rank 0 reports and saves.
    for epoch in range(1, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # without this line, every epoch repeats the first one's order
        torch.manual_seed(SEED + epoch * world_size + rank)  # dropout, augmentation vary by rank
        loss, speed = train_epoch(model, loader, optimizer, device)
        accuracy = evaluate(model, test_set, device)

        # The replicas are equal, so one rank saves (02 does it safely against a kill). No
        # collective may stand under an "if" that only some ranks enter: they would wait in vain.
        check_replicas(model)
        saved = epoch % args.save_every == 0 or epoch == args.total_epochs
        if saved and rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, args.checkpoint_path)
        log(f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f} |"
            f" {speed:6.0f} images/s" + f" | saved in {args.checkpoint_path}" * saved)

    log(f"{world_size} replicas are identical, sha256 {check_replicas(model)}")


def train_epoch(model, loader, optimizer, device):
    """Train on this rank's batches; return (mean loss, images per second) over all ranks."""
    model.train()
    start = time.perf_counter()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of the losses, images
    for images, labels in tqdm(loader, leave=False, disable=True if dist.get_rank() else None):
        images, labels = images.to(device), labels.to(device)
        loss = cross_entropy(model(images), labels)  # your loss: a mean over the examples
        optimizer.zero_grad()
        loss.backward()  # the ranks meet here: DDP replaces the gradients by their mean
        optimizer.step()  # so every rank takes the same step
        total[0] += loss.detach() * len(labels)  # loss.item() would make the CPU wait for the GPU
        total[1] += len(labels)
    dist.all_reduce(total)  # in place: the sums over all ranks
    loss_sum, count = total.tolist()
    return loss_sum / count, count / (time.perf_counter() - start)


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the accuracy on the test set. Each image counts once over all ranks."""
    # The shares may differ by an image, so a rank may have a batch more than others. In that
    # one, DDP's forward could wait for all ranks, to copy buffers: use model.module, without DDP.
    share = range(dist.get_rank(), len(test_set), dist.get_world_size())
    for buffer in model.module.buffers():  # BatchNorm's differ by rank: rank 0's will be saved
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in fast_loader(test_set, share, 1000, drop_last=False):
        answers = model.module(images.to(device)).argmax(dim=1)  # your metric
        correct += (answers == labels.to(device)).sum()
    dist.all_reduce(correct)  # shares may differ: add up first, then divide
    return correct.item() / len(test_set)


def check_replicas(model):
    """Return the sha256 of the weights. Raise RuntimeError unless all ranks have the same."""
    sha256 = hashlib.sha256()
    for weights in model.parameters():
        sha256.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    digests = gathered(sha256.hexdigest()[:12])
    if len(set(digests)) > 1:
        raise RuntimeError(f"the replicas differ: {digests}")
    return digests[0]


# For the lesson only. With a model of your own, delete this and its call: dropout fails it.
def compare_gradients(model, images, labels):
    """Compare DDP's gradient with the one that a single process computes on the whole batch."""
    def gradient(net, images, labels):
        net.zero_grad()
        cross_entropy(net(images), labels).backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    alone = copy.deepcopy(model.module)  # the same weights without DDP: nothing is averaged here
    whole = (torch.cat(gathered(part.cpu())).to(part.device) for part in (images, labels))
    expected = gradient(alone, *whole)
    for what, found in (("of a rank on its own images", gradient(alone, images, labels)),
                        ("that DDP leaves on each rank", gradient(model, images, labels))):
        error = (found - expected).abs().max() / expected.abs().max()  # relative to the largest
        dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the largest on any rank
        log(f"gradient {what}: differs from the whole batch's by {error:.1e}")
    if not error < 1e-3:  # DDP's, the last; rounding, even TF32's, stays below
        raise RuntimeError("DDP's gradient is not that of the whole batch")


# ---- The lesson ends here. Below: the model, the data, and what each script needs. ----


class Net(nn.Module):
    """Your model. This is a small CNN: images, uint8 (N, 28, 28), to logits, float32 (N, 10)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.GELU(), nn.Conv2d(16, 32, 5, stride=2), nn.GELU(),
            nn.Flatten(), nn.Linear(512, 10))

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
    # Single items: return DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last,
    #                                 num_workers=2, multiprocessing_context="fork")
    lists = BatchSampler(sampler, batch_size, drop_last)  # the indices of each batch
    return DataLoader(dataset, batch_size=None, sampler=lists)


def pick_device(local_rank):
    """Return (device, backend): GPU number local_rank with its backend, or the CPU with Gloo."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(gpu or "cpu")
    if backend != "gloo":
        if local_rank >= torch.accelerator.device_count():
            raise SystemExit("each process needs a GPU: start fewer, or set CUDA_VISIBLE_DEVICES=")
        torch.accelerator.set_device_index(local_rank)  # else every process takes some of GPU 0
        return torch.device(gpu.type, local_rank), backend
    # The CPU, also on a Mac: Gloo cannot send tensors of its GPU. One thread for each process:
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # often faster
    return torch.device("cpu"), "gloo"


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
    if not os.access(os.path.join(os.path.dirname(args.checkpoint_path), "."), os.W_OK):
        parser.error(f"cannot write into the folder of {args.checkpoint_path}")
    share = args.batch_size // max(args.nprocs, 1)
    if min(args.total_epochs, args.save_every, share, args.nprocs) < 1:
        parser.error("TOTAL_EPOCHS, SAVE_EVERY, --nprocs, images of each rank: must be 1 or more")
    return args


if __name__ == "__main__":
    main()
