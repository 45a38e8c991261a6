"""Several machines: the rank says who you are in the job, the local rank which device is yours.

Start the same command on each machine (node). They meet at one of them, here node1:

    torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-id=345 --rdzv-backend=c10d \
        --rdzv-endpoint=node1:29603 template/several_machines.py 50 10

50 10: 50 epochs, a snapshot after every 10. rdzv, rendezvous, is the meeting; c10d, the kind that
torchrun has built in. 29603 is any free port of node1, 345 any name for the job. Each machine needs
this file and the data, and must reach the others: launch/README.md. Only one machine? launch/lab
makes several of it. Or begin with one:

    torchrun --standalone --nproc-per-node=2 template/several_machines.py 5 1

The job begins with a map. On two machines with two GPUs each:

    [rank 0/4] machine         node rank  global rank  local rank  device  pid
    [rank 0/4] node1                   0            0           0  cuda:0  4711
    [rank 0/4] node1                   0            1           1  cuda:1  4712
    [rank 0/4] node2                   1            2           0  cuda:0  4720
    [rank 0/4] node2                   1            3           1  cuda:1  4721

To restart after a crash, as in 02: --max-restarts=3, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in
front of torchrun, on each machine (step 2 says why). With --nnodes=1:2 (at least 1, at most 2),
machines may come and go, too. (For a job of your own, change only what is marked "your".) Say that
SAVE_EVERY is 1, node2 dies, and later you start the command there again:

    node1   epochs 1  2  3  4, its ranks fail | 4 again  5  6 halfway, saves | rest of 6  7  8
    node2   epochs 1  2  3  4, dies           |                comes back    | rest of 6  7  8

At each bar, torchrun starts all ranks again, from the newest snapshot of any machine. node1's ranks
fail as they wait for those of node2. When node2 is back, torchrun asks node1's ranks to leave
(SIGTERM), so they save in the middle of epoch 6. node1's torchrun must stay, as the machines meet
there. Without it, the others end, and you start the command again. The machine of rank 0 prints the
log: after a restart, it may be the other one.
New here: global and local rank (main, show_map), the same data on all machines (check_data), the
newest snapshot of any machine (train, take_newest), machines that leave (train_epoch, ASK_EVERY).
The rest is as in 02_torchrun_elastic.py, but for helpers: look for "New in 03". Next:
04_collectives.py, what DDP is made of.
"""

import argparse
import contextlib
import errno
import fcntl
import gc
import hashlib
import io
import itertools
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import uuid
import zipfile
from datetime import timedelta

# The process id of torchrun, asked before the slow import: see exit_with_launcher.
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
# New in 03: after so many steps, the ranks ask each other whether one has to leave (train_epoch).
# Your number: these steps and a save must take less than 20 s. So must an evaluation and a save, as
# nobody asks meanwhile. (SIGTERM grants 30 s, and a rank that has waited 20 s in one call leaves.)
# If they take longer, and SIGTERM comes just then, the job goes on from the snapshot before. When a
# machine joins, nothing changes the 30 s. For a SIGTERM to torchrun itself, since torch 2.12,
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 in its environment grants 120 s: then 110 for the steps.
ASK_EVERY = 20


@record
def main():
    # New in 03: a torchrun on each machine starts this file. How without torchrun: launch/README.md
    args = parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has set it
        exit_with_launcher()  # if torchrun is killed, exit too

    # Step 1: start. Every process learns who it is, and takes its device.
    # New in 03: RANK, the global rank, counts through the whole job. It decides which share of the
    # data a process takes. LOCAL_RANK starts at 0 on each machine. It decides which device. With
    # two GPUs on each machine, rank 2 is the first process of the second machine: it takes GPU 0
    # there. (A GPU 2 does not exist.) In each attempt, torchrun numbers the machines anew, by their
    # addresses: any of them may have rank 0. There is no listen_locally in 03, as other machines
    # have to reach this process.
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))  # by default, torchrun gives a rank one core

    # Step 2: meet. Every process leaves its network address at the meeting point, and waits until
    # all others have done so. Then they are connected: they are a process group.
    # New in 03: without restarts, dist.init_process_group(backend) is enough. The torchruns meet at
    # --rdzv-endpoint. Then the ranks meet in a store, at MASTER_ADDR and MASTER_PORT. By default,
    # torchrun serves it, and after a restart it has the addresses of dead ranks. (The prefix of 02
    # does not help here: a machine that has come later has had fewer attempts.) With
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, rank 0 serves a new store in each attempt (is_master).
    # The timeout ends waits that nothing else ends: if a cable is cut, nobody is told. It must be
    # longer than ranks ever wait for each other, for a save, say.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=args.timeout)
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout,
            is_master=rank == 0 and not shares_store(),  # else torchrun serves it
            wait_for_workers=False, multi_tenant=True)  # do not wait yet: roll_call does
        roll_call(store, rank, world_size)  # if a rank does not come, say which
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
            device_id=device if device.type != "cpu" else None)  # GPUs only: which is mine
    except Exception as error:  # names, store and connections raise different types
        stop(explain(error, backend), status=1)

    show_map(device)
    # New in 03: if a rank stops, the others say which, after the timeout.
    try:
        finished = train(device, args)  # steps 3, 4 and 5
    except RuntimeError as error:
        name_the_stopped(error, store)
        raise

    # Step 6: leave. First free what train has left: otherwise Python may abort as it exits. Not in
    # a "finally": after an error on one rank, NCCL would hang here.
    gc.collect()
    dist.destroy_process_group()

    # New in 03: if the job ended early, torchrun and Slurm must see that.
    if not finished:
        sys.exit(128 + signal.SIGTERM)  # the status of a process that was ended by SIGTERM


# New in 03: who is who.
def show_map(device):
    """Print which process of the job runs where, as each of them says of itself."""
    mine = (dist.get_rank(), socket.gethostname(), os.environ.get("GROUP_RANK", "-"),
            os.environ["LOCAL_RANK"], str(device), os.getpid())
    log(f"{'machine':<15} node rank  global rank  local rank  device  pid")
    for rank, machine, node, local_rank, its_device, pid in gathered(mine):
        log(f"{machine:<15} {node:>9}  {rank:>11}  {local_rank:>10}  {its_device:>6}  {pid}")
    if shares_store() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        log("note: all attempts share torchrun's store, so a restart, or a newcomer, can fail. Set")
        log("      TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and use --rdzv-backend=c10d")


def train(device, args):
    # New in 03: train returns whether the job is finished. It ends early if a rank has to leave.
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Step 3: share the data. Rank r gets the items r, r + world_size, ... of one shuffled list.
    seed_all(SEED)  # if yours are split at random: all ranks, and all restarts, need the same sets
    train_set, test_set, source = load_data(args.data_dir)  # your data: any map-style Dataset
    images, labels = check_items(train_set, test_set)  # the loop needs images and labels
    # New in 03: the sampler can begin in the middle of an epoch. (So must one of your own: derive
    # it from DistributedSampler, and leave out the first items as RemainingSampler does.)
    sampler = RemainingSampler(train_set, seed=SEED, drop_last=True)
    # New in 03: each machine reads its own disk, so compare what they have read. (If your batches
    # are no tuples of tensors, change check_data.)
    check_data(train_set, source)

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

    # New in 03: one rank for each disk saves. (The replicas are equal, so it may be any rank.) If a
    # machine dies, the others have the newest snapshot on their disks. A shared disk is not needed.
    saves = first_on_its_disk(args.snapshot_path)
    if saves:  # a lock for each machine: if one is cut off, its lock must not stop the others
        lock(f"{args.snapshot_path}.{socket.gethostname()}")

    # New in 03: each rank reads the snapshot on its own disk. Then all take the newest of these: a
    # machine that comes back has an old one, or none.
    snapshot = resume(args.snapshot_path, model, optimizer)
    known = mark(snapshot)  # (epoch, images, who wrote it): has another job written it meanwhile?
    snapshot, sent = take_newest(snapshot, args.snapshot_path, model, optimizer, device)
    first_epoch = snapshot["next_epoch"]
    # Rounded up, so that all ranks leave out equally many, even if there are more of them now:
    images_done = math.ceil(snapshot.get("images_done", 0) / world_size) * world_size
    if first_epoch > 1 or images_done:
        # (Your schedule: schedule.load_state_dict(snapshot["schedule"]).)
        middle = f", image {images_done}" if images_done else ""
        log(f"resumed from {args.snapshot_path} of {snapshot['machine']} at epoch {first_epoch}"
            f"{middle}")
        warn_of_other_batches(snapshot, batch)  # with fewer ranks, each takes more of a batch

    # DDP copies rank 0's weights to all replicas (each rank has one). Inside loss.backward(), it
    # then collects gradients in buckets of some MB, and replaces each bucket by its mean over all
    # ranks as soon as it is full. So all ranks take the same step.
    model = DDP(model, gradient_as_bucket_view=True)
    settle_buckets(model, images.to(device), labels.to(device))

    # New in 03: save on each disk. At the barrier, all ranks wait until every disk has the file. If
    # you have a schedule, save its state_dict() here, too.
    written_by = gathered(uuid.uuid4().hex)[0]  # a name for this attempt
    job = snapshot.get("job", written_by)  # and for the job: that of its first attempt
    def save_on_each_disk(next_epoch, images_done):
        for buffer in model.module.buffers():  # as in evaluate
            dist.broadcast(buffer, src=0)
        if saves:
            save_if_ours(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                 "next_epoch": next_epoch, "images_done": images_done, "batch": batch,
                 "written_by": written_by, "job": job}, args.snapshot_path, known)
        dist.barrier()

    # New in 03: a machine that has had an older snapshot, or none, gets the newest now.
    if sent:
        save_on_each_disk(first_epoch, images_done)

    # New in 03: SIGTERM asks this process to leave. Slurm sends it at the time limit. torchrun does
    # so when a machine joins, when another process has failed, or when you stop torchrun. 30 s
    # later, torchrun kills the process.
    asked_to_leave = leave_on_sigterm()

    # Step 5: train. Every step averages the gradients; rank 0 reports and saves.
    # New in 03: no crash on purpose. Kill a process, or a machine of launch/lab, yourself.
    for epoch in range(first_epoch, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # without this line, every epoch repeats the order of the first
        # New in 03: if a rank has to leave, all leave after the same step, and the snapshot says
        # how far the epoch has come. After the restart, the sampler leaves out that part, and the
        # seed is another one: the rest must not draw the first part's random numbers again.
        sampler.done = images_done if epoch == first_epoch else 0
        seed_all(SEED + (epoch * len(train_set) + sampler.done) * world_size + rank)
        to_train = len(loader) * share * world_size
        loss, speed, trained = train_epoch(model, loader, optimizer, device, asked_to_leave)
        if trained < to_train:
            save_on_each_disk(epoch, sampler.done + trained)
            log(f"leaving (SIGTERM): epoch {epoch} after {sampler.done + trained} images | saved in"
                f" {args.snapshot_path}")
            return False
        accuracy = evaluate(model, test_set, device)  # each rank its share, then the sum

        # New in 03: any machine may be the one that goes on, so each has to have the snapshot.
        # (Step a schedule by epoch here, not further up, where an epoch may be left halfway.)
        saved = epoch % args.save_every == 0 or epoch == args.total_epochs
        if saved:
            save_on_each_disk(epoch + 1, 0)
        note = f" | saved in {args.snapshot_path}" if saved else ""
        log(f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f}"
            f" | {speed:6.0f} images/s{note}")

    # New in 03: each machine has a snapshot.
    if first_epoch > args.total_epochs:
        log("nothing left to train: ask for more epochs, or delete the snapshot on every machine")
    check_replicas(model.module)

    # New in 03: all epochs are done.
    return True


# New in 03: it ends early when a rank has to leave, and says how many images it has trained on.
def train_epoch(model, batches, optimizer, device, asked_to_leave):
    """Train on this rank's batches; return (mean loss, images per second, images), of all ranks."""
    start, images_seen = time.perf_counter(), 0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    # A progress bar on rank 0. None tells tqdm to hide it unless the output is a terminal.
    hidden = True if dist.get_rank() > 0 else None
    for step, (images, labels) in enumerate(tqdm(batches, leave=False, disable=hidden)):
        # New in 03: the signal may have reached some ranks only, and all must leave together.
        if step % ASK_EVERY == 0 and any(gathered(asked_to_leave.is_set())):
            break
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
    return loss, images_seen / (time.perf_counter() - start), images_seen


# New in 03: without it, machines could train on different data, and nothing would report that.
def check_data(train_set, source):
    """Stop unless all machines have the same training set, bit for bit.

    Of a TensorDataset, all is compared; of any other, ten items, read with the same random seed.
    """
    # What one process of each machine has to do is for local rank 0: here, to look at the data. (To
    # download it, see pitfalls/download_by_all.py.) Global rank 0 is on one machine only. All ranks
    # must call gathered: keep it out of the "if".
    mine = None
    if os.environ["LOCAL_RANK"] == "0":
        if isinstance(train_set, TensorDataset):
            tensors = train_set.tensors
        else:
            seed_all(SEED)
            tenth = math.ceil(len(train_set) / 10)
            tensors = next(iter(batches_of(train_set, [[*range(0, len(train_set), tenth)]])))
        sha256 = hashlib.sha256()
        for tensor in tensors:
            sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
        digest = sha256.hexdigest()[:12]
        mine = f"{len(train_set)} {source}, sha256 {digest}", socket.gethostname()
    machines = dict(pair for pair in gathered(mine) if pair)  # {data: a machine that has it}
    if len(machines) > 1:
        there = "; ".join(f"{machine} has {data}" for data, machine in machines.items())
        stop(f"the machines would train on different data: {there}. Put the same data on all of"
             " them, under --data-dir", status=1)


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


# New in 03: the machines may have snapshots of different epochs.
def take_newest(snapshot, path, model, optimizer, device):
    """Give all ranks the newest snapshot of any; return its other entries, and if it was sent."""
    found = gathered({"machine": socket.gethostname(), **snapshot})
    jobs = {each["job"]: each["machine"] for each in found if "job" in each}
    if len(jobs) > 1:  # the one that has trained longer would replace the other
        stop(f"{' and '.join(jobs.values())} have snapshots of different jobs: move away {path} on"
             " each machine whose job is not to go on", status=1)
    newest = max(range(len(found)), key=lambda rank: mark(found[rank])[:2])  # the first of equals
    marks = {mark(each) for each in found}
    # (1, 0, None) is the mark of no snapshot. Send the newest if some rank has another, or none.
    # (One that 02 has written does not say of which job it is: send it always.)
    send = marks != {(1, 0, None)} and (len(marks) > 1 or "job" not in found[newest])
    if send:
        file = io.BytesIO()
        if dist.get_rank() == newest:
            torch.save((model.state_dict(), optimizer.state_dict()), file)
        content = torch.empty(gathered(file.tell())[newest], dtype=torch.uint8)
        if dist.get_rank() == newest:
            content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        for piece in content.split(2**24):  # 16 MiB at a time: they pass through the GPU's memory
            on_device = piece.to(device)
            dist.broadcast(on_device, src=newest)
            piece.copy_(on_device)
        state = torch.load(io.BytesIO(content.numpy()), map_location="cpu", weights_only=True)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    return found[newest], send


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


# New in 03: the name of the temporary file, as another half of the job may be writing, too.
def save(state, path):
    """Write state to path. If the process dies meanwhile, path still holds the old file, whole."""
    temporary = f"{path}.{socket.gethostname()}.tmp"  # in the same folder: a move, not a copy
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
    # New in 03: SIGTERM must not end them before their rank. (If you have a worker_init_fn of your
    # own, call ignore_sigterm in it. "fork": from Python 3.14 on, the workers would otherwise be
    # started by a server, a process of Python's that SIGTERM ends. With num_workers=0, leave both
    # out.)
    return DataLoader(dataset, batch_sampler=lists, num_workers=2, worker_init_fn=ignore_sigterm,
                      multiprocessing_context="fork")


# ---- Helpers that are no part of the lesson ----


def exit_with_launcher():
    """End this process when torchrun is gone."""
    def watch():
        while os.getppid() == LAUNCHER:
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


def warn_of_other_batches(snapshot, batch):
    """Print a note if the snapshot was written with another batch, or another number of ranks."""
    if snapshot.get("batch", batch) != batch:
        log(f"note: saved by {snapshot['batch']}: the result may differ from an unbroken run's")


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


# New in 03: between machines, most starts fail for one of these reasons.
def explain(error, backend):
    """Return one line: why the ranks do not find each other, the cure, and what torch said."""
    said = str(error).strip().partition("\n")[0][:300]
    host, machine = os.environ["MASTER_ADDR"], socket.gethostname()
    cause = "run launch/check_machines.py on each machine: it finds out why"
    own = ""
    try:
        socket.getaddrinfo(host, None)
        own = socket.getaddrinfo(machine, None)[0][4][0]
        if os.environ["RANK"] != "0" and isinstance(error, dist.DistNetworkError):
            server = "torchrun" if shares_store() else "rank 0"
            cause = (f"{server} serves the store on {host}, and does not answer: look for its"
                     " error, or run launch/check_machines.py on each machine")
    except OSError:
        cause = (f"{machine} does not know the name {host}, or its own: put it into /etc/hosts, or"
                 " start torchrun with --local-addr=ITS_ADDRESS")
    if backend == "gloo" and own.startswith(("127.", "::1")) and "connectFullMesh" in str(error):
        cause = (f"{machine} gives the others its address {own}, which they cannot reach: set"
                 " GLOO_SOCKET_IFNAME to an interface that ip -br address shows")
    if shares_store() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        cause = ("this is a restart, with a store that still holds the addresses of the dead: set"
                 " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, with --rdzv-backend=c10d")
    return f"{cause} ({type(error).__name__}: {said})"


# New in 03: to go on in the middle of an epoch.
class RemainingSampler(DistributedSampler):
    """DistributedSampler that leaves out the first items of an epoch.

    done: how many, of all ranks together; a multiple of the number of ranks.
    """

    done = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.done // self.num_replicas, None)

    def __len__(self):
        return super().__len__() - self.done // self.num_replicas


# New in 03: with a shared disk, one rank writes the file. With disks apart, one on each machine.
def first_on_its_disk(path):
    """Return whether this is the first of the ranks that see the same file at path."""
    names = [f"{path}.{name}.tmp" for name in gathered(uuid.uuid4().hex)]  # one for each rank
    mine = names[dist.get_rank()]
    try:
        open(mine, "x").close()
    except OSError as error:
        stop(f"cannot write {path} ({error.strerror}): choose another path")
    dist.barrier()  # all have written their file
    seen = [os.path.exists(name) for name in names]
    dist.barrier()  # all have looked
    os.remove(mine)
    return seen.index(True) == dist.get_rank()


# New in 03: when a network is cut, two halves of a job may train on (split brain).
def save_if_ours(state, path, known):
    """Save, unless another job has written path since this one read it, when its mark was known."""
    # On a shared disk, the half that saves second finds a file that it does not know, and stops. (A
    # gap remains: both may look at the same moment.) On disks apart, both save, and the next start
    # takes the newer file.
    if os.path.exists(path):
        found = mark(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        if found != known and found[2] != state["written_by"]:
            stop(f"another job, or a lost part of this one, has written {path} meanwhile: its file"
                 " stays. End one of the two, or give it another --snapshot-path", status=1)
    save(state, path)


# New in 03: for take_newest and save_if_ours.
def mark(snapshot):
    """Return what tells snapshots apart, the newer being the larger: (epoch, images, who)."""
    return snapshot["next_epoch"], snapshot.get("images_done", 0), snapshot.get("written_by")


# New in 03: you can take it as it is.
def leave_on_sigterm():
    """Return an Event that SIGTERM sets. A process that waits for a dead rank just then ends."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    # Python runs that line only between two of its instructions: not while a collective waits for
    # a rank that is gone. The byte that the signal leaves in this pipe comes at once.
    # A wait of up to 20 s may be one for a slow save. It ends before torchrun kills, after 30 s.
    seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    patience = max(seconds - 10, seconds / 2)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # a process has only one

    def watch():
        while signal.SIGTERM not in os.read(reader, 1):
            pass
        if not asked.wait(patience):
            os._exit(128 + signal.SIGTERM)

    # A forked process has this pipe, too: to end it by terminate() would end this one.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    threading.Thread(target=watch, daemon=True).start()
    return asked


# New in 03: for the loader.
def ignore_sigterm(worker):
    """What a loader's worker calls first: only its rank ends it, not torchrun's signal to all."""
    # If a worker ended first, its rank would fail. If a worker ignored SIGTERM from its rank, too,
    # the rank could not end after an error. And if the rank was killed in the worker's first
    # moments, PyTorch's own worker would stay for ever. (A program that the worker starts ignores
    # SIGTERM, too: end it by kill().)
    if not hasattr(signal, "sigtimedwait"):  # a Mac: torchrun's SIGTERM costs the epoch there
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank = multiprocessing.parent_process().pid

    def watch():
        while os.getppid() == rank:
            asked = signal.sigtimedwait({signal.SIGTERM}, 1)  # None after a second
            if asked and asked.si_pid == rank:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


# New in 03: for show_map and explain.
def shares_store():
    """Return whether torchrun gives one store to all attempts of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# New in 03: a collective that has waited too long does not say for whom.
def name_the_stopped(error, store):
    """After a timeout (of Gloo: NCCL's ends the process itself), print which ranks have stopped."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")  # their store may be the same

    timed_out, absent = "timed out" in str(error).lower() or "timeout" in str(error), []

    def ask():
        with contextlib.suppress(dist.DistError):  # the store may be gone, too
            store.set(f"rank {rank} failed in {attempt}", "")
            if timed_out:
                time.sleep(2)  # when one rank gives up, those that wait for it fail a moment later
                absent.extend(str(r) for r in range(world_size)
                              if not store.check([f"rank {r} failed in {attempt}"]))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)  # set and check have no limit of their own
    if timed_out:
        whom = "others, which wait elsewhere: compare the ranks' tracebacks"
        if asking.is_alive():
            whom = "a store that does not answer: rank 0, or its machine, has stopped"
        elif absent:
            whom = f"rank {', '.join(absent)}: it has stopped, or is slower than the timeout"
        print(f"[rank {rank}/{world_size}] waited in vain for {whom}\n", end="", flush=True)


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


# New in 03: it says which machine speaks.
def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    name = os.path.basename(sys.argv[0])
    print(f"{name}: error: {socket.gethostname()}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


# New in 03: --timeout, no --crash-epoch, and jobs that are started by hand, without torchrun.
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
    parser.add_argument("--timeout", type=int, default=600, help="wait for others, in seconds")
    # torch.distributed.launch, the predecessor of torchrun, passes this; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.total_epochs, args.save_every, args.timeout) < 1:
        stop("TOTAL_EPOCHS, SAVE_EVERY and --timeout must be 1 or more")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]} 5 1")
    os.environ.setdefault("LOCAL_RANK", "0")  # by hand: one process on each machine
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")
    return args


if __name__ == "__main__":
    main()
