"""Several machines: global rank says who you are in the job, local rank which device is yours.

One torchrun on each machine, the same command on all, which meet at one of them, here node1:

    torchrun --nnodes=2 --nproc-per-node=gpu --rdzv-id=345 --rdzv-backend=c10d \
        --rdzv-endpoint=node1:29603 03_multinode.py 50 10

You have one machine only? launch/lab makes two of it (see README.md). Or begin with one:

    torchrun --standalone --nproc-per-node=2 03_multinode.py 5 1

On two machines with two processes each, it starts with a map:

    [rank 0/4] machine         node rank  global rank  local rank  device  pid
    [rank 0/4] node1                   0            0           0     cpu  4711
    [rank 0/4] node1                   0            1           1     cpu  4712
    [rank 0/4] node2                   1            2           0     cpu  4720
    [rank 0/4] node2                   1            3           1     cpu  4721

--nnodes=1:2 --max-restarts=3 lets machines come and go: the job goes on from the last snapshot with
those that are there. It needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment.

Before a long job, look whether the machines find each other: on each, with the names of all, this,
or the torchrun command with --check (and no names) at its end, which tries all processes:

    python 03_multinode.py --check node1 node2

New here: global and local rank, snapshots without a shared file system, machines that come and go.
Next: 04_collectives.py, what DDP is made of.
"""

import argparse
import contextlib
import fcntl
import gc
import glob
import hashlib
import io
import itertools
import json
import os
import re
import signal
import socket
import struct
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
PORT = 29613  # of --check; not that of a job, as a check must not write into a running job's store


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


def show_map(device):
    """Print which process of the job runs where, as each of them says of itself."""
    # The global rank (RANK) counts through the whole job: it picks the share of the data, and who
    # writes a file. The local rank (LOCAL_RANK) starts from 0 on each machine: it picks the device.
    # With two GPUs a machine, global rank 2 is the first process of the second machine: cuda:0
    # there, and cuda:2 would fail. LOCAL_WORLD_SIZE is how many processes share this machine's
    # cores. After a restart a process may have another global rank than before.
    mine = (dist.get_rank(), socket.gethostname(), os.environ.get("GROUP_RANK", "-"),
            os.environ.get("LOCAL_RANK", "0"), str(device), os.getpid())
    log(f"{'machine':<15} node rank  global rank  local rank  device  pid")
    for rank, machine, node, local_rank, its_device, pid in from_all_ranks(mine):
        log(f"{machine:<15} {node:>9}  {rank:>11}  {local_rank:>10}  {its_device:>6}  {pid}")
    if shares_store() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        log("note: all attempts share torchrun's store: a restart, or a newcomer, can fail; cure:")
        log("      TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, --rdzv-backend=c10d")


def shares_store():
    """Return whether torchrun gives one store to all attempts of the job."""
    # Ranks leave their addresses in the store. If the next attempt has the same store, it finds
    # those of the dead; and a machine that joins looks for an entry that only the first made.
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def from_all_ranks(mine):
    """Return what each rank has given for mine, in a list by rank; every rank must call it."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)  # any Python object, but slow: as a pickle
    return found


def check_data(train_set, source):
    """Stop unless all machines have the same training images; local rank 0 of each looks."""
    # Each machine has a disk of its own. What is to be done once on each (download, unpack, look
    # through) is for local rank 0: by global rank 0 alone, the others would have nothing; by all,
    # they would write the same files at once. The exchange is outside the "if": all take part.
    mine = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        digest = hashlib.sha256(train_set.tensors[0].numpy()).hexdigest()[:12]
        mine = f"{len(train_set)} {source}, sha256 {digest}", socket.gethostname()
    sets = dict(item for item in from_all_ranks(mine) if item)
    if len(sets) > 1:
        there = "; ".join(f"{machine} has {data}" for data, machine in sets.items())
        stop(f"the machines would train on different data: {there}. Put the same on each, under"
             " --data-dir", status=1)


def read_snapshot(path):
    """Return (the bytes of the snapshot at path, its next epoch), or (b"", 0) without one."""
    if not os.path.exists(path):
        return b"", 0
    try:
        with open(path, "rb") as file:
            content = file.read()
        # The archive holds a checksum of each tensor, and torch.load does not look at it.
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"wrong checksum of {damaged}")
        # weights_only: an ordinary pickle may run any code as it is read.
        snapshot = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if snapshot["format"] != 1:
            raise ValueError(f"format {snapshot['format']}, and this script reads format 1")
        return content, snapshot["next_epoch"]
    except Exception as error:  # each kind of damage raises a type of its own
        refuse(path, socket.gethostname(), error)


def refuse(path, machine, error):
    """End the job because the snapshot that a machine has at path is of no use."""
    reason = str(error).strip().partition("\n")[0]
    stop(f"cannot continue from {path} of {machine} ({type(error).__name__}: {reason}): move it"
         " away to start anew, or choose another --snapshot-path", status=1)


def resume_newest(path, model, optimizer, device):
    """Load the newest snapshot that any machine has at path; return (next epoch, the run's data).

    Without one that is (1, None). No shared file system is needed: after a restart, rank 0 may be
    on a machine whose disk has no snapshot, or an old one. So local rank 0 of each machine looks at
    its own, and the newest goes to all ranks as it is, byte by byte.
    """
    content, next_epoch = b"", 0
    if os.environ.get("LOCAL_RANK", "0") == "0":
        content, next_epoch = read_snapshot(path)
    found = from_all_ranks((next_epoch, len(content), socket.gethostname()))
    newest = max(range(len(found)), key=lambda rank: found[rank][0])  # among equals the lowest rank
    next_epoch, size, machine = found[newest]
    if next_epoch == 0:
        return 1, None
    data = torch.empty(size, dtype=torch.uint8, device=device)
    if dist.get_rank() == newest:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, src=newest)
    snapshot = torch.load(io.BytesIO(data.cpu().numpy()), map_location="cpu", weights_only=True)
    try:
        model.load_state_dict(snapshot["model"])
        # Without its momentum the optimizer would go on from the right place at the wrong speed.
        optimizer.load_state_dict(snapshot["optimizer"])
        run = snapshot["run"]
    except (KeyError, RuntimeError, ValueError) as error:
        refuse(path, machine, error)
    log(f"resumed from {path} of {machine} at epoch {next_epoch}")
    return next_epoch, run


def version_of(path):
    """Return what changes whenever the file at path is replaced, or None if there is none."""
    if not os.path.exists(path):
        return None
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def save_if_ours(state, path, known):
    """Write state to path and return its version; stop if path is not the known version any more.

    Split brain: two parts of a job that take each other for dead both go on, and on a shared file
    system both write the same snapshot. Whoever finds that another has written there ends. That
    leaves the moment between the look and the move, and the time (seconds) for which a network file
    system may show an old state. The rest is as in "save" of 02: path holds the old file or the
    whole new one at any moment.
    """
    temporary = f"{path}.{socket.gethostname()}.tmp"  # the other part, elsewhere, has its own
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name on an empty file
        if version_of(path) in (known, None):  # None: somebody has moved it away
            version = version_of(temporary)  # which the move does not change
            os.replace(temporary, path)
            return version
        os.remove(temporary)
    except (OSError, RuntimeError) as error:  # torch turns the first into the second
        if os.path.exists(temporary):
            os.remove(temporary)
        stop(f"cannot write {path}, which stays as it was; is the disk full? ({error})", status=1)
    stop(f"another job, or a lost part of this one, has written {path} meanwhile: its file stays."
         " End one of the two, or give it another --snapshot-path", status=1)


def finish_on_sigterm():
    """Return an Event that SIGTERM sets, instead of ending this process at once."""
    # SIGTERM comes when Slurm wants the machine back, when torchrun itself gets it, and when it
    # stops the processes for a restart. torchrun kills after 30 s (--shutdown-timeout) those that
    # are still there, so a longer epoch is lost, and the last snapshot counts.
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    return asked


def on_any_rank(condition, device):
    """Return whether the condition holds on any rank; every rank must ask."""
    count = torch.tensor(int(condition), device=device)
    dist.all_reduce(count)
    return count.item() > 0


def settle_buckets(model, device):
    """Run DDP once without a step, so that a resumed run adds gradients up in the same order."""
    # After its first backward DDP lays out its buckets anew, in the order in which the gradients
    # came. With three ranks or more another layout is another order of summation: without this
    # call, the first step after a restart would be rounded differently from the uninterrupted one.
    model.eval()  # these zeros must not count in a BatchNorm layer, nor draw numbers for a dropout
    model(torch.zeros(1, 28, 28, device=device)).sum().backward()
    model.train()
    model.zero_grad()


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


def explain(error):
    """Return one line: why ranks do not find each other, the cure, and what torch itself said."""
    said = str(error).strip().partition("\n")[0][:300]
    host = os.environ.get("MASTER_ADDR", "localhost")
    try:
        socket.gethostbyname(host)
    except OSError:
        return (f"{socket.gethostname()} does not know the name {host}: put it into /etc/hosts, or"
                f" start torchrun on {host} with --local-addr=ITS_ADDRESS ({said})")
    causes = {
        r"\[127\.": "a machine gave the others a loopback address, because its own name stands for"
        " it there: on each, set GLOO_SOCKET_IFNAME to the interface that ip -br address shows",
        "Unable to find address": "GLOO_SOCKET_IFNAME is no interface here: ip -br address",
        "EADDRINUSE": "the port is taken: by another check, or by a job on this machine?",
        "refused|reset|closed|Broken": "a process that was to answer is gone: see what the other"
        " machines say",
        "[Tt]ime": "some rank did not come in time: see what the other machines say. If they wait"
        " too, a firewall is between them: ranks use ports chosen at random, not that of torchrun",
    }
    cause = next((text for pattern, text in causes.items() if re.search(pattern, said)), None)
    # The rank that fails first may be one that only sees another leave: so look at the name too.
    several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    if several and (describe_machine("")["address"] or "").startswith("127."):
        cause = causes[r"\[127\."]
    if shares_store() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        cause = ("this is a restart, with a store that still holds the addresses of the dead: set"
                 " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, with --rdzv-backend=c10d")
    return f"{cause or 'no process group'} ({type(error).__name__}: {said})"


def join(device, backend, seconds, store=None, rank=-1, world_size=-1):
    """Make the process group, from torchrun's environment or what is given; return its store."""
    try:
        if store is None:
            store, rank, world_size = next(dist.rendezvous(
                "env://", timeout=timedelta(seconds=seconds)))
        # How long a rank waits for the others, here and in every collective. If a cable is cut, no
        # one is told, and this time alone ends the wait: by default 10 (NCCL) or 30 (Gloo) minutes.
        # It must be longer than any pause in which one rank keeps the others waiting.
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size,
            timeout=timedelta(seconds=seconds),
            device_id=device if device.type == "cuda" else None)  # else NCCL guesses, and warns
        return store
    except Exception as error:  # the store, the names and the connections raise types of their own
        stop(explain(error), status=1)


def share_of_batch(batch_size, images):
    """Return how many images of each batch a rank takes; stop unless all get one."""
    world_size = dist.get_world_size()
    if not world_size <= batch_size <= images:
        stop(f"--batch-size {batch_size} is impossible: give a number from {world_size}"
             f" (an image for each rank) to {images} (the training set)")
    # The batch of all ranks stays the same, and each rank's share of it changes, as machines come
    # and go: the steps stay the same too, and the learning rate stays right.
    share = batch_size // world_size
    log(f"batch size {share * world_size}: {world_size} ranks x {share} images")
    return share


def train_multinode(device, args):
    """Train; return True if a rank was asked to leave (SIGTERM) before the last epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set, source = load_data(args.data_dir)
    check_data(train_set, source)
    log(f"data: {len(train_set)} + {len(test_set)} {source}")
    share = share_of_batch(args.batch_size, len(train_set))
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=tuple)

    torch.manual_seed(SEED)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    run = {"seed": SEED, "batch size": share * world_size, "data": source}
    version = version_of(args.snapshot_path)
    first_epoch, saved_run = resume_newest(args.snapshot_path, model, optimizer, device)
    for name, value in run.items():
        if saved_run and value != saved_run.get(name):
            log(f"note: {name} was {saved_run.get(name)} before, and is {value} now")
    model = DDP(model, gradient_as_bucket_view=True)
    settle_buckets(model, device)

    asked_to_leave = finish_on_sigterm()  # from here on there is something to save
    for epoch in range(first_epoch, args.total_epochs + 1):
        sampler.set_epoch(epoch)  # the only randomness in an epoch, made from the seed and epoch
        loss, speed = train_epoch(model, loader, optimizer, device)
        accuracy = evaluate(model, test_set, device)
        # The signal may reach some ranks only, or not all of them in the same epoch. If one is to
        # leave, all save and end here together; those that may stay are started again by torchrun.
        leaving = on_any_rank(asked_to_leave.is_set(), device)
        saved = epoch % args.save_every == 0 or epoch == args.total_epochs or leaving
        # One file, written by one process: global rank 0. (Each machine has a local rank 0.)
        if saved and rank == 0:
            version = save_if_ours(
                {"format": 1, "run": run, "next_epoch": epoch + 1,
                 "model": model.module.state_dict(), "optimizer": optimizer.state_dict()},
                args.snapshot_path, version)
        log(f"epoch {epoch:2d}/{args.total_epochs} | loss {loss:.4f} | accuracy {accuracy:.4f}"
            f" | {speed:6.0f} images/s{f' | saved in {args.snapshot_path}' if saved else ''}")
        if leaving and epoch < args.total_epochs:
            who = "this rank was" if asked_to_leave.is_set() else "another rank was"
            log(f"{who} asked to leave (SIGTERM): end after epoch {epoch}", every_rank=True)
            dist.barrier()  # once one has left, torchrun may end the others: let rank 0 save first
            return True
    if first_epoch > args.total_epochs:
        log(f"nothing left to train: {args.snapshot_path} has {first_epoch - 1} epochs behind it,"
            f" accuracy {evaluate(model, test_set, device):.4f}")
    check_replicas(model)
    log(f"sha256 of weights {fingerprint(model)}: compare an uninterrupted run's (equal on a CPU)")
    return False


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


# ---- --check: do the machines find each other? If you came to train, you may stop here. ----


def interfaces():
    """Return {network interface: its IPv4 address} of this machine (Linux)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:  # 0x8915 is SIOCGIFADDR
                answer = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                continue  # without an IPv4 address
    return found


def describe_machine(backend):
    """Return what the other machines should know of this one: a dict of plain types."""
    name, addresses = socket.gethostname(), interfaces()
    # The address that Gloo hands to the others: that of the interface it is told to use, else the
    # one that this machine's own name stands for. (NCCL leaves loopback and Docker's out.)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    try:
        address = addresses.get(interface) if interface else socket.gethostbyname(name)
    except OSError:
        address = None
    interface = interface or next((i for i, a in addresses.items() if a == address), "no interface")
    others = [i for i, a in addresses.items() if not a.startswith("127.")]
    return {"machine": name, "address": address, "interface": interface, "others": others,
            "torch": torch.__version__, "GPUs": torch.cuda.device_count(), "backend": backend,
            "processes": os.environ.get("LOCAL_WORLD_SIZE", "1")}


def complaints(machines):
    """Return a list of sentences, each a fault that this machine sees in the descriptions."""
    found = []
    hidden = [m for m in machines if not m["address"] or m["address"].startswith("127.")]
    if hidden and hidden[0]["backend"] == "gloo" and len(machines) > 1:
        cases = ", ".join(f"{m['machine']}: {m['address'] or 'none'} on {m['interface']}"
                          for m in hidden)
        found.append(f"the others cannot use a machine's own address ({cases}), which is that of"
                     " its name in its /etc/hosts, or of the interface GLOO_SOCKET_IFNAME: there,"
                     f" set GLOO_SOCKET_IFNAME={(hidden[0]['others'] or ['INTERFACE'])[0]}")
    if "MASTER_ADDR" not in os.environ:  # else torchrun has found the one name it needs
        for name in (m["machine"] for m in machines):
            try:
                socket.gethostbyname(name)
            except OSError:
                found.append(f"{socket.gethostname()} does not know the name {name}: put it into"
                             f" /etc/hosts, or give torchrun on {name} --local-addr=ITS_ADDRESS")
    for what, cure in {"torch": "install the same version on all",
                       "backend": "some see a GPU and some none: does nvidia-smi work there?",
                       "processes": "give all the same --nproc-per-node"}.items():
        if len({str(m[what]) for m in machines}) > 1:
            each = ", ".join(f"{m['machine']} {m[what]}" for m in machines)
            found.append(f"the machines differ in {what} ({each}): {cure}")
    return found


def leave(message):
    """End the whole process with this line, from whatever thread."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def reach(host, port, patience):
    """Return once host accepts connections at port; stop if it does not within patience, in s."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((host, port), timeout=2).close()
        except ConnectionRefusedError:
            reason = f"it is there, and nothing listens: start the check on {host} too"
        except OSError as error:
            reason = (f"{error}: is the machine up, the address right, and the port open in the"
                      f" firewall? nc -vz {host} {port}")
        if time.monotonic() > deadline:
            stop(f"{host}:{port} has not answered {socket.gethostname()} for {patience} s"
                 f" ({reason})", status=1)
        time.sleep(0.2)


def place_among(names):
    """Return which of the machines of these names this one is, counted from 0."""
    place = None
    for i, name in enumerate(names):
        try:
            with socket.socket() as probe:
                probe.bind((socket.gethostbyname(name), 0))  # only an own address can be bound
            place = i
        except socket.gaierror:
            stop(f"{socket.gethostname()} does not know the name {name}: give its address instead,"
                 " or put it into /etc/hosts", status=1)
        except OSError:
            continue  # another machine's address
    if place is None:
        stop(f"this machine, {socket.gethostname()}, is none of {' '.join(names)}")
    return place


def roll_call(names, backend, patience=30):
    """Meet the machines of these names at PORT of the first; return (store, own place, how many).

    torchrun starts no script before all machines are there, and does not say which one is missing.
    This does, in one line, when one has not come within patience seconds.
    """
    place = place_among(names)
    if place > 0:
        reach(names[0], PORT, patience)
    # A client waits without limit for a listener that accepts and then says nothing.
    no_answer = threading.Timer(patience, lambda: leave(f"what listens at {names[0]}:{PORT} is no"
                                                        " store: another program?"))
    no_answer.daemon = True
    no_answer.start()
    try:
        store = dist.TCPStore(names[0], PORT, is_master=place == 0, wait_for_workers=False,
                              timeout=timedelta(seconds=patience))
        no_answer.cancel()
        store.set(f"machine {place}", json.dumps(describe_machine(backend)))
        # The first waits longer: the store ends with it, and all want to say who is missing.
        deadline = time.monotonic() + patience + 2 * (place == 0)
        while missing := [n for i, n in enumerate(names) if not store.check([f"machine {i}"])]:
            if time.monotonic() > deadline:
                stop(f"{', '.join(missing)} did not come within {patience} s: is the check started"
                     " there? if it is, read what it says there", status=1)
            time.sleep(0.2)
        found = [json.loads(store.get(f"machine {i}")) for i in range(len(names))]
        store.set(f"wrong {place}", json.dumps(complaints(found)))
        wrong = [text for i in range(len(names)) for text in json.loads(store.get(f"wrong {i}"))]
        store.set(f"heard {place}", "")
        if place == 0:  # the store ends with this process, which must not be the first to leave
            store.wait([f"heard {i}" for i in range(len(names))])
    except dist.DistError as error:
        stop(f"the store at {names[0]}:{PORT} does not work: {explain(error)}", status=1)
    if wrong:
        stop(" | ".join(dict.fromkeys(wrong)), status=1)
    return store, place, len(names)


def ring_sum(tensor):
    """Return the sum of all ranks' tensors, which travel around the ring from rank to rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(world_size - 1):
        coming = torch.empty_like(passing)
        # Both at once: if all ranks sent first and received then, all would wait for ever.
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, passing, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, coming, (rank - 1) % world_size)])
        for work in works:
            work.wait()
        total, passing = total + coming, coming
    return total


def check_group(device, backend):
    """Print who is there and how fast the network is; stop if something is wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        stop("one process has nobody to find: name all machines, or use torchrun")
    show_map(device)
    mine = describe_machine(backend) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    machines = [each for each in from_all_ranks(mine) if each]
    for each in machines:
        log(f"{each['machine']}: {each['address']} on {each['interface']}, torch {each['torch']},"
            f" {each['GPUs']} GPUs")
    if wrong := dict.fromkeys(itertools.chain(*from_all_ranks(complaints(machines)))):
        stop(" | ".join(wrong), status=1)

    numbers = torch.arange(1024, device=device, dtype=torch.float64) * (rank + 1)
    by_ring = ring_sum(numbers)
    for _ in range(2):
        by_all_reduce = numbers.clone()
        dist.all_reduce(by_all_reduce)
        if not torch.equal(by_all_reduce, by_ring):
            stop("all_reduce and the ring of sends disagree: a network that changes data?", 1)
    log("two all_reduces and a ring of send and receive agree: OK")
    measure_bandwidth(device)
    log(f"check passed: {world_size} ranks on {len(machines)} machines")


def measure_bandwidth(device):
    """Print the bus bandwidth of an all_reduce: bytes a second that each rank sends (and gets)."""
    world_size = dist.get_world_size()
    block, times = torch.ones(16 * 2**18, device=device), []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(block)
        block[0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    seconds = min(times[1:])
    moved = 2 * (world_size - 1) / world_size * block.nbytes / seconds
    log(f"all_reduce of 16 MiB: {1000 * seconds:.0f} ms, {moved / 1e9:.2f} GB/s bus bandwidth")


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
    # Four variables say who a process is and where the job meets. torchrun sets them, or you by
    # hand (README.md shows it); without LOCAL_RANK a process is the only one of its machine.
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if args.check is not None and started == bool(args.check):
        stop("--check takes the names of all machines (--check node1 node2) without torchrun, and"
             " no names with it")
    if not started and not args.check:
        stop("this script needs a launcher:"
             " torchrun --standalone --nproc-per-node=2 03_multinode.py 5 1")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_world_size:
        stop(f"{local_world_size} processes want a GPU each and there are {gpus}:"
             " use --nproc-per-node=gpu, or the CPU with CUDA_VISIBLE_DEVICES= in front")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
        exit_with_launcher()
    check_path(args.snapshot_path)
    device, backend = pick_device(local_rank)
    share_cores(local_world_size)
    left = False
    if args.check is None:
        store = join(device, backend, args.timeout)
        show_map(device)
        if dist.get_rank() == 0:
            # A lock for each machine: if all shared one, a machine that is cut off would hold it.
            claim(args.snapshot_path, f".{socket.gethostname()}.lock")
            for leftover in glob.glob(f"{glob.escape(args.snapshot_path)}.*.tmp"):
                if time.time() - os.path.getmtime(leftover) > 600:  # older than a save can take
                    os.remove(leftover)  # of a machine that died while it saved
        try:
            left = train_multinode(device, args)
        except RuntimeError as error:
            explain_timeout(error, store, dist.get_rank(), dist.get_world_size())
            raise
    else:
        # 10 seconds: Gloo tries to connect for five times as long.
        join(device, backend, 10, *(roll_call(args.check, backend) if args.check else ()))
        check_group(device, backend)
    # Collect, then destroy, and not in a "finally": 01_single_node_multi_gpu.py says why.
    gc.collect()
    dist.destroy_process_group()
    if left:
        sys.exit(128 + signal.SIGTERM)


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
    parser.add_argument("--timeout", type=number, default=60, help="wait for others, in seconds")
    parser.add_argument("--check", nargs="*", metavar="MACHINE", help="look at the network, then"
                        " exit; without torchrun, give the names of all machines")
    # torch.distributed.launch passes this on every command line; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
