"""How do I write a training script that survives being killed at any step?

    for step in range(load_snapshot(path, batch_size, model, optimizer, scheduler) + 1, steps + 1):
        torch.manual_seed(SEED + step * world_size + rank)  # dropout: other masks in every step
        share = draw(step, batch_size, len(windows))[rank::world_size]  # of this step's examples
        ...  # forward, backward, optimizer.step(), scheduler.step(): see add_up_gradients
        if rank == 0 and (step % save_every == 0 or step == steps):
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                  "scheduler": scheduler.state_dict(), "batch_size": batch_size}, path)

Start your own script from this one. A small GPT learns to predict the next character of a text.
torchrun starts the ranks (processes; on GPUs: --nproc-per-node=gpu, one for each). After one has
died, it starts all of them again, at most --max-restarts times. If you stop torchrun by SIGTERM,
the ranks save after the step that they are in, and leave. During a validation, they have saved
already. All that is random follows from the number of the step. So a run that goes on from its
snapshot ends as if it had never been killed. On a CPU, with the same number of ranks, its weights
are the same bit for bit.

    torchrun --standalone --nproc-per-node=2 recipes/train_by_steps.py

    [rank 0/2] data: 14432 + 100 windows of 32 characters, Python's help
    [rank 0/2] batch size 32: 16 + 16 windows on the ranks, each in 2 micro-batches
    [rank 0/2] step   10/60 | loss 3.0983 | rate 1.00e-02 | norm  0.36 |   18129 tokens/s
    [rank 0/2] step   20/60 | loss 2.9560 | rate 9.30e-03 | norm  0.40 |   18204 tokens/s
    [rank 0/2] step   20/60 | validation loss 3.0814 | saved in train_by_steps.pt
    ...
    [rank 0/2] 2 replicas are identical, sha256 a544c13086bd

Your figures will differ: each version of Python has another help text (this is that of 3.11.7), and
CPUs round differently. But delete train_by_steps.pt, and let one rank kill itself in step 30: your
second run ends with the sha256 of your first.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
        recipes/train_by_steps.py 60 20 --crash-step 30

Replace what is marked "your": the data, the model, the loss. Keep the rest. In a script that loads
its weights again and no more, AdamW forgets its moments, and the learning rate warms up again.
Dropout draws other masks, and examples come twice or never. A kill in the middle of a save leaves
half a file. Restarted ranks wait for dead ones. One inf in a gradient makes all weights nan.
"""

import argparse
import contextlib
import errno
import fcntl
import functools
import gc
import hashlib
import math
import os
import signal
import socket
import sys
import threading
import time
import zipfile
from datetime import timedelta
from pydoc_data.topics import topics

LAUNCHER = os.getppid()  # asked now: importing torch takes seconds

import torch
import torch.distributed as dist
import torch.distributed.nn  # else DDP imports it later, which keeps the group alive to the end
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 0
TIMEOUT = timedelta(minutes=10)  # how long ranks wait: also while one of them saves or compiles
REPORT_EVERY = 10  # steps
MOST_SKIPPED = 5  # steps in a row whose gradient is inf or nan

# Your settings. These take some seconds on a CPU.
CONTEXT = 32  # the model sees windows of so many characters
VALIDATION = 100  # windows that are kept from training
VOCABULARY, WIDTH, HEADS, LAYERS = 128, 64, 4, 2
LEARNING_RATE, WARM_UP_STEPS, CLIP = 1e-2, 10, 1.0


@record  # if a process fails, torchrun's report shows its traceback
def main():
    args = parse_args()
    exit_with_launcher()  # if torchrun is killed, exit too

    # Step 1: start. Every process learns who it is, and takes its device. torchrun says so in
    # environment variables. LOCAL_RANK: the number of the process on this machine, and of its GPU.
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))  # torchrun has given each one thread only
    listen_locally()  # nobody else has to reach these processes

    # Step 2: meet. Every process leaves its network address in a store that torchrun keeps, waits
    # for the others, and connects to them: they are a process group. The store outlives a restart.
    # So each attempt has its own prefix there, and never finds the addresses of dead ranks.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # reads RANK, ...
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    if rank == 0:
        lock(args.snapshot_path)  # two jobs must not write one snapshot
    roll_call(store, rank, world_size)  # if a rank does not come, say which
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT,
        device_id=device if backend == "nccl" else None)  # NCCL wants to know its GPU

    finished = train(device, args)  # steps 3, 4 and 5

    # Step 6: leave. First free what train has left: otherwise Python may abort as it exits. Not in
    # a "finally": after an error on one rank, NCCL would hang here.
    gc.collect()
    dist.destroy_process_group()
    if not finished:  # torchrun must see that the job ended early
        sys.exit(128 + signal.SIGTERM)  # the status of a process that was ended by SIGTERM


def train(device, args):
    # rank: the number of this process in the job of world_size processes. attempt: how often
    # torchrun has started them again.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log(f"attempt {attempt}, pid {os.getpid()}, {device}, {dist.get_backend()}", every_rank=True)

    # Step 3: share the data. Every rank can read all of it, and takes its share of each batch.
    windows, validation = load_text()  # your data: anything that a tensor of indices can index
    check_batch_size(args, len(windows))
    log(f"data: {len(windows)} + {len(validation)} windows of {CONTEXT} characters, Python's help")
    shares = " + ".join(str(len(range(r, args.batch_size, world_size))) for r in range(world_size))
    log(f"batch size {args.batch_size}: {shares} windows on the ranks, each in {args.accumulate}"
        " micro-batches")

    torch.manual_seed(SEED)  # every run starts from the same weights
    model = GPT(args.dropout).to(device)  # your model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, functools.partial(warm_up_and_cosine, total_steps=args.total_steps))

    # Go on from the snapshot. All ranks read it: DDP copies weights, but no optimizer's state.
    steps_done = load_snapshot(args.snapshot_path, args.batch_size, model, optimizer, scheduler)
    if steps_done > 0:
        log(f"attempt {attempt}: resumed from {args.snapshot_path} after step {steps_done}")

    # Step 4: wrap the model. DDP (DistributedDataParallel) copies rank 0's weights to all replicas:
    # each rank has one. In loss.backward(), it replaces gradients by their mean over all ranks.
    model = DDP(model, gradient_as_bucket_view=True)
    settle_reduction_order(model, validation[:1].to(device), args)

    # SIGTERM asks this process to leave: torchrun sends it when you stop it, or when a rank failed,
    # and kills 30 s later. An epoch could take longer, so the ranks agree on it in every step: over
    # the CPU (Gloo), beside the work of the GPU. (Python has one signal.set_wakeup_fd(), which this
    # uses: do not use recipes/who_is_missing.py, too. The later one disables the other.)
    asked_to_leave = leave_on_sigterm()
    flags = dist.new_group(backend="gloo", timeout=TIMEOUT)

    # Step 5: train. Every step averages the gradients; rank 0 reports and saves.
    skipped, clock, steps_reported = 0, time.perf_counter(), steps_done
    for step in range(steps_done + 1, args.total_steps + 1):
        if step == args.crash_step and attempt == 0 and rank == world_size - 1:
            crash(step)

        # The seed of the dropout: on one number of ranks, no other step or rank has the same.
        # (SEED + step + rank would give rank 1 the masks that rank 0 has in the next step.)
        torch.manual_seed(SEED + step * world_size + rank)
        share = draw(step, args.batch_size, len(windows))[rank::world_size]
        buffers = [buffer.clone() for buffer in model.buffers()]
        loss = add_up_gradients(model, windows, share, args)
        # From here on, every rank has the same gradients, so the same norm: it takes the same step.
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        rate = optimizer.param_groups[0]["lr"]
        # An inf or nan on one rank is in the mean of all, and would spoil the weights for good.
        skipped = 0 if norm.isfinite() else skipped + 1  # (this waits for the GPU)
        if skipped == 0:
            optimizer.step()
        elif skipped == MOST_SKIPPED:
            raise RuntimeError(f"inf or nan in the gradient of {skipped} steps, up to step {step}")
        else:  # the forward pass has put the inf into BatchNorm's running mean, too
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        scheduler.step()
        optimizer.zero_grad()

        if step % REPORT_EVERY == 0 or step == args.total_steps:
            dist.all_reduce(loss)  # the sum over the ranks: all call it, rank 0 prints it
            loss = loss.item()  # waits for the GPU: the clock must count finished work
            tokens = (step - steps_reported) * args.batch_size * CONTEXT
            speed = tokens / (time.perf_counter() - clock)
            log(f"step {step:4d}/{args.total_steps} | loss {loss:.4f} | rate {rate:.2e}"
                f" | norm {norm.item():5.2f} | {speed:7.0f} tokens/s")
            clock, steps_reported = time.perf_counter(), step

        leaving = step < args.total_steps and any_rank(asked_to_leave.is_set(), flags)
        if step % args.save_every == 0 or step == args.total_steps or leaving:
            # An inf or nan must not replace a good snapshot.
            if any_rank(rank == 0 and not is_finite(model.module), flags):
                raise RuntimeError(f"inf or nan in the weights or buffers after step {step}")
            # Rank 0 alone writes a new file, then moves it over the old one: a crash meanwhile
            # leaves the old one intact. No random state is saved: it follows from the step.
            # (An average of the weights belongs here, too: averaged.state_dict().)
            if rank == 0:
                save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                      "scheduler": scheduler.state_dict(), "step": step,
                      "batch_size": args.batch_size}, args.snapshot_path)
            note = ""
            if not leaving:
                # After the save: it could take longer than SIGTERM leaves. A validation that was
                # killed does not come again. (To keep the best model, too: save it here, with its
                # loss, in a file of its own.)
                note = f" | validation loss {validate(model, validation, device, args):.4f}"
            log(f"step {step:4d}/{args.total_steps}{note} | saved in {args.snapshot_path}")
            clock, steps_reported = time.perf_counter(), step

        if leaving:
            who = "this rank was" if asked_to_leave.is_set() else "another rank was"
            log(f"{who} asked to leave (SIGTERM): end after step {step}", every_rank=True)
            dist.barrier()  # once one has left, torchrun ends the others: rank 0 must have saved
            return False

    # The snapshot may have all steps already.
    if steps_done >= args.total_steps:
        log("nothing left to train: ask for more steps, or delete the snapshot")
    check_replicas(model)
    return True


def load_snapshot(path, batch_size, model, optimizer, scheduler):
    """Load the snapshot at path; return the number of its step, which is 0 without one."""
    if not os.path.exists(path):
        return 0
    try:
        with zipfile.ZipFile(path) as archive:  # the format of torch.save
            if damaged := archive.testzip():  # torch.load does not look at the checksums
                raise ValueError(f"wrong checksum of {damaged}")
        # weights_only: an ordinary pickle can run any code while it is read. map_location:
        # otherwise the tensors go to the GPU that they were saved from, rank 0's.
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])  # otherwise AdamW has lost its moments
        scheduler.load_state_dict(snapshot["scheduler"])  # otherwise the warm-up begins again
        if snapshot["batch_size"] != batch_size:  # the epoch's slices would be others
            stop(f"{path} needs --batch-size {snapshot['batch_size']}, as before: with"
                 f" {batch_size}, examples would come twice or never", status=1)
        return snapshot["step"]
    except Exception as error:  # a damaged file can raise almost any exception
        reason = str(error).strip().partition("\n")[0]
        stop(f"cannot continue from {path} ({type(error).__name__}: {reason}): move it away to"
             " start anew, or choose another --snapshot-path if it is another script's", status=1)


def settle_reduction_order(model, batch, args):
    """Run DDP once without a step, so that a resumed run adds up gradients in the same order."""
    # DDP collects gradients in buckets, and regroups these once, after its first backward. That
    # changes the order of additions and, with three ranks or more, the rounding.
    model.eval()  # no dropout: this pass must not use up random numbers
    mean_loss(model, batch, args).backward()
    model.train()
    model.zero_grad()  # nor leave gradients


def is_finite(model):
    """Return whether all weights and buffers are finite."""
    return all(tensor.isfinite().all() for tensor in model.state_dict().values())


def draw(step, batch_size, count):
    """Return the indices of the examples in a step's batch, for all ranks together."""
    # An epoch is a shuffle of all count examples; each step takes the next slice of it. (The rest,
    # less than a batch, is left out; another epoch leaves out others.) The number of ranks plays no
    # part, so a job can go on with more or fewer. Keep its batch size: it makes the slices.
    # If you load data in worker processes: GlobalBatches in recipes/resume_mid_epoch.py, and
    # DataLoader(..., worker_init_fn=ignore_sigterm, multiprocessing_context="fork"), as Python 3.14
    # would start them by another process, which SIGTERM ends.
    epoch, place = divmod(step - 1, count // batch_size)
    return shuffled(epoch, count)[place * batch_size : (place + 1) * batch_size]


@functools.lru_cache(maxsize=1)  # so that a step need not shuffle again
def shuffled(epoch, count):
    """Return the indices from 0 to count - 1 in the order of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED + epoch))


def add_up_gradients(model, windows, share, args):
    """Set the gradients to those of the whole batch; return this rank's part of its mean loss."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    # Gradient accumulation: a batch that does not fit into memory is cut into micro-batches, as
    # many on every rank, and their gradients add up.
    micro_batches = share.tensor_split(args.accumulate)
    for i, indices in enumerate(micro_batches):
        batch = windows[indices].to(device)
        # no_sync: only the last micro-batch exchanges gradients. DDP decides that in its forward
        # pass, so forward and backward are inside.
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = mean_loss(model, batch, args)
            # This micro-batch's part of the batch. (Their sizes may differ by one example.)
            weight = len(indices) / args.batch_size
            # DDP takes the mean over the ranks; times their number, that is the sum.
            (loss * weight * dist.get_world_size()).backward()
        total += loss.detach() * weight  # loss.item() would make the CPU wait for the GPU
    return total


def any_rank(condition, group):
    """Return True on every rank if condition is true on any of them. All ranks must call it."""
    flag = torch.tensor(float(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag.item() > 0


@torch.inference_mode()
def validate(model, validation, device, args):
    """Return the mean loss on the validation set. Every window counts once over all ranks."""
    # The shares may differ by one, so no rank may wait for another: model.module is the model
    # without DDP.
    # This model has no buffers. If yours has BatchNorm: each rank's running mean is of its own
    # windows. Validate with rank 0's, which are saved. (If you validate an average of the weights,
    # do this for both models, or check_replicas fails: recipes/weights_to_serve.py.)
    for buffer in model.module.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in validation[dist.get_rank() :: dist.get_world_size()].split(64):
        total += mean_loss(model.module, batch.to(device), args) * len(batch)
    model.train()
    dist.all_reduce(total)  # sum, then divide: a mean of means is wrong when shares differ
    return total.item() / len(validation)


def check_replicas(model):
    """Raise RuntimeError unless every rank holds the same weights and buffers, bit for bit."""
    sha256 = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())  # its bytes, of any type
    digest = sha256.hexdigest()[:12]
    digests = gathered(digest)
    if set(digests) != {digest}:
        raise RuntimeError(f"the replicas differ: sha256 {', '.join(digests)}")
    same = f"{len(digests)} replicas are identical" if len(digests) > 1 else "one replica"
    log(f"{same}, sha256 {digest}")


# ---- Yours: the loss, the schedule, the data, the model ----


def mean_loss(model, batch, args):
    """Return your loss, the mean over the batch: how badly each next character is predicted.

    The mean must be over examples. For one over tokens: recipes/unequal_micro_batches.py.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(inputs)
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def warm_up_and_cosine(steps_done, total_steps):
    """Return the learning rate of the next step, as a part of LEARNING_RATE."""
    if steps_done < WARM_UP_STEPS:
        return (steps_done + 1) / WARM_UP_STEPS
    progress = (steps_done - WARM_UP_STEPS) / max(1, total_steps - WARM_UP_STEPS)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def load_text():
    """Return windows of a text, int64 (N, CONTEXT + 1): for training, and for validation."""
    # The texts of all topics of help(), as in help("if"): every Python has them.
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    windows = characters.long().unfold(0, CONTEXT + 1, CONTEXT)
    return windows[:-VALIDATION], windows[-VALIDATION:]


class GPT(nn.Module):
    """A small GPT: characters, int64 (N, T), to logits of the next ones, (N, T, VOCABULARY)."""

    def __init__(self, dropout):
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(dropout) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, text):
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.characters(text) + self.positions(positions)
        return self.head(self.blocks(self.dropout(x)))


class TransformerBlock(nn.Module):
    """Attention, then an MLP: (N, T, WIDTH) to the same shape."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
                                 nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        qkv = self.queries_keys_values(self.norm(x)).unflatten(2, (3, HEADS, WIDTH // HEADS))
        heads = scaled_dot_product_attention(
            *qkv.permute(2, 0, 3, 1, 4), is_causal=True,
            dropout_p=self.dropout.p if self.training else 0.0)
        x = x + self.dropout(self.project(heads.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(x))


# ---- Helpers that are no part of the lesson ----


def save(state, path):
    """Write state to path. If the process dies meanwhile, path still holds the old file, whole."""
    temporary = f"{path}.tmp"  # in the same folder: a move to another disk would be a slow copy
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave an empty file at path
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        if os.path.exists(temporary):
            os.remove(temporary)
        stop(f"cannot write {path}, which stays as it was; is the disk full? ({error})", status=1)


def leave_on_sigterm():
    """Return an Event that SIGTERM sets. If the process waits for a dead rank just then, end it."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    # Python runs that line only between two of its instructions: not while a collective waits for
    # a rank that is gone. The byte that the signal leaves in this pipe comes at once.
    # After 30 s, torchrun kills. Until then, the wait may be one for a slow save.
    patience = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) - 10
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch():
        while signal.SIGTERM not in os.read(reader, 1):
            pass
        if not asked.wait(patience):
            os._exit(128 + signal.SIGTERM)

    # A forked process has this pipe, too: to end it by terminate() would end this one.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    threading.Thread(target=watch, daemon=True).start()
    return asked


def ignore_sigterm(worker):
    """What a loader's worker calls first: only its rank ends it, not torchrun's signal to all."""
    # A worker that ended before its rank would end that, too. One that ignored the rank's SIGTERM
    # would keep it from ending, after an error.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch():
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def exit_with_launcher():
    """End this process when torchrun is gone."""
    def watch():
        while os.getppid() == LAUNCHER:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def pick_device(local_rank):
    """Return (device, backend): for each process a GPU and NCCL, or the CPU and Gloo."""
    if not torch.cuda.is_available():
        if torch.cuda.device_count() and local_rank == 0:  # the driver counts GPUs, torch has none
            print("note: torch cannot use the GPU of this machine, and takes the CPU: is its driver"
                  f" too old for CUDA {torch.version.cuda}?\n", end="", flush=True)
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)  # otherwise every process also takes memory on GPU 0
    return torch.device("cuda", local_rank), "nccl"


def share_cores(local_world_size):
    """Divide this machine's cores among its processes."""
    # By default each process uses all cores (or, under torchrun, only one).
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world_size))
    # Linux: run as a batch job. Otherwise Gloo's threads preempt each other.
    if not torch.cuda.is_available():
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a container forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def listen_locally():
    """Let Gloo listen on this machine only: by default, anyone on its network can connect."""
    # Interface 1 is the loopback interface: lo on Linux, lo0 on a Mac.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))


def lock(path):
    """Stop if path cannot be written, or if another job has it. The lock ends with the process."""
    try:
        file = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT)  # never closed
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


def check_batch_size(args, count):
    """Stop if the batch does not give each rank something in each micro-batch."""
    smallest = dist.get_world_size() * args.accumulate
    if not smallest <= args.batch_size <= count:
        stop(f"--batch-size must be from {smallest} (a window for each of {dist.get_world_size()}"
             f" ranks in each of {args.accumulate} micro-batches) to {count}")


def crash(step):
    """Kill this process, to see that nothing is lost."""
    log(f"crash on purpose: SIGKILL in step {step}", every_rank=True)
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


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    """Return the arguments; stop if they, or the way of starting, cannot work."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("total_steps", type=int, nargs="?", default=60, help="60 by default")
    parser.add_argument("save_every", type=int, nargs="?", default=20, help="steps; 20 by default")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per step, all ranks")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches on each rank")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where it can")
    parser.add_argument("--snapshot-path", default="train_by_steps.pt")
    parser.add_argument("--crash-step", type=int, help="kill the last rank there, on attempt 0")
    args = parser.parse_args()
    if min(args.total_steps, args.save_every, args.accumulate) < 1:
        stop("TOTAL_STEPS, SAVE_EVERY and --accumulate must be 1 or more")
    if not 0 <= args.dropout < 1:
        stop("--dropout must be 0 or more, and less than 1")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        stop("this script is for one machine: use 03_multinode.py on several")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node=gpu, or the CPU"
             " with CUDA_VISIBLE_DEVICES= in front")
    return args


if __name__ == "__main__":
    main()
