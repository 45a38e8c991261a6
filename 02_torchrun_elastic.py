"""Survive a crash: torchrun starts the processes, and starts them again after one has died.

    torchrun --standalone --nproc-per-node=2 02_torchrun_elastic.py 5 1        # CPU, 2 processes
    torchrun --standalone --nproc-per-node=gpu 02_torchrun_elastic.py 50 10    # one per GPU

--standalone: on one machine, with any free port. 5 1: five epochs, and a snapshot after each. The
processes, called ranks, share a batch of 64 images in each step. (With many GPUs, --batch-size 4096
gives each enough to do. Then choose another learning rate, too: see
pitfalls/learning_rate_and_world_size.py. Exactly one GPU? Put CUDA_VISIBLE_DEVICES= before
torchrun, and two processes run on the CPU.)

Now the crash. Delete snapshot.pt, and let one rank kill itself in epoch 3. torchrun ends the others
and starts all again, at most --max-restarts times (by default, never):

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
        02_torchrun_elastic.py 6 1 --crash-epoch 3

    [rank 0/2] epoch  2/6 | loss 0.2023 | accuracy 0.9570 |  16648 images/s | saved in snapshot.pt
    [rank 1/2] crash on purpose: SIGKILL in the middle of the epoch
    [rank 0/2] attempt 1: resumed from snapshot.pt at epoch 3
    ...
    [rank 0/2] 2 replicas are identical, sha256 04064526e58c

Delete snapshot.pt again, and leave out --crash-epoch 3: the sha256 is the same (on a CPU, with the
same number of ranks and cores; on GPUs, weights may differ by rounding). A crash costs what was
done since the last snapshot. If your epochs are long, take template/one_machine.py for your own
job. For a new experiment, delete snapshot.pt: it also holds the old learning rate.
New here: what torchrun tells a process (main), a snapshot to go on from (train, resume), the same
result to the last bit (settle_buckets). The rest is as in 01_single_node_multi_gpu.py, but for
helpers: look for "New in 02". Next: 04_collectives.py, or 03_multinode.py for several machines.
Now write it yourself: exercises/10_resume.py.
"""

import argparse
import contextlib
import errno
import fcntl
import gc
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import zipfile
from datetime import timedelta

# New in 02: the process id of torchrun, asked before the slow import of torch. Meanwhile, torchrun
# might die: see exit_with_launcher.
LAUNCHER = os.getppid()

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # keep this: imported later, by DDP, it would keep the group open
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

SEED = 0
TIMEOUT = timedelta(minutes=10)  # how long ranks wait for each other: also while rank 0 saves


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
    share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))  # by default, torchrun gives a rank one core
    listen_locally()  # nobody else has to reach these processes

    # Step 2: meet. Every process leaves its network address at the meeting point, and waits until
    # all others have done so. Then they are connected: they are a process group.
    # New in 02: without restarts, dist.init_process_group(backend) is enough. The ranks leave their
    # addresses in a store, a dictionary that torchrun serves. After a restart, the addresses of the
    # dead ranks are still there. So ask for the store (dist.rendezvous; "env://": its place stands
    # in environment variables). Then put a prefix before all keys: the number of the attempt.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    if rank == 0:
        lock(args.snapshot_path)  # two jobs must not write one snapshot
    roll_call(store, rank, world_size)  # if a rank does not come, say which
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT,
        device_id=device if device.type != "cpu" else None)  # GPUs only: which is mine

    train(device, args)  # steps 3, 4 and 5

    # Step 6: leave. First free what train has left: otherwise Python may abort as it exits. Not in
    # a "finally": after an error on one rank, NCCL would hang here.
    gc.collect()
    dist.destroy_process_group()


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # New in 02: attempt counts torchrun's restarts, from 0.
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log(f"attempt {attempt}, pid {os.getpid()}, {device}, {dist.get_backend()}", every_rank=True)

    # Step 3: share the data. Rank r gets the items r, r + world_size, ... of one shuffled list.
    seed_all(SEED)  # if yours are split at random: all ranks, and all restarts, need the same sets
    train_set, test_set, source = load_data(args.data_dir)  # your data: any map-style Dataset
    # New in 02: keep two images with their labels, for a trial pass in step 4. (Your items are no
    # such pairs? Take next(iter(batches_of(test_set, [[0, 1]]))), and change settle_buckets.)
    images, labels = check_items(train_set, test_set)  # the loop needs images and labels
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)

    # What the ranks cannot share equally is not used: pitfalls/mean_of_unequal_shards.py cures it.
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
    # (Your schedule: make it here, before resume. A new one sets the learning rate to its first.)

    # New in 02: go on from the snapshot. All ranks read it: DDP copies rank 0's weights to the
    # others, but not the optimizer's state (momentum).
    snapshot = resume(args.snapshot_path, model, optimizer)
    first_epoch = snapshot["next_epoch"]
    if first_epoch > 1:
        # (Your schedule: schedule.load_state_dict(snapshot["schedule"]).)
        log(f"attempt {attempt}: resumed from {args.snapshot_path} at epoch {first_epoch}")
        warn_of_other_batches(snapshot, batch)
    elif attempt > 0:
        log(f"attempt {attempt}: there is no {args.snapshot_path} yet, so begin with epoch 1")

    # DDP copies rank 0's weights to all replicas (each rank has one). Inside loss.backward(), it
    # then collects gradients in buckets of some MB, and replaces each bucket by its mean over all
    # ranks as soon as it is full. So all ranks take the same step.
    model = DDP(model, gradient_as_bucket_view=True)
    # New in 02: a pass without a step. Without it, a resumed run equals an unbroken one only up to
    # rounding.
    settle_buckets(model, images.to(device), labels.to(device))

    # Step 5: train. Every step averages the gradients; rank 0 reports and saves.
    # New in 02: begin at first_epoch. No random state is in the snapshot: all that is random
    # follows from the seed, the epoch and the rank.
    for epoch in range(first_epoch, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # without this line, every epoch repeats the order of the first
        # Dropout, or a Dataset that augments, must draw other numbers in each epoch, on each rank.
        # (With SEED + epoch + rank, rank 0 would repeat in epoch 2 what rank 1 drew in epoch 1.)
        seed_all(SEED + epoch * world_size + rank)
        # For the lesson only: the crash of --crash-epoch.
        crash = epoch == args.crash_epoch and attempt == 0 and rank == world_size - 1
        batches = crash_halfway(loader) if crash else loader
        loss, speed = train_epoch(model, batches, optimizer, device)
        accuracy = evaluate(model, test_set, device)  # each rank its share, then the sum

        # New in 02: save the optimizer's state, too, and the epoch to go on with. If you have a
        # schedule by epoch, step it above this line. Save whatever changes: the schedule's
        # state_dict(), a GradScaler's, the best accuracy (a float: resume takes plain types only).
        # While rank 0 saves, the others wait in the next epoch. If that takes longer than TIMEOUT,
        # they fail, and fail again after each restart.
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
    check_replicas(model.module)


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
    # DDP regroups its buckets once, after its first backward. A gradient's place in its bucket
    # decides in which order the ranks' values are added. With two ranks, a + b = b + a. With more,
    # (a + b) + c and a + (b + c) may differ in the last bit. So every run regroups before its first
    # step. Otherwise, a resumed run would take one step in another order than an unbroken run.
    buffers = [buffer.clone() for buffer in model.buffers()]
    batch_loss(model, images, labels).backward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)  # this pass must not change a BatchNorm layer
    model.zero_grad()


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
    # New in 02: if the rank is killed, its workers end, too. (If you have a worker_init_fn of your
    # own, call exit_with_rank in it. "fork": from Python 3.14 on, workers are not the rank's own
    # children otherwise. With num_workers=0, leave both out.)
    return DataLoader(dataset, batch_sampler=lists, num_workers=2, worker_init_fn=exit_with_rank,
                      multiprocessing_context="fork")


# ---- Helpers that are no part of the lesson ----


# New in 02: a torchrun that is killed with SIGKILL cannot end its ranks. They would train on.
def exit_with_launcher():
    """End this process when torchrun is gone."""
    def watch():
        while os.getppid() == LAUNCHER:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# New in 02: PyTorch's workers notice the end of their rank, but not if it comes as they start.
def exit_with_rank(worker):
    """What a loader's worker calls first: it ends when its rank is gone."""
    rank = multiprocessing.parent_process().pid

    def watch():
        while os.getppid() == rank:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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


# New in 02: with another number of ranks, training goes on, but the result is another one.
def warn_of_other_batches(snapshot, batch):
    """Print a note if the snapshot was written with another batch, or another number of ranks."""
    if snapshot.get("batch", batch) != batch:
        log(f"note: saved by {snapshot['batch']}: the result may differ from an unbroken run's")


# New in 02: two jobs with one snapshot would go on from each other's epochs.
def lock(path):
    """Stop if path cannot be written, or if another job has it. The lock ends with the process."""
    try:
        file = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT, 0o666)  # never closed
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a loader's workers do not inherit it
    except BlockingIOError:
        stop(f"another job is running with {path}: end it, or choose another path", status=1)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            stop(f"cannot write {path} ({error.strerror}): choose another path")
        print(f"note: {path} is on a disk without locks: start no second job with it\n", end="",
              flush=True)


# New in 02: init_process_group would not say which rank is missing.
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
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("total_epochs", type=int, nargs="?", default=5, help="5 by default")
    parser.add_argument("save_every", type=int, nargs="?", default=1, help="1 by default")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, all ranks")
    parser.add_argument("--data-dir", default="data", help="the folder of MNIST")
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
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")
    return args


if __name__ == "__main__":
    main()
