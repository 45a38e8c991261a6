"""What keeps a training job alive: copy it beside train.py. Nothing here needs a change.

Plain functions and one class, each of which can be taken alone. They call nothing of yours but
state_dict() and load_state_dict(). In the order in which train.py meets them:

    start, gathered, log, stop      join the job; speak; end it with one line
    seed, seed_item, my_share       who draws what, and which items are whose
    same_everywhere                 the same data on all machines
    Snapshot                        what a kill must not cost: load() and save()
    settled                         a resumed run adds up in the order of an unbroken one
    leave_on_sigterm, obey_rank     go after the step, loader's workers included
    same_buffers, compare_replicas  one model, not one for each rank
    save, replacing                 other files, whole or not at all
    leave                           end so that torchrun and Slurm see how

"All ranks must call it": the ranks meet in it, so a rank that does not come lets the others wait.
"""

import contextlib
import copy
import errno
import fcntl
import gc
import hashlib
import io
import itertools
import multiprocessing
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from datetime import timedelta

LAUNCHER = os.getppid()  # torchrun, asked now: importing torch takes seconds

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # keep this: imported later, by DDP, it would keep the group open
from torch import nn

# ---- Join the job ----


def start(timeout=600):
    """Join the job; return this process's torch.device, a GPU of its own or the CPU.

    timeout: seconds that ranks wait for each other, in each exchange. It must be longer than a
    save, a compilation, or the difference between their validations.

    It starts under torchrun on one machine or several, under Slurm's srun, or by hand with RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT (where a machine has several processes: LOCAL_RANK and
    LOCAL_WORLD_SIZE, too). Without it, restarted ranks look for dead ones at their old addresses,
    and stand still (pytorch issue 135712); a rank outlives its torchrun and goes on writing; nobody
    says which rank is missing. If the start fails, one line says why, with status 1 or 2.
    """
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        take_ranks_from_slurm()
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        exit_with_launcher()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.setdefault("LOCAL_WORLD_SIZE", "1"))
    one_machine = local_world_size == world_size
    if one_machine:  # nobody else has to reach these processes: interface 1 is the loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))
    device, backend = pick_device(local_rank)
    # torchrun gives each rank one core (OMP_NUM_THREADS=1), unless you set the variable yourself.
    given = os.environ.get("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(given) if given != "1" else max(1, cores() // local_world_size))

    attempt, timeout = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout,
            is_master=rank == 0 and not shares_store(),  # else torchrun serves it
            wait_for_workers=False, multi_tenant=True)  # do not wait yet: roll_call does
        if one_machine:  # between machines, attempts are not counted alike: see the note below
            store = dist.PrefixStore(f"attempt {attempt}", store)
        roll_call(store, rank, world_size, timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
            device_id=device if device.type != "cpu" else None)  # GPUs only: which is mine
    except Exception as error:  # names, store and connections raise different types
        stop(explain(error, backend), status=1)

    uncaught = sys.excepthook
    sys.excepthook = lambda *error: (uncaught(*error), name_the_stopped(error[1], store))
    mine = f"{socket.gethostname()}, local rank {local_rank}, {device}, pid {os.getpid()}"
    for number, line in enumerate(gathered(mine)):
        log(f"attempt {attempt}, {backend}: rank {number} is on {line}")
    if shares_store() and not one_machine and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        log("note: a restart, or a machine that joins, will fail: set"
            " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and use --rdzv-backend=c10d")
    return device


def take_ranks_from_slurm():
    """Set torchrun's variables from those of srun: one task for each process."""
    get = os.environ.__getitem__
    tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", get("SLURM_STEP_TASKS_PER_NODE"))  # 2(x3),1
    counts = [count for count, nodes in tasks for _ in range(int(nodes or 1))]
    os.environ |= {"RANK": get("SLURM_PROCID"), "WORLD_SIZE": get("SLURM_STEP_NUM_TASKS"),
                   "LOCAL_RANK": get("SLURM_LOCALID"),
                   "LOCAL_WORLD_SIZE": counts[int(get("SLURM_NODEID"))]}
    if "MASTER_ADDR" not in os.environ:  # the first node, where task 0 is
        command = ["scontrol", "show", "hostnames", get("SLURM_STEP_NODELIST")]
        os.environ["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
    os.environ.setdefault("MASTER_PORT", str(20000 + int(get("SLURM_JOB_ID")) % 10000))


def exit_with_launcher():
    """End this process when torchrun is gone."""
    def watch():
        while os.getppid() == LAUNCHER:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def pick_device(local_rank):
    """Return (device, backend): a GPU for each process with its backend, or the CPU with Gloo."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(gpu or "cpu")
    if backend != "gloo":
        if local_rank >= torch.accelerator.device_count():
            raise SystemExit("each process needs a GPU of its own: start fewer processes, or use"
                             " the CPU by CUDA_VISIBLE_DEVICES= in front of the command")
        torch.accelerator.set_device_index(local_rank)  # else every process takes some of GPU 0
        return torch.device(gpu.type, local_rank), backend
    # Also for Apple's GPUs, whose tensors Gloo cannot send. A core each, as torchrun has it:
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # Linux: a third faster, with two ranks
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return torch.device("cpu"), "gloo"


def cores():
    """Return how many cores this machine lets the job use: by its mask, or a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for names in ["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]:  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):  # there is none
            texts = [pathlib.Path("/sys/fs/cgroup", name).read_text() for name in names]
            quota, period = map(int, " ".join(texts).split())
            count = min(count, max(1, quota // period)) if quota > 0 else count
    return count


def shares_store():
    """Return whether torchrun gives one store to all attempts of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def roll_call(store, rank, world_size, timeout):
    """Return when all ranks have come; stop if that takes too long, and name the missing ones."""
    store.set(f"rank {rank}", "here")
    missing, deadline = [], time.monotonic() + timeout.total_seconds()
    for number in range(world_size):
        try:  # (check() would ask without a limit, and the store may be gone, too)
            store.wait([f"rank {number}"], timedelta(seconds=max(1, deadline - time.monotonic())))
        except dist.DistStoreError:
            missing.append(f"rank {number}")
    if missing:
        stop(f"{', '.join(missing)} did not come within {timeout.total_seconds():g} s: look for an"
             " error above, or for a process that hangs", status=1)


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


def name_the_stopped(error, store):
    """After a timeout (of Gloo: NCCL's ends the process itself), print which ranks have stopped."""
    rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    timed_out, absent = "timed out" in str(error).lower() or "timeout" in str(error), []

    def ask():
        with contextlib.suppress(dist.DistError):  # the store may be gone, too
            store.set(f"rank {rank} failed", "")
            if timed_out:
                time.sleep(2)  # when one rank gives up, those that wait for it fail a moment later
                absent.extend(str(r) for r in range(world_size)
                              if not store.check([f"rank {r} failed"]))

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
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line in place of a traceback: for errors that the user can mend."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    name = os.path.basename(sys.argv[0])
    print(f"{name}: error: {socket.gethostname()}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


# ---- Who draws what, and which items are whose ----


def seed(*numbers):
    """Seed torch (GPUs, too), numpy and random from these numbers: other numbers, other draws.

    Without it, a resumed run draws other dropout masks than an unbroken one. seed(SEED, step,
    rank): other draws in each step and on each rank, and nothing about them needs saving. A
    generator of your own does not follow: make it anew from torch.randint(2**62, ()).item().
    """
    value = int(hashlib.sha256(repr(numbers).encode()).hexdigest()[:16], 16)
    random.seed(value)
    numpy.random.seed([value % 2**32, value >> 32])
    torch.manual_seed(value)  # the workers of a DataLoader start from it, too


def my_share(order, epoch, first, batch_size, micro_batches=1):
    """Return this rank's micro-batches of one step, each a list of (epoch, place, item).

    order: the items of the epoch, a list or an integer tensor (N,), alike on all ranks; an item may
    stand in it twice. The step takes batch_size of them, from place first on, for all ranks
    together: so a step has the same items on any number of ranks, and a job goes on with more or
    fewer. (DistributedSampler, started in mid-epoch with another number, repeats items and leaves
    others out.) Shares may differ by one item if the ranks do not divide batch_size; none is empty
    if batch_size is at least ranks x micro_batches.
    """
    places = range(first, first + batch_size)[dist.get_rank() :: dist.get_world_size()]
    cuts = [len(places) * i // micro_batches for i in range(micro_batches + 1)]
    return [[(epoch, place, int(order[place])) for place in places[cut:end]]
            for cut, end in itertools.pairwise(cuts)]


def seed_item(base, epoch, place, item):
    """Seed what your Dataset draws for the item at this place of the epoch; return the item.

    Call it in the process that reads the item. Without it, augmentation depends on which worker is
    asked, and a resumed run has other images. By its place, not by its number: an item that an
    epoch has twice (weighted sampling) is augmented in two ways.
    """
    seed(base, epoch, place, "item")
    return item


def same_everywhere(what, value):
    """Stop (status 1) unless all ranks have an equal value. All ranks must call it.

    what: its name, for the message. value: numbers, texts and tensors, in tuples, lists and dicts.
    Each machine reads its own disk: without it, they may train on different data, and nothing fails.
    """
    found = dict(reversed([*zip(gathered(digest(value)), gathered(socket.gethostname()))]))
    if len(found) > 1:
        there = "; ".join(f"{machine}: sha256 {its}" for its, machine in found.items())
        stop(f"the machines have different {what}: {there}. Put the same on all of them", status=1)


# ---- What a kill must not cost ----


class Snapshot:
    """The state of the job in one file, whole at any moment, on each machine's disk.

    path: of the file. plan: a text that must be the same as long as the job lasts, such as the size
    of the batches. parts: name=object for all that has a state_dict(), the model before DDP() wraps
    it, and the GradScaler, too. Whatever else changes in training is given to load and save.
    All ranks must make it, and call its methods.

    Without it: a kill while it writes leaves half a file; a machine that comes back goes on from
    its old file; two halves of a job, or two jobs, write over each other's.
    writer: whether this rank is the one that writes on its disk. (A shared disk has one writer.)
    """

    def __init__(self, path, plan, **parts):
        self.path, self.plan, self.parts = path, plan, parts
        self.writer = first_on_its_disk(path)
        if self.writer:  # for each machine: if one is cut off, its lock must not stop the others
            lock(f"{path}.{socket.gethostname()}")
        self.job = self.attempt = gathered(uuid.uuid4().hex)[0]
        self.known, self.saves = "", 0  # what the file on this disk says who wrote it

    def load(self, **new):
        """Load all parts from the newest file of any machine; return the rest of it as a dict.

        new: that rest as a new job has it; step, the number of steps done, must be in it. A name
        that the file does not have keeps its new value. The newest file is always sent to all
        ranks, and to disks that have another: that takes twice its size of each rank's memory.
        Stops (status 1) if a file is damaged or does not fit, if the plan is another, or if the
        machines have files of different jobs. It never writes over such a file.
        """
        mine = None
        if self.writer and os.path.exists(self.path):
            try:
                with zipfile.ZipFile(self.path) as archive:  # the format of torch.save
                    if damaged := archive.testzip():  # torch.load does not look at the checksums
                        raise ValueError(f"wrong checksum of {damaged}")
                    self.known = archive.comment.decode()
                # weights_only: an ordinary pickle can run any code while it is read.
                held = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
                mine = held["step"], self.known, socket.gethostname(), os.path.getsize(self.path)
            except Exception as error:  # a damaged file can raise almost any exception
                stop(f"cannot continue from {self.path} ({shortened(error)}): if it is damaged,"
                     " move it away to start anew; if it is another script's, choose another path",
                     status=1)
        found = gathered(mine)
        jobs = {known.split()[0]: machine for _, known, machine, _ in filter(None, found) if known}
        if len(jobs) > 1:  # the one that has trained longer would replace the other
            stop(f"{' and '.join(jobs.values())} have snapshots of different jobs: move away"
                 f" {self.path} on each machine whose job is not to go on", status=1)
        self.job = next(iter(jobs), self.job)
        if not any(found):
            return new
        newest = max(range(len(found)), key=lambda rank: found[rank][0] if found[rank] else -1)
        step, known, machine, size = found[newest]
        content = self.sent_by(newest, size)
        try:  # map_location: otherwise the tensors go to the GPU that they were saved from, rank 0's
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(state.pop(name))
            plan = state.pop("plan")
        except Exception as error:
            stop(f"cannot continue from {self.path} ({shortened(error)}): it is whole, but not of"
                 " this model and these parts. (_orig_mod: of torch.compile; give Snapshot the"
                 " model itself.) Keep it, and choose another path", status=1)
        if plan != self.plan:
            stop(f"{self.path} goes on with batches of {plan}, as before: with {self.plan}, some"
                 " would come twice or never", status=1)
        if self.writer and self.known != known:  # if the others die now, this disk must have it
            with replacing(self.path) as file:
                file.write(content)
            self.known = known
        dist.barrier()
        log(f"resumed from {self.path} after step {step}, saved on {machine}")
        return {**new, **state}

    def sent_by(self, source, size):
        """Return the bytes of the file at path that rank source has, on all ranks."""
        content = torch.empty(size, dtype=torch.uint8)
        if dist.get_rank() == source:
            content = torch.frombuffer(bytearray(pathlib.Path(self.path).read_bytes()),
                                       dtype=torch.uint8)
        for piece in content.split(2**24):  # 16 MiB at a time: they pass through the GPU's memory
            from_rank(source, piece)
        return content.numpy()

    def save(self, **numbers):
        """Save all parts, and these: plain numbers, texts and tensors, in lists and dicts.

        One of them is step. All must be alike on all ranks, and each save looks at that: RuntimeError
        names the first that differs. A module's buffers (BatchNorm's means) are made those of rank 0
        before. When it returns, every disk has the file. Stops (status 1) if it cannot be written,
        could not be loaded again (it names the number of NumPy's, say), or if somebody else has
        written path meanwhile.
        """
        same_buffers(*self.parts.values())
        compare_replicas(**self.parts, **numbers)
        self.saves += 1
        if self.writer:
            # A network that is cut may leave two halves of a job, and both train on. (A gap
            # remains: both may look at the same moment.)
            if os.path.exists(self.path) and written_by(self.path) != self.known:
                stop(f"another job, or a lost part of this one, has written {self.path} meanwhile:"
                     " its file stays. End one of the two, or give it another path", status=1)
            states = {name: part.state_dict() for name, part in self.parts.items()}
            # Not in the state itself, as it is no result: runs that end alike have equal states.
            self.known = f"{self.job} {self.attempt} {self.saves}"
            save({**states, "plan": self.plan, **numbers}, self.path, self.known)
        dist.barrier()


def save(state, path, comment=""):
    """Write state to path, as torch.save does. If the process dies meanwhile, the old file stays.

    state: tensors, numbers and texts, in lists and dicts. Stops (status 1) if it cannot be written,
    or could not be loaded by torch.load(weights_only=True) again: it must not replace what can.
    comment: of the zip archive, which is what torch.save writes.
    """
    with replacing(path) as file:
        torch.save(state, file)
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = comment.encode()
        file.flush()
        try:  # mmap: this reads few bytes
            torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            strange = [f"{name} is a {type(leaf).__module__}.{type(leaf).__name__}"
                       for name, leaf in leaves(state)
                       if type(leaf).__module__.partition(".")[0] not in ("builtins", "torch")]
            stop(f"{path} stays as it was, since the new one could not be loaded: save tensors and"
                 f" plain numbers ({(strange or [shortened(error)])[0]})", status=1)


@contextlib.contextmanager
def replacing(path):
    """Give a new binary file for "with", and put it in the place of path when it is whole.

    Without it, a kill or a full disk leaves half a file. Stops (status 1) if it cannot be written:
    path stays as it was.
    """
    # In the same folder, as a move to another disk would be a copy. Two halves of a job may write.
    temporary = f"{path}.{socket.gethostname()}.tmp"
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave an empty file at path
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        stop(f"cannot write {path}, which stays as it was; is the disk full? ({error})", status=1)
    finally:
        with contextlib.suppress(OSError):  # it has been moved
            os.remove(temporary)


def written_by(path):
    """Return what the snapshot at path says who wrote it; None if it is none."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return archive.comment.decode()


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


# ---- One model, not one for each rank ----


@contextlib.contextmanager
def settled(*models):
    """Run one forward and backward of each DDP model in this "with"; then all state is put back.

    DDP collects gradients in buckets, and regroups these once, after its first backward. That
    changes the order of additions and, with three ranks or more, the rounding. Without it, a
    resumed run takes one step in another order than an unbroken one, and ends with other weights.
    Put back is all that is in state_dict(), also what your forward() moves (a momentum encoder, a
    queue). What is not in state_dict(), a plain attribute, say, stays moved.
    """
    # On the CPU: at a resume, GPUs hold the optimizer's state already.
    states = [{name: value.detach().to("cpu", copy=True) if torch.is_tensor(value)
               else copy.deepcopy(value) for name, value in model.state_dict().items()}
              for model in models]
    yield
    for model, state in zip(models, states, strict=True):
        model.load_state_dict(state)
        model.zero_grad()


def same_buffers(*modules):
    """Give all ranks the buffers that rank 0 has: those of the modules, anything else is left.

    All ranks must call it, before they validate. Without it, BatchNorm's means, which each rank has
    from its own share, differ: so do metrics, and one rank may stop early alone.
    """
    for module in modules:
        if isinstance(module, nn.Module):
            for buffer in module.buffers():
                from_rank(0, buffer)


def from_rank(source, tensor):
    """Copy rank source's tensor into that of all others; it may be on any device."""
    device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    sent = tensor.detach().to(device).contiguous()
    dist.broadcast(sent, src=source)
    tensor.detach().copy_(sent)


def compare_replicas(**parts):
    """Return the sha256 (12 digits) of these on all ranks. RuntimeError names what differs first.

    parts: name=object with a state_dict(), or plain numbers. All ranks must call it. Without it,
    replicas can drift unseen: each restart loads one rank's file, and hides it. They drift if layers
    are unfrozen after DDP(), if forward() is not called through DDP, or if a rank steps alone.
    """
    states = {name: part.state_dict() if hasattr(part, "state_dict") else part
              for name, part in parts.items()}
    mine = [(name, digest(leaf)) for name, leaf in leaves(states)]
    whole = digest(mine)
    if len({*gathered(whole)}) > 1:
        for row in itertools.zip_longest(*gathered(mine), fillvalue=("the number of tensors", "")):
            if len({*row}) > 1:
                digests = ", ".join(its for _, its in row)
                raise RuntimeError(f"the replicas differ in {row[0][0]}: sha256 {digests}")
    return whole


def leaves(value, name=""):
    """Yield (name, leaf) for all that is in nested dicts, lists and tuples: "optimizer.state.0"."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def digest(value):
    """Return the sha256, 12 digits, of all tensors (bit for bit) and other values in value."""
    sha256 = hashlib.sha256()
    for name, leaf in leaves(value):
        sha256.update(f"{name} ".encode())
        if torch.is_tensor(leaf):
            sha256.update(leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        else:
            sha256.update(repr(leaf).encode())
    return sha256.hexdigest()[:12]


def shortened(error):
    """Return type and text of an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# ---- Go in time ----


def leave_on_sigterm(timeout):
    """Return a function that says, on all ranks alike, whether one of them got SIGTERM.

    Call this before the first step, and the function in each step, on all ranks: if it is true,
    save and return. It exchanges one number over the CPU (Gloo), beside the work of a GPU.
    timeout: as in start.

    torchrun sends SIGTERM when it is stopped, when a machine joins, and when a rank failed, and
    kills 30 s later. Slurm sends it ahead of the time limit. Without it, all steps since the last
    save are lost. From now on, a rank that waits in vain when SIGTERM comes ends by itself.
    """
    asked = note_sigterm()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def asked_to_leave():
        flag = torch.tensor(float(asked.is_set()))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if asked.is_set():
            log("asked to leave (SIGTERM)", every_rank=True)
        return flag.item() > 0

    return asked_to_leave


def note_sigterm():
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


def obey_rank(worker):
    """Let this loader's worker end with its rank, and not before. For worker_init_fn.

    worker: its number. torchrun's SIGTERM goes to the workers, too. Without it, they end at once,
    their rank fails, and the step is lost; and a worker whose rank was killed in the worker's first
    moments stays for ever. (A program that a worker starts ignores SIGTERM, too.)
    """
    if not hasattr(signal, "sigtimedwait"):  # a Mac: torchrun's SIGTERM costs the steps there
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


def leave(finished):
    """Close the connections. If not finished, exit with status 143, which SIGTERM has by custom.

    Call it when the function with your model has returned, after no error (NCCL would hang).
    Without it, Python may abort as it exits, all work done (pytorch issue 190489); and torchrun and
    Slurm take a job that left early for a finished one.
    """
    gc.collect()  # frees DDP, whose threads would live on
    dist.destroy_process_group()
    if not finished:
        sys.exit(128 + signal.SIGTERM)
