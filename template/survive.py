"""What keeps a training job alive. Copy it beside train.py; nothing here needs a change.

Plain functions and one class. They call nothing of yours but state_dict() and load_state_dict().
"All ranks call it": if one does not, the others wait. "It stops": it says why, and exits.
"""

import contextlib
import fcntl
import gc
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import select
import signal
import socket
import sys
import threading
import time
import zipfile
from datetime import timedelta

PARENT, ABOVE = os.getppid(), []  # now: importing torch takes seconds, and torchrun may end
GRACE = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))  # seconds; then torchrun kills
SIGTERM_CAME = threading.Event()
SHARED_STORE = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by all attempts
NEW_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, with --rdzv-backend=c10d"

# PARENT is torchrun, or a program between torchrun and python (a shell without exec, nsys), which
# has this rank's variables. Then ABOVE has handles of what is above it, torchrun's the last.
with contextlib.suppress(OSError, AttributeError, KeyError):  # a Mac, another user, no torchrun
    pid, mine = PARENT, f"\0TORCHELASTIC_ERROR_FILE={os.environ['TORCHELASTIC_ERROR_FILE']}\0"
    while mine.encode() in b"\0" + pathlib.Path(f"/proc/{pid}/environ").read_bytes():
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ABOVE.append(os.pidfd_open(pid))

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # keep this: imported later, by DDP, it would keep the group open


def start(timeout=600):
    """Join the job; return this process's torch.device, a GPU of its own or the CPU.

    timeout: seconds that ranks wait for each other: more than a save takes. torchrun has started
    it; or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=end_with_torchrun, daemon=True).start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.setdefault("LOCAL_WORLD_SIZE", "1"))
    one_machine = local_world_size == world_size
    if one_machine:  # nobody else has to reach these processes: interface 1 is the loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))
    device, backend = pick_device(int(os.environ.setdefault("LOCAL_RANK", "0")))
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads == 0 or threads == 1 < local_world_size:  # 1 for several ranks is torchrun's own
        threads = max(1, cores() // local_world_size)
    torch.set_num_threads(threads)
    if world_size > 64:  # else Gloo connects each rank with each, and its start asks N x N times
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    attempt, limit = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), timedelta(seconds=timeout)
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if SHARED_STORE and one_machine:  # torchrun served it before it started this rank, or died
            socket.create_connection(address).close()
        store = dist.TCPStore(  # torchrun's, or rank 0 serves it. Do not wait yet: roll_call does
            *address,
            timeout=limit,
            is_master=rank == 0 and not SHARED_STORE,
            wait_for_workers=False,
            multi_tenant=True,
        )
        if one_machine:  # torchrun's store has the addresses of the dead (pytorch issue 135712)
            store = dist.PrefixStore(f"attempt {attempt}", store)
        roll_call(store, rank, world_size, timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )  # (xpu: a Gloo group would fail)
    except Exception as error:  # names, store and connections raise different types
        stop(explain(error, one_machine), status=1)
    show = sys.excepthook
    sys.excepthook = lambda *error: (show(*error), name_the_stopped(error[1], store))
    places = [*enumerate(gathered((socket.gethostname(), f"{device}, pid {os.getpid()}")))]
    for name in dict.fromkeys(name for _, (name, _) in places):
        ranks = [f"rank {number} ({mine})" for number, (its, mine) in places if its == name]
        log(f"attempt {attempt}, {backend}: {name} has {', '.join(ranks)}")
    if ABOVE:
        log("note: a program stands between torchrun and python. A shell? Write exec before python")
    if SHARED_STORE and not one_machine and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        log(f"note: a restart, or a machine that joins, will fail: set {NEW_STORES}")
    return device


def end_with_torchrun():
    while os.getppid() == PARENT and not select.select(ABOVE, [], [], 0.5)[0]:
        pass
    if SIGTERM_CAME.wait(0.5):  # it ends a shell at once, and torchrun then: still save
        time.sleep(GRACE)
    os._exit(1)


def pick_device(local_rank):
    """Return (device, backend): GPU number local_rank with its backend, or the CPU with Gloo."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(gpu or "cpu")
    if backend != "gloo":  # a Mac's GPU has Gloo alone, which cannot send its tensors
        if local_rank >= torch.accelerator.device_count():
            raise SystemExit("each process needs a GPU: start fewer, or set CUDA_VISIBLE_DEVICES=")
        torch.accelerator.set_device_index(local_rank)  # without it, all take memory of GPU 0, too
        return torch.device(gpu.type, local_rank), backend
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # often faster
    return torch.device("cpu"), "gloo"


def cores():
    """Return how many cores the job may use here: by its mask, or by a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for names in ["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]:  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit ("max")
            texts = [pathlib.Path("/sys/fs/cgroup", name).read_text() for name in names]
            quota, period = map(int, " ".join(texts).split())
            count = min(count, max(1, quota // period)) if quota > 0 else count
    return count


def roll_call(store, rank, world_size, timeout):
    """Wait for all ranks: rank 0 for each, the others for its word (N requests, not N x N)."""

    def come(keys, seconds):
        with contextlib.suppress(dist.DistStoreError):  # (check() would ask without a limit)
            return store.wait(keys, timedelta(seconds=seconds)) is None

    keys, missing = [f"rank {number}" for number in range(world_size)], "rank 0"
    store.set(keys[rank], "here")
    if rank == 0:
        absent = () if come(keys, timeout) else (key for key in keys if not come([key], 1))
        missing = ", ".join(itertools.islice(absent, 10))
        store.set("missing", missing)
    elif come(keys[:1], timeout) and come(["missing"], timeout + 30):
        missing = store.get("missing").decode()
    if missing:
        stop(f"{missing} did not come within {timeout:g} s: did it fail (look above), or hang?", 1)


def explain(error, one_machine):
    """Return one line: the likeliest cause, its cure, and what torch said."""
    server, said = "torchrun" if SHARED_STORE else "rank 0", repr(error)[:300]
    cause = (
        f"look for an error of {server} on {os.environ['MASTER_ADDR']}, or run"
        " tools/check_machines.py on each machine: it finds out why"
    )
    if "remote=[127." in said or "remote=[::1" in said:
        cause = (
            "a machine gives the others an address that they cannot reach: set"
            " GLOO_SOCKET_IFNAME to an interface that ip -br address shows"
        )
    if SHARED_STORE and not one_machine and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        cause = f"a restart finds the addresses of the dead: set {NEW_STORES}"
    return f"{cause} ({said})"


def name_the_stopped(error, store):
    """After a timeout (of Gloo: NCCL's ends the process itself), print which ranks have stopped."""
    rank, world_size, said = os.environ["RANK"], int(os.environ["WORLD_SIZE"]), str(error).lower()
    whom = ["a store that does not answer: rank 0, or its machine, has stopped"]

    def ask():  # in a thread, as these calls have no limit of their own
        with contextlib.suppress(dist.DistError):  # the store may be gone, too
            store.set(f"rank {rank} failed", "")
            ranks = range(world_size) if store.add("failed", 1) == 1 else []  # one asks for all
            time.sleep(2)  # when one rank gives up, those that wait for it fail a moment later
            absent = [str(r) for r in ranks if not store.check([f"rank {r} failed"])]
            whom[0] = f"rank {', '.join(absent) or '?'}: it has stopped, or waits elsewhere"

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    if ("timed out" in said or "timeout" in said) and "dataloader" not in said:  # its own worker
        print(f"[rank {rank}/{world_size}] waited in vain for {whom[0]}\n", end="", flush=True)


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(*values, sep=" ", every_rank=False):
    """Print as print does, the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        text = sep.join(map(str, values))
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {text}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line in place of a traceback: for errors that the user can mend."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # mostly, ranks fail alike: local rank 0 says it, and torchrun ends this one
    name = os.path.basename(sys.argv[0])
    print(f"{name}: error: {socket.gethostname()}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def seed(*numbers):
    """Seed torch (GPUs, too), numpy and random from these numbers and texts, however many."""
    value = int(hashlib.sha256(repr(numbers).encode()).hexdigest()[:16], 16)
    random.seed(value)
    numpy.random.seed([value % 2**32, value >> 32])
    torch.manual_seed(value)  # a generator of your own: by torch.randint(2**62, ()).item()


class Snapshot:
    """The state of the job in one file, whole at any moment, on the disk of each machine.

    path: of that file. plan: a text that stays the same as long as the job lasts, as the size of
    the batches does. parts: name=object for all that has a state_dict(): the model without DDP, the
    optimizer, a GradScaler. writer: whether this rank writes on its disk; one does. All ranks make
    it and call its methods. It stops if path cannot be written, or another job has it.
    """

    def __init__(self, path, plan, **parts):
        self.path, self.plan, self.parts = path, plan, parts
        self.writer = claim(path)
        self.known = None  # who wrote the file: [job, attempt, step]
        self.job = self.attempt = gathered(os.urandom(16).hex())[0]

    def load(self, **new):
        """Load all parts from the newest file of any machine; return the rest of it, a dict.

        new: that rest in a new job, or of names that the file has not. Give step, how many are
        done. The newest is sent to all ranks (three times its size of memory on each) and disks. It
        stops, and touches no file, if one is damaged, or of another model, job or plan.
        """
        if "step" not in new:
            stop("Snapshot.load needs step=, how many are done in a new job: load(step=0)")
        path, mine, content = self.path, None, b""
        if self.writer and os.path.exists(path):
            try:
                content = pathlib.Path(path).read_bytes()
                with zipfile.ZipFile(io.BytesIO(content)) as archive:  # the format of torch.save
                    self.known = json.loads(archive.comment or "null")  # fails if it is cut short
                    if damaged := archive.testzip():  # torch.load does not look at the checksums
                        raise ValueError(f"wrong checksum of {damaged}")
                # weights_only: an ordinary pickle can run any code while it is read.
                step = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["step"]
                mine = step, self.known, socket.gethostname(), len(content)
            except Exception as error:  # a damaged file can raise almost any exception
                stop(
                    f"cannot continue from {path} ({repr(error)[:300]}): if it is damaged, move it"
                    " away to start anew; if it is another script's, choose another path",
                    1,
                )
        found = gathered(mine)
        jobs = {its[1][0]: its[2] for its in found if its and its[1]}
        if len(jobs) > 1:  # the one that has trained longer would replace the other
            stop(
                f"{' and '.join(jobs.values())} have snapshots of different jobs: move away {path}"
                " on each machine whose job is not to go on",
                1,
            )
        self.job = next(iter(jobs), self.job)
        if not any(found):
            return new
        newest = max(range(len(found)), key=lambda rank: found[rank][0] if found[rank] else -1)
        step, known, machine, size = found[newest]
        content = bytearray(content if dist.get_rank() == newest else size)
        for piece in torch.frombuffer(content, dtype=torch.uint8).split(2**24):  # 16 MiB at a time
            take_from(newest, piece)
        try:  # map_location: otherwise tensors go to the GPU that they were saved from
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(state.pop(name))
            plan = state.pop("plan")
        except Exception as error:
            stop(
                f"cannot continue from {path} ({repr(error)[-400:]}): it is whole, but not of this"
                " model and these parts, or memory is short: keep it, or choose another path",
                1,
            )
        if plan != self.plan:
            stop(
                f"{path} goes on with batches of {plan}, as before: with {self.plan}, some would"
                " come twice or never",
                1,
            )
        if self.writer and self.known != known:  # if the others die now, this disk must have it
            save(content, path)
            self.known = known
        dist.barrier()
        log(f"resumed from {path} after step {step}, saved on {machine}")
        return {**new, **state}

    def save(self, **numbers):
        """Save all parts, and these: step; plain numbers, texts and tensors, in lists and dicts.

        When it returns, every disk has the file. Buffers (BatchNorm's means) are made rank 0's. All
        else must be alike on all ranks: RuntimeError names the first that differs. It stops if save
        does, or if somebody else has written path meanwhile, whose file stays.
        """
        if "step" not in numbers:
            stop("Snapshot.save needs step=, how many are done: save(step=step)")
        same_buffers(*self.parts.values())
        compare(**self.parts, **numbers)
        if self.writer:  # two halves of a job may train on after a cut
            with contextlib.suppress(FileNotFoundError), zipfile.ZipFile(self.path) as archive:
                if json.loads(archive.comment or "null") != self.known:
                    stop(
                        f"another job, or a lost part of this one, has written {self.path}"
                        " meanwhile: its file stays. End one, or give it another path",
                        1,
                    )
            # Who wrote it is no part of the state: runs that end alike have equal states.
            self.known = [self.job, self.attempt, str(numbers["step"])]
            states = {name: part.state_dict() for name, part in self.parts.items()}
            save({**states, "plan": self.plan, **numbers}, self.path, self.known)
        dist.barrier()


def save(state, path, written_by=None):
    """Write state to path. If the process dies meanwhile, the old file stays, whole.

    state: tensors, numbers and texts in lists and dicts; or bytes, written as they are. written_by:
    Snapshot's. It stops if state cannot be written, or could not be loaded again.
    """
    # In the same folder: a move, not a copy. By machine: two halves of a job may write on one disk.
    target = os.path.realpath(path)  # a link to it stays one
    temporary = f"{target}.{socket.gethostname()}.tmp"
    try:
        with open(temporary, "w+b") as file:
            if raw := isinstance(state, bytes | bytearray):
                file.write(state)
            else:
                torch.save(state, file)
                with zipfile.ZipFile(file, "a") as archive:
                    archive.comment = json.dumps(written_by).encode()
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave an empty file at path
        try:  # mmap: this reads few bytes
            raw or torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            strange = [
                f"{name} is a {type(leaf)}"
                for name, leaf in leaves(state)
                if type(leaf).__module__.partition(".")[0] not in ("builtins", "torch")
            ]
            stop(
                f"{path} stays as it was, since the new one could not be loaded: save tensors and"
                f" plain numbers ({(strange or [repr(error)[:300]])[0]})",
                1,
            )
        os.replace(temporary, target)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        stop(f"cannot write {path}, which stays as it was; is the disk full? ({error})", 1)
    finally:
        pathlib.Path(temporary).unlink(missing_ok=True)  # mostly, it has been moved


def claim(path):
    """Return whether this rank is the one that writes path on its disk; it has the lock, then."""
    target, mine, problem = os.path.realpath(path), False, None
    mark = f"{target}.{gathered(os.urandom(16).hex())[0]}.tmp"
    for turn in 0, 1:  # rank 0 comes first. Of all that share a disk, one can make the file
        try:
            if turn == min(dist.get_rank(), 1):
                open(mark, "x").close()
                mine = True
        except OSError as error:  # another rank made it, or path cannot be written
            problem = None if isinstance(error, FileExistsError) else error.strerror
        dist.barrier()
    if problem:
        stop(f"cannot write {path} ({problem}): choose another path")
    if mine:
        os.remove(mark)
        lock(target, GRACE * bool(ABOVE))  # behind a shell, the last attempt may still save
    return mine


def lock(path, patience):
    try:  # by machine: if one is cut off, its lock must not stop the others. Never closed.
        file = os.open(f"{path}.{socket.gethostname()}.lock", os.O_WRONLY | os.O_CREAT, 0o666)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a loader's workers do not inherit it
    except BlockingIOError:
        if patience <= 0:
            stop(f"another job is running with {path}: end it, or choose another path", 1)
        time.sleep(1)
        lock(path, patience - 1)
    except OSError as error:
        log(f"note: {path} is not locked ({error.strerror}): start no second job", every_rank=True)


@contextlib.contextmanager
def settled(*models):
    """Let one forward and backward of each DDP model run here; then put its state_dict() back.

    After its first backward, DDP groups gradients anew. That changes the order of additions and, on
    three ranks or more, the rounding. Without this pass, a resumed run ends with other weights.
    """

    def kept(value):  # on the CPU: at a resume, GPUs hold the optimizer's state already
        return value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value

    states = [{name: kept(its) for name, its in model.state_dict().items()} for model in models]
    yield
    for model, state in zip(models, states, strict=True):
        try:
            model.load_state_dict(state)
        except RuntimeError as error:  # a snapshot could not be loaded, either
            stop(
                f"the first forward has changed the model ({repr(error)[-200:]}): make all buffers"
                " in __init__, or with register_buffer(..., persistent=False)",
                1,
            )
        model.zero_grad()


def same_buffers(*modules):
    """Give all ranks rank 0's buffers of these modules (BatchNorm's means). All ranks call it."""
    for module in modules:
        for buffer in module.buffers() if isinstance(module, torch.nn.Module) else []:
            take_from(0, buffer)


def take_from(source, tensor):
    """Copy rank source's tensor into that of each rank; it may be on any device."""
    device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    sent = tensor.detach().to(device).contiguous()
    dist.broadcast(sent, src=source)
    tensor.detach().copy_(sent)


def compare(**parts):
    """Return the sha256 of all this, 12 digits. RuntimeError names what differs between the ranks.

    parts: name=object with a state_dict(), or tensors, arrays, numbers, texts, and objects that
    hold such, in tuples, lists, dicts. All ranks call it. It stops at what it cannot look into.
    """
    states = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in parts.items()}
    rows = []
    for name, leaf in leaves(states):
        try:
            rows.append((name, *checksum(leaf)))
        except Exception as error:  # of many types: a lock, a function, a sparse tensor
            what = f"{name}, a {type(leaf).__qualname__} ({repr(error)[:200]})"
            stop(f"cannot compare {what}: give tensors, NumPy arrays, numbers and texts", 1)
    if len({*gathered(checksum(rows))}) > 1:
        for row in itertools.zip_longest(*gathered(rows), fillvalue=("the number of values", "")):
            if len({*row}) > 1:
                each = dict.fromkeys(row)
                found = ", ".join(f"rank {row.index(its)}: {' '.join(its)}" for its in each)
                raise RuntimeError(
                    f"the ranks differ in {row[0][0]} ({found[:500]}). Should it be alike (a best"
                    " score, an average)? Update it on all ranks, by an all-reduced metric. Is it a"
                    " rank's own? Gather it. Look for 'the ranks differ' in template/README.md"
                )
    return checksum([(name, digest) for name, _, digest in rows])[1]


def checksum(leaf):
    """Return its type, and the sha256 of what it holds: no address counts, and no set's order."""
    kind, held = type(leaf).__qualname__, leaf
    if torch.is_tensor(leaf):
        kind = f"{leaf.dtype} {[*leaf.shape]}"
        held = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # no copy
    elif isinstance(leaf, numpy.ndarray) and not leaf.dtype.hasobject:
        kind, held = f"{leaf.dtype} {[*leaf.shape]}", leaf.tobytes()
    elif isinstance(leaf, set | frozenset):
        held = sorted(map(checksum, leaf))
    elif not isinstance(
        leaf, int | float | complex | str | bytes | type | dict | list | tuple | None
    ):
        stored = leaf.__reduce_ex__(2)  # what pickle would store of an object
        stored = leaves(stored if isinstance(stored, str) else stored[1:])
        held = [(name, *checksum(its)) for name, its in stored]
    content = held if isinstance(held, bytes | numpy.ndarray) else repr(held).encode()
    return kind, hashlib.sha256(content).hexdigest()[:12]


def leaves(value, name=""):
    """Yield (name, leaf) for all that is in nested dicts, lists and tuples."""
    if isinstance(value, dict | list | tuple) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def leave_on_sigterm(ctrl_c=False):
    """Return a function, asked_to_leave, that says whether any rank got SIGTERM, on all alike.

    ctrl_c: obey Ctrl-C, too. Call this before the first step; then asked_to_leave() in each, on all
    ranks. If it is true, save and return. (On a GPU, it answers a step later: nobody waits for the
    GPU.) torchrun sends SIGTERM when it is stopped, a machine joins, or a rank failed.
    """
    asked, signals = [], {signal.SIGTERM, *[signal.SIGINT] * ctrl_c}
    for each in signals:
        signal.signal(each, lambda *_: asked.append(True))
    # Python runs that lambda only between two of its instructions: not while a collective waits for
    # a dead rank. The byte that the signal leaves in this pipe comes at once: the rank ends itself.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # a process has only one

    def watch():
        while os.read(reader, 1)[0] not in signals:
            pass
        SIGTERM_CAME.set()
        time.sleep(max(GRACE - 10, GRACE / 2))  # it may wait for a slow save
        if not asked:
            os._exit(128 + signal.SIGTERM)

    # A forked process has this pipe, too, and its terminate() would end this one.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    threading.Thread(target=watch, daemon=True).start()
    device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    if device != "cpu":  # a step's answer, on its way from the GPU
        answer, arrived = torch.zeros(1).pin_memory(), torch.Event(device)
        arrived.record()

    def asked_to_leave():
        flag = torch.full((1,), float(bool(asked)), device=device)  # (torch.tensor would wait)
        dist.all_reduce(flag)  # in the group that is there: a new one has N x N connections
        if device == "cpu":
            return flag.item() > 0
        arrived.synchronize()
        earlier = answer.item() > 0
        answer.copy_(flag, non_blocking=True)
        arrived.record()
        return earlier

    return asked_to_leave


def obey_rank(worker):
    """DataLoader's worker_init_fn: a worker ends with its rank, and not by torchrun's SIGTERM."""
    if not hasattr(signal, "sigtimedwait"):  # a Mac: torchrun's SIGTERM costs the steps there
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    rank = multiprocessing.parent_process().pid

    def watch():
        while os.getppid() == rank:
            asked = signal.sigtimedwait({signal.SIGTERM}, 1)  # None after a second
            if asked and asked.si_pid == rank:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def leave(finished):
    """Close the connections; if not finished, exit with 143, the status of SIGTERM."""
    gc.collect()  # frees DDP, if the function with your model has returned (pytorch issue 190489)
    dist.destroy_process_group()
    if not finished:
        sys.exit(128 + signal.SIGTERM)
