"""Train one model with several processes on one machine: mp.spawn and DistributedDataParallel.

    python 01_single_node_multi_gpu.py           # CPU: 2 processes, 5 epochs
    python 01_single_node_multi_gpu.py 50 10     # GPUs: one process each, 50 epochs, saved every 10

New here, if you have trained on one GPU:
- rank: the number of a process, from 0 up. World size: how many processes there are.
- replica: a rank's copy of the model.
- process group: the processes that exchange tensors, through a backend: NCCL on GPUs, Gloo on CPUs.
- collective: a call that every rank of the group must make. All-reduce: all ranks get the sum (or
  the mean) of everybody's tensors.
You see that DistributedDataParallel (DDP) gives every rank the gradient that a single process would
compute on the whole batch, and that all replicas end up equal:

    [rank 1/2] pid 4243, cpu, gloo
    [rank 0/2] pid 4242, cpu, gloo
    [rank 0/2] data: 8192 + 2048 generated images (download_mnist.py fetches MNIST)
    [rank 0/2] batch size 64: 2 ranks x 32 images
    [rank 0/2] first batch: largest difference to the gradient of one process on the whole batch
    [rank 0/2]   gradient of a rank on its own images: 8.8e-01 of the largest entry
    [rank 0/2]   gradient that DDP leaves on each rank: 3.2e-07
    [rank 0/2] epoch  1/5 | loss 1.3184 | accuracy 0.9194 |  18592 images/s | saved in checkpoint.pt
    ...
    [rank 0/2] 2 replicas are identical, sha256 11d74c37bfba

With one GPU, this is a job of one process. To see two, on the CPU, put CUDA_VISIBLE_DEVICES= before
python. For your own training, change what is marked "your": the data (load_data: a Dataset with
len() and [], of pairs: a tensor, and a tensor or a number), the loader (batches_of), the model, the
loss, the optimizer, the metric (evaluate). If your items are no pairs, change train_epoch and
evaluate, which take a batch apart, and delete check_items and check_gradients with their calls. For
a stream (IterableDataset): recipes/stream.py.
Next: 02_torchrun_elastic.py, which survives a crash. It has the same marks: for a job that lasts
long, start from there.
"""

import argparse
import contextlib
import copy
import gc
import hashlib
import os
import random
import socket
import sys
import tempfile
import time
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # keep this: imported later, by DDP, it would keep the group open
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

SEED = 0
TIMEOUT = timedelta(minutes=10)  # how long ranks wait for each other: also while rank 0 saves


def main():
    args = parse_args()
    # mp.spawn starts the processes, and each calls worker(rank, ...). To do so, each imports this
    # file anew: without the "if __name__" at its end, they would start processes, too. When one
    # fails, mp.spawn ends the others and raises here. They will meet through a file in folder.
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(worker, args=(args.nprocs, f"file://{folder}/meet", args), nprocs=args.nprocs)
        except (mp.ProcessExitedException, KeyboardInterrupt) as error:  # killed, or Ctrl-C
            end_in_one_line(error)


def worker(rank, world_size, meeting_point, args):
    # Step 1: start. Every process learns who it is, and takes its device. mp.spawn passes the rank
    # as first argument. Rank 0 takes GPU 0, and so on. Without GPUs, all share the CPU.
    device, backend = pick_device(rank)
    share_cores(world_size)  # otherwise the processes compete for the cores
    listen_locally()  # nobody else has to reach these processes

    # Step 2: meet. Every process leaves its network address at the meeting point, and waits until
    # all others have done so. Then they are connected: they are a process group. TIMEOUT limits
    # every later collective: when one rank stops, the others fail, and do not wait for ever.
    dist.init_process_group(
        backend, init_method=meeting_point, rank=rank, world_size=world_size, timeout=TIMEOUT,
        device_id=device if device.type != "cpu" else None)  # GPUs only: which is mine

    train(device, args)  # steps 3, 4 and 5

    # Step 6: leave. train has returned, so gc.collect() can free the DDP model. Otherwise, DDP's
    # threads may still run when Python exits, and abort one finished job in ten ("terminate called
    # without an active exception"). Do not put these two lines into a "finally": after an error on
    # one rank, NCCL would hang there.
    gc.collect()
    dist.destroy_process_group()


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log(f"pid {os.getpid()}, {device}, {dist.get_backend()}", every_rank=True)

    # Step 3: share the data. Every rank opens the whole set. (To download it first, see
    # pitfalls/download_by_all.py.) DistributedSampler then picks this rank's part: rank r gets the
    # items r, r + world_size, ... of one shuffled list. All ranks need the same number of batches:
    # a rank with one more would wait for the others, and fail after TIMEOUT. So the sampler's
    # drop_last leaves out what cannot be shared. (By default it repeats items. A sampler of your
    # own, with weights, say: draw one list with the seed SEED + epoch on all ranks. Cut its length
    # to a multiple of world_size. A rank takes list[rank::world_size].)
    seed_all(SEED)  # if yours are split at random: all ranks, and all restarts, need the same sets
    train_set, test_set, source = load_data(args.data_dir)  # your data: any map-style Dataset
    check_items(train_set, test_set)  # stops unless a batch is two tensors
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)

    # --batch-size counts the images of one step on all ranks together. So one learning rate works
    # for any number of ranks. If that number does not divide the batch, the step uses fewer images:
    # 63 of 64 on 3 ranks. To use exactly 64, see pitfalls/mean_of_unequal_shards.py. BatchSampler
    # makes lists of this rank's indices, and replaces DataLoader's batch_size and shuffle. Its
    # drop_last leaves out a last list that is shorter, as on one GPU.
    share = args.batch_size // world_size
    if not 1 <= share <= len(sampler):
        stop(f"--batch-size must be from {world_size} (an image for each rank) to {len(train_set)}")
    loader = batches_of(train_set, BatchSampler(sampler, share, drop_last=True))
    log(f"data: {len(train_set)} + {len(test_set)} {source}")
    batch = f"{world_size} ranks x {share} images"
    log(f"batch size {share * world_size}: {batch}")

    # Step 4: build the model, and wrap it.
    seed_all(SEED)  # every run starts from the same weights
    model = Net().to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)  # your optimizer
    # (Your schedule: make it here. Step it as on one GPU: after optimizer.step(), or each epoch.)

    # DDP copies rank 0's weights to all ranks, so that all replicas start equal. After that, it
    # works inside loss.backward(). It collects gradients in buckets of some MB. As soon as a bucket
    # is full, DDP all-reduces it, while backward goes on with earlier layers. (This model is small:
    # it has one bucket, and nothing overlaps.) Every rank gets the mean of all ranks' gradients. As
    # the shares are equal, that is the gradient of the whole batch. (With BatchNorm, only nearly.
    # If a rank has few images, see pitfalls/small_batch_norm.py.) So all take the same step from
    # the same weights, and the replicas stay equal. Before DDP, move the model to its device, where
    # DDP makes its buckets, and freeze what you freeze. (If a step leaves weights unused, see
    # pitfalls/unused_parameters.py.)
    # gradient_as_bucket_view: the gradients live in the buckets, not beside them.
    model = DDP(model, gradient_as_bucket_view=True)
    # For the lesson only: leave this check out of a script of your own. (It alone needs memory for
    # the whole batch on each device.)
    check_gradients(model, *next(iter(loader)), device)

    # Step 5: train. Every step averages the gradients; rank 0 reports and saves.
    for epoch in range(1, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # without this line, every epoch repeats the order of the first
        # Dropout, or a Dataset that augments, must draw other numbers in each epoch, on each rank.
        # (With SEED + epoch + rank, rank 0 would repeat in epoch 2 what rank 1 drew in epoch 1.)
        seed_all(SEED + epoch * world_size + rank)
        loss, speed = train_epoch(model, loader, optimizer, device)
        accuracy = evaluate(model, test_set, device)  # each rank its share, then the sum

        # The replicas are equal, so one rank saves; all would write into one file at the same time.
        # save writes a new file, then moves it over the old one: a crash while writing leaves the
        # old one intact. Never put a collective under this "if", as rank 0 would wait for the
        # others: no evaluate(), gathered() or dist.all_reduce(), no call of the DDP model. Save
        # model.module, your model: in the wrapper's state, all names begin with "module.".
        saved = epoch % args.save_every == 0 or epoch == args.total_epochs
        if saved and rank == 0:
            save({"model": model.module.state_dict(), "epoch": epoch}, args.checkpoint_path)
        note = f" | saved in {args.checkpoint_path}" if saved else ""
        log(f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f}"
            f" | {speed:6.0f} images/s{note}")

    check_replicas(model.module)  # to keep: it would notice if the ranks had come apart


def train_epoch(model, batches, optimizer, device):
    """Train on this rank's batches; return (mean loss, images per second) over all ranks."""
    start, images_seen = time.perf_counter(), 0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    # A progress bar on rank 0. None tells tqdm to hide it unless the output is a terminal.
    hidden = True if dist.get_rank() > 0 else None
    for images, labels in tqdm(batches, leave=False, disable=hidden):
        # non_blocking: if batches_of sets pin_memory=True, the GPU works while it gets the batch.
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = batch_loss(model, images, labels)
        loss.backward()  # the ranks meet here: DDP averages the gradients
        # All ranks now have the same gradients. So what follows is as on one GPU: clip them, say.
        # (Several backward passes in a step: recipes/accumulate.py. Mixed precision: autocast in
        # batch_loss, and recipes/clip_and_scale.py.)
        optimizer.step()  # no exchange here: every rank takes the same step
        loss_sum += loss.detach() * len(labels)  # loss.item() would make the CPU wait for the GPU
        images_seen += len(labels)
    dist.all_reduce(loss_sum)  # in place: loss_sum is now the sum over all ranks
    images_seen *= dist.get_world_size()
    loss = (loss_sum / images_seen).item()  # waits for the GPU: count finished work
    return loss, images_seen / (time.perf_counter() - start)


def check_replicas(module):
    """Raise RuntimeError unless every rank holds the same weights and buffers, bit for bit."""
    sha256 = hashlib.sha256()
    for tensor in filter(torch.is_tensor, module.state_dict().values()):
        sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())  # its bytes, of any type
    digest = sha256.hexdigest()[:12]
    digests = gathered(digest)
    if set(digests) != {digest}:
        raise RuntimeError(f"the replicas differ: sha256 {', '.join(digests)}")
    same = f"{len(digests)} replicas are identical" if len(digests) > 1 else "one replica"
    log(f"{same}, sha256 {digest}")


# ---- What any training script needs: the evaluation, saving, the model, the data ----


def seed_all(seed):
    """Seed all that your model and your data may draw random numbers from."""
    # (A generator of your Dataset's own does not follow. Make it anew in each __getitem__:
    # seed = torch.randint(2**62, ()).item(), and then, say, numpy.random.default_rng(seed).)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # for GPUs, too; and the workers of a DataLoader start from it


@torch.no_grad()
def evaluate(model, test_set, device):
    """Return the accuracy on the test set. Every image counts once over all ranks."""
    # DistributedSampler would repeat images to give every rank equally many. Here, the shares may
    # differ by one image, and one rank may have a batch more: it must not wait for the others in
    # the loop. DDP's forward can exchange tensors, so call model.module, the model without DDP.
    share = range(dist.get_rank(), len(test_set), dist.get_world_size())
    # In training, DDP's forward begins with rank 0's buffers (BatchNorm's running mean, say) on all
    # ranks. But after the last step, they differ. Keep this loop in your own evaluation, so that
    # all ranks evaluate with the buffers that rank 0 saves. (The model below has none.)
    for buffer in model.module.buffers():
        dist.broadcast(buffer, src=0)
    modes = [(part, part.training) for part in model.modules()]  # a frozen part may be in eval mode
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    # Your metric: add up on each rank, then over the ranks, then divide by the number of all. (A
    # mean of the ranks' means is wrong when their shares differ. For F1 or an AUC, add up or gather
    # what it is computed from: recipes/metrics.py.)
    batches = BatchSampler(share, 1000, drop_last=False)  # your batch size to evaluate, per rank
    for images, labels in batches_of(test_set, batches):
        answers = model.module(images.to(device)).argmax(dim=1)  # your metric
        correct += (answers == labels.to(device)).sum()
    for part, mode in modes:
        part.training = mode
    dist.all_reduce(correct)
    return correct.item() / len(test_set)


def save(state, path):
    """Write state to path. If the process dies meanwhile, path still holds the old file, whole."""
    temporary = f"{path}.tmp"  # in the same folder: a move to another disk would be a slow copy
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave an empty file at path
        try:  # What cannot be loaded must not replace what can. mmap: this reads few bytes.
            torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
            stop(f"{path} stays as it was, since {temporary} could not be loaded: save tensors and"
                 f" plain types, no numbers of NumPy's ({reason.partition('. ')[0]})", status=1)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        if os.path.exists(temporary):
            os.remove(temporary)
        stop(f"cannot write {path}, which stays as it was; is the disk full? ({error})", status=1)


def batch_loss(model, images, labels):
    """Your loss. Return its mean over the images: DDP takes the mean over the ranks."""
    # Call model(...), not model.module or another method: DDP averages what its forward has seen.
    # (A mean with class weights divides by a sum of weights, which differs by rank, and a mean over
    # words by their number. Divide by the ranks' mean of that instead:
    # losses = cross_entropy(model(images), labels, reduction="none")  # without weight=
    # weights = class_weights[labels]  # for words: 1.0 for each, 0.0 for padding
    # total = weights.sum(); dist.all_reduce(total)
    # return (losses * weights).sum() * dist.get_world_size() / total)
    return cross_entropy(model(images), labels)  # your loss


class Net(nn.Module):
    """Your model. This is a small CNN: images, uint8 (N, 28, 28), to logits, float32 (N, 10)."""

    def __init__(self):
        super().__init__()
        # Yours may have ReLU and max-pooling. This has none, as tests compare runs on 1, 2 and 4
        # ranks: these differ by rounding errors, which can switch a gradient of a ReLU on or off.
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.GELU(), nn.Conv2d(16, 32, 5, stride=2), nn.GELU(),
            nn.Flatten(), nn.Linear(512, 10))

    def forward(self, images):
        return self.layers(images.unsqueeze(1).float() / 255)  # for bytes, from 0 to 255


def load_data(folder):
    """Your data. Return (training set, test set, their name): MNIST, or generated images."""
    # All ranks need the same items in the same order. (ImageFolder sorts. Sort what you list
    # yourself, from a folder or a set().)
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
    """Return two images with their labels. Stop if the sets do not give such pairs."""
    for name, dataset in ("test", test_set), ("training", train_set):
        if len(dataset) == 0:
            stop(f"the {name} set is empty", status=1)
        # Through the loader, not as dataset[0]: that could open a file (HDF5) in this process, and
        # the loader's workers would then share it. (Open yours in the first call of __getitem__.)
        try:
            batch = next(iter(batches_of(dataset, [[0, len(dataset) - 1]])))
            parts = batch if isinstance(batch, tuple | list) else []
            why = f"a batch is {[type(part).__name__ for part in parts] or type(batch).__name__}"
        except Exception as error:
            if "collate" not in str(error):  # an error in your Dataset
                raise
            parts, why = [], str(error).strip().rpartition("\n")[2]
            why = "they differ in size" if "resize" in why else why
        if [*map(torch.is_tensor, parts)] != [True, True]:
            stop(f"the items of the {name} set must be pairs of tensors of one size, or of a tensor"
                 f" and a number: {why}. Has it a transform that makes tensors?", status=1)
    return batch


def batches_of(dataset, lists):
    """Return a DataLoader that yields a batch, (images, labels), for each list of indices."""
    if isinstance(dataset, TensorDataset):  # it can read a whole list at once: dataset[indices]
        return DataLoader(dataset, batch_size=None, sampler=lists)
    # Any other Dataset is read item by item, by two more processes for each rank (workers), which
    # take the batches in turn. What they draw at random, to augment images, follows from seed_all.
    # Your settings of the loader belong here (pin_memory=True for GPUs), but for shuffling and
    # batch size (these are in lists) and persistent_workers (which seed_all would not reach).
    return DataLoader(dataset, batch_sampler=lists, num_workers=2)


# ---- The check of the gradients: it is for the lesson only ----


@torch.backends.cudnn.flags(enabled=False)  # its TF32 is too coarse to compare
def check_gradients(model, images, labels, device):
    """Raise RuntimeError unless DDP leaves the gradient that one process computes on all images.

    model: the DDP wrapper; images (n, 28, 28), labels (n,): this rank's share of a batch, on the
    CPU. Tolerance: 1e-5 of the gradient's largest entry. In float32, rounding stays below that.
    """
    def gradient(net, images, labels):
        net.zero_grad()
        batch_loss(net, images.to(device), labels.to(device)).backward()
        grads = [p.grad for p in net.parameters() if p.requires_grad]
        return None if any(g is None for g in grads) else torch.cat([g.flatten() for g in grads])

    # As in evaluation: no dropout, and BatchNorm by its running mean. In training, BatchNorm
    # normalises by a rank's own images, and the gradient differs: pitfalls/small_batch_norm.py.
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    alone = copy.deepcopy(model.module)  # the same weights without DDP: nothing is averaged here
    kinds = set()  # of its output
    alone.register_forward_hook(lambda _, inputs, output: kinds.add(getattr(output, "dtype", None)))
    # gathered is a collective: it returns what all ranks have given.
    expected = gradient(alone, torch.cat(gathered(images)), torch.cat(gathered(labels)))
    if expected is not None:
        own, averaged = gradient(alone, images, labels), gradient(model, images, labels)
        model.zero_grad()
    for part, mode in modes:
        part.training = mode
    if expected is None or kinds & {torch.float16, torch.bfloat16}:
        log("first batch: gradients not compared, as evaluation does not use all of the weights,"
            " or computes in lower precision")
        return
    off = torch.stack([own - expected, averaged - expected]).abs().amax(dim=1)
    off = (off / expected.abs().max()).nan_to_num(nan=torch.inf)  # a maximum can lose a nan
    dist.all_reduce(off, op=dist.ReduceOp.MAX)  # the largest difference on any rank
    log("first batch: largest difference to the gradient of one process on the whole batch")
    log(f"  gradient of a rank on its own images: {off[0]:.1e} of the largest entry")
    log(f"  gradient that DDP leaves on each rank: {off[1]:.1e}")
    if off[1] >= 1e-5:
        raise RuntimeError(f"DDP's gradient is off by {off[1]:.1e}")


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


def share_cores(local_world_size):
    """Divide this machine's cores among its processes."""
    # By default each process uses all cores (or, under torchrun, only one).
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world_size))
    # Linux: run as a batch job. Otherwise Gloo's threads preempt each other.
    if not count_gpus():
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a container forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def listen_locally():
    """Let Gloo listen on this machine only: by default, anyone on its network can connect."""
    # Interface 1 is the loopback interface: lo on Linux, lo0 on a Mac.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))


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


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Rank 0 says it, and its end ends the others.
    if dist.is_initialized() and dist.get_rank() > 0:
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def end_in_one_line(error):
    """End the parent process after an interrupt, or after a child that died without a traceback."""
    for child in mp.active_children():
        child.terminate()
    if isinstance(error, KeyboardInterrupt):
        stop("interrupted", status=130)
    if error.signal_name is None:
        sys.exit(error.exit_code)  # the child has called stop: the line is on the screen already
    stop(f"{error}; out of memory? The other processes were ended", status=1)


def parse_args():
    """Return the arguments; stop if they, or the way of starting, cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("total_epochs", type=int, nargs="?", default=5, help="5 by default")
    parser.add_argument("save_every", type=int, nargs="?", default=1, help="1 by default")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, all ranks")
    parser.add_argument("--nprocs", type=int, default=gpus or 2, help="one per GPU, or 2 on a CPU")
    parser.add_argument("--data-dir", default="data", help="the folder of MNIST")
    parser.add_argument("--checkpoint-path", default="checkpoint.pt")
    args = parser.parse_args()
    if min(args.total_epochs, args.save_every, args.nprocs) < 1:
        stop("TOTAL_EPOCHS, SAVE_EVERY and --nprocs must be 1 or more")
    if 0 < gpus < args.nprocs:
        stop(f"{args.nprocs} processes need a GPU each, and there are {gpus}: use --nprocs {gpus},"
             " or the CPU with CUDA_VISIBLE_DEVICES= in front")
    if "LOCAL_RANK" in os.environ:
        stop("this script starts its processes itself: run it with python, not with torchrun")
    return args


if __name__ == "__main__":
    main()
