"""A training script for one machine that survives being killed at any step.

Start your own script from this one. A small GPT learns to predict the next character of a text.
torchrun starts the ranks (processes; on GPUs: --nproc-per-node=gpu, one for each). After one has
died, it starts all of them again, at most --max-restarts times (0 by default). If you stop torchrun
by SIGTERM, the ranks save after the step that they are in, and leave. The same command goes on from
the snapshot. A kill costs the steps since the last save.

    torchrun --standalone --nproc-per-node=2 template/one_machine.py

    [rank 0/2] data: 14432 + 100 windows of 32 characters, Python's help; 451 steps an epoch
    [rank 0/2] batch size 32: 2 ranks x 2 micro-batches
    [rank 0/2] step   10/60 | loss 3.1046 | rate 1.00e-02 | norm  0.38 |   440 examples/s
    ...
    [rank 0/2] step   60/60 | training loss 2.7787, mean of 20 steps
    [rank 0/2] step   60/60 | saved in one_machine.pt
    [rank 0/2] step   60/60 | validation loss 2.7540 | best after step 60
    [rank 0/2] 2 replicas are identical, sha256 f1bec32bdac8

Your figures will differ: each version of Python has another help text (this is that of 3.11.7), and
CPUs round differently. Now delete one_machine.pt, and let a rank kill itself in step 30. On a
CPU, with as many ranks and cores, this run ends with the sha256 of your first one:

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
        template/one_machine.py 60 20 --crash-step 30

Replace what is marked "your": data, model, loss, metrics, optimizer, schedule, options. All of that
stands above the line "# ---- Keep this". Nothing below it needs a change, so you may leave it
unread. To count in epochs, give --epochs. To survive, your script needs:

    if it has                   a seed from    from rank 0, to validate   in the snapshot
    shuffled data               epoch          -                          step, size of the batches
    augmentation in workers     epoch, item    -                          -
    dropout                     step, rank     -                          -
    mixup's share (all alike)   step           -                          -
    AdamW, a schedule, fp16     -              -                          a state_dict() of each
    BatchNorm                   -              its buffers                the model's state_dict()
    EMA                         -              its buffers                its state_dict()
    best model, early stop      -              -                          best metrics, their step

For the last row, add up each metric over all ranks; a resumed run validates first. Whatever else
changes in training must be in the snapshot, too, as a tensor or a plain number, and alike on all
ranks, as rank 0's is saved. See losses in train, the sum of the loss since the last validation. (A
new job has none yet: start.get("queue", first_value).to(device), say.)

On GPUs, nobody has compared the bits yet. As far as is known, they need as many GPUs of the same
kind, and at the beginning of main torch.backends.cudnn.benchmark = False and
torch.use_deterministic_algorithms(True). (NCCL then does without NVLS, a way to add up whose sums
may differ from call to call.)

Then kill your own script at random moments: launch/kill_test.py. With --file one_machine.pt, it
compares all that is in the snapshot, the optimizer, too; with --file one_machine_best.pt, the
best model and its metrics.
"""

import argparse
import contextlib
import errno
import fcntl
import functools
import gc
import hashlib
import math
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
from pydoc_data.topics import topics

LAUNCHER = os.getppid()  # asked now: importing torch takes seconds

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # keep this: imported later, by DDP, it would keep the group open
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset

SEED = 0
ITEM_SEEDS = 10**9  # the seeds of items begin here, far above those of steps
TIMEOUT = timedelta(minutes=10)  # how long ranks wait: also while one of them saves or compiles
REPORT_EVERY = 10  # steps

# Your settings. These take some seconds on a CPU.
CONTEXT = 32  # the model sees windows of so many characters
VALIDATION = 100  # windows that are kept from training
VOCABULARY, WIDTH, HEADS, LAYERS = 128, 64, 4, 2
LEARNING_RATE, WARM_UP_STEPS, CLIP = 1e-2, 10, 1.0
DROPOUT = 0.1
EMA_DECAY = 0.9  # for 60 steps; 0.999 or more for a real training
WORKERS = 2  # processes of each rank that load data; 0: the rank itself does


@record  # if a process fails, torchrun's report shows its traceback
def main():
    args = parse_args()
    exit_with_launcher()  # if torchrun is killed, exit too

    # Step 1: start. Every process learns who it is, and takes its device. torchrun says so in
    # environment variables. LOCAL_RANK: the number of the process on this machine, and of its GPU.
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))  # by default, torchrun gives a rank one core
    listen_locally()  # nobody else has to reach these processes

    # Step 2: meet. Every process leaves its network address in a store that torchrun keeps, waits
    # for the others, and connects to them: they are a process group. The store outlives a restart.
    # So each attempt has its own prefix there, and never finds the addresses of dead ranks.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # reads RANK, ...
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    if rank == 0:
        lock(args.snapshot_path)  # two jobs must not write one snapshot
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT,
        device_id=device if device.type != "cpu" else None)  # GPUs only: which is mine

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
    # Your data: map-style Datasets (with len() and []) that give tuples of tensors and numbers.
    seed_all(SEED)  # if they are split at random: all ranks, and all restarts, need the same sets
    train_set, validation_set, source = load_sets(args)  # your data
    two_items = check_sets(train_set, validation_set, args)
    epoch_steps = len(train_set) // args.batch_size
    args.validate_every = args.save_every
    if args.epochs:
        args.total_steps, args.validate_every = args.epochs * epoch_steps, epoch_steps
    log(f"data: {len(train_set)} + {len(validation_set)} {source}; {epoch_steps} steps an epoch")
    log(f"batch size {args.batch_size}: {world_size} ranks x {args.accumulate} micro-batches")

    # Step 4: build the model, and wrap it.
    seed_all(SEED)  # every run starts from the same weights
    # (BatchNorm normalizes each rank's share of a micro-batch: see pitfalls/small_batch_norm.py.)
    model = GPT().to(device)  # your model
    # averaged.module is a model with the average of the weights over the last steps (EMA). The
    # first step copies the weights into it. (To average the initial ones, too: averaged.n_averaged
    # += 1. With use_buffers=False, buffers are copied, not averaged.)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY), use_buffers=True)
    optimizer = torch.optim.AdamW(  # your optimizer; groups of parameters as on one GPU
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    # Your schedule. It counts steps: an epoch has epoch_steps. (With another TOTAL_STEPS than
    # before, the first step after a resume still has the old rate. OneCycleLR, CosineAnnealingLR
    # and others would keep their old lengths.)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, functools.partial(warm_up_and_cosine, total_steps=args.total_steps))

    # Go on from the snapshot. All ranks read it: DDP copies weights, but no optimizer's state.
    # Whatever has a state_dict() belongs to its parts: in fp16, your GradScaler, too. The model
    # belongs there before DDP() wraps it: else all its names would begin with "module.".
    parts = {"model": model, "averaged": averaged, "optimizer": optimizer, "scheduler": scheduler}
    batches = f"{args.batch_size} of {len(train_set)} examples, seed {SEED}"
    start = load_snapshot(args.snapshot_path, parts, batches)
    step, best = start["step"], start["best"]  # step: how many are done
    # The sum of the loss over the steps since the last validation, and their number:
    losses = torch.tensor(start["losses"], dtype=torch.float64, device=device)
    if step > 0:
        log(f"attempt {attempt}: resumed from {args.snapshot_path} after step {step}")

    # DDP (DistributedDataParallel) copies rank 0's weights to all replicas: each rank has one. In
    # loss.backward(), it replaces gradients by their mean over all ranks.
    model = DDP(model, gradient_as_bucket_view=True)
    settle_reduction_order(model, two_items)

    # SIGTERM asks this process to leave: torchrun sends it when you stop it, or when a rank failed,
    # and kills 30 s later. An epoch could take longer. So in every step, the ranks tell each other
    # whether one was asked: over the CPU (Gloo), beside the work of the GPU.
    asked_to_leave = leave_on_sigterm()
    flags = dist.new_group(backend="gloo", timeout=TIMEOUT)

    # Step 5: train. Every step averages the gradients; rank 0 reports and saves.
    stop_early = False
    if start["due"]:  # this step's validation: a kill may have prevented it
        best, stop_early = validate_and_decide(step, best, averaged, model, validation_set, args)
    shares = GlobalBatches(range(step, args.total_steps), len(train_set), args.batch_size, rank,
                           world_size, args.accumulate)
    micro_batches = iter(loader_of(SeededItems(train_set), shares))
    clock, steps_reported = time.perf_counter(), step
    while step < args.total_steps and not stop_early:
        step += 1
        if step == args.crash_step and attempt == 0 and rank == world_size - 1:
            log(f"crash on purpose: SIGKILL in step {step}", every_rank=True)
            os.kill(os.getpid(), signal.SIGKILL)

        # Gradient accumulation: a batch that does not fit into memory comes in micro-batches.
        batch = [next(micro_batches) for _ in range(args.accumulate)]
        # The seed of the dropout: on one number of ranks, no other step or rank has the same.
        # (SEED + step + rank would give rank 1 the masks that rank 0 has in the next step.)
        seed_all(SEED + step * world_size + rank)
        loss = add_up_gradients(model, batch, step, args)
        dist.all_reduce(loss)  # the sum over the ranks, as rank 0 alone prints and saves it
        losses += torch.stack([loss, torch.ones_like(loss)])
        # From here on, every rank has the same gradients, so the same norm: it takes the same step.
        # An inf or nan on one rank is in the mean of all. It must not reach weights and snapshot.
        # (To leave out such a step, and for a GradScaler: recipes/clip_and_scale.py.)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP, error_if_nonfinite=True)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        update_average(averaged, model.module)  # alike on all ranks, without an exchange
        scheduler.step()
        optimizer.zero_grad()

        if step % REPORT_EVERY == 0 or step == args.total_steps:
            loss = loss.item()  # waits for the GPU: the clock must count finished work
            speed = (step - steps_reported) * args.batch_size / (time.perf_counter() - clock)
            log(f"step {step:4d}/{args.total_steps} | loss {loss:.4f} | rate {rate:.2e}"
                f" | norm {norm.item():5.2f} | {speed:5.0f} examples/s")
            clock, steps_reported = time.perf_counter(), step

        due = step % args.validate_every == 0 or step == args.total_steps
        if due:
            mean = losses[0] / losses[1]
            log(f"step {step:4d}/{args.total_steps} | training loss {mean:.4f}, mean of"
                f" {losses[1]:.0f} steps")
            losses.zero_()
        asked = torch.tensor(float(asked_to_leave.is_set()))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=flags)  # has any rank been asked?
        leaving = asked.item() > 0 and step < args.total_steps
        if due or leaving or step % args.save_every == 0:
            # Rank 0 alone writes a new file, then moves it over the old one: a crash meanwhile
            # leaves the old one intact. No random state is saved: it follows from the step. A
            # validation may take longer than SIGTERM leaves, so it comes after the snapshot. That
            # has the best of before, and due: a run that goes on from here validates first.
            if rank == 0:
                states = {name: part.state_dict() for name, part in parts.items()}
                save({**states, "step": step, "due": due, "best": best,
                      "losses": losses.tolist(), "batches": batches}, args.snapshot_path)
            log(f"step {step:4d}/{args.total_steps} | saved in {args.snapshot_path}")

        if leaving:
            who = "this rank was" if asked_to_leave.is_set() else "another rank was"
            log(f"{who} asked to leave (SIGTERM): end after step {step}", every_rank=True)
            dist.barrier()  # once one has left, torchrun ends the others: rank 0 must have saved
            return False

        if due:
            best, stop_early = validate_and_decide(
                step, best, averaged, model, validation_set, args)
            clock, steps_reported = time.perf_counter(), step

    if stop_early:
        log(f"stopped early: no better validation since step {best['step']}")
    elif step == start["step"]:  # the snapshot has all steps already
        log("nothing left to train: ask for more steps, or delete the snapshot")
    check_replicas(nn.ModuleList([model.module, averaged.module]))
    return True


def add_up_gradients(model, micro_batches, step, args):
    """Set the gradients to those of the whole batch; return this rank's part of its mean loss."""
    total = 0
    for i, batch in enumerate(micro_batches):
        # no_sync: only the last micro-batch exchanges gradients. DDP decides that in its forward
        # pass, so forward and backward are inside.
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = mean_loss(model, batch, step)
            # This micro-batch's part of the batch. (Their sizes may differ by one example.)
            weight = len(batch[0]) / args.batch_size
            # DDP takes the mean over the ranks; times their number, that is the sum.
            (loss * weight * dist.get_world_size()).backward()
        total += loss.detach() * weight  # loss.item() would make the CPU wait for the GPU
    return total


def validate_and_decide(step, best, averaged, model, validation_set, args):
    """Validate the average; save it if it is the best so far.

    Return the metrics of the best with its step, and whether it is time to stop early.
    """
    # BatchNorm's buffers differ by rank: take those of rank 0, as it has saved them. (averaged
    # itself has one buffer more, the number of updates, which stays on the CPU.)
    for buffer in (*averaged.module.buffers(), *model.module.buffers()):
        dist.broadcast(buffer, src=0)
    found = validate(averaged.module, validation_set)
    metrics = {name: float(value) for name, value in found.items()}  # to be loaded again: see save
    # All ranks have the same metrics, so they decide alike: that needs no exchange.
    if is_better(metrics, best):
        best = {**metrics, "step": step}
        if dist.get_rank() == 0:
            path = f"{args.snapshot_path.removesuffix('.pt')}_best.pt"
            save({"model": averaged.module.state_dict(), **best}, path)
    text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    log(f"step {step:4d}/{args.total_steps} | validation {text} | best after step {best['step']}")
    return best, args.patience and step - best["step"] >= args.patience * args.validate_every


# ---- Yours: the data, the model, the loss, the metric, the schedule ----


def load_sets(args):
    """Your data. Return (training set, validation set, their name): windows of a text.

    All ranks call this, at once: so download and unpack before you start them, and sort the files
    that you list. Only the training set should have an augmentation. If that draws from a generator
    of its own: see seed_all. The loader's workers live through all epochs: what changes in this
    process later does not reach them.
    """
    # The texts of all topics of help(), as in help("if"): every Python has them.
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    windows = characters.long().unfold(0, CONTEXT + 1, CONTEXT)  # int64 (N, CONTEXT + 1)
    sets = TensorDataset(windows[:-VALIDATION]), TensorDataset(windows[-VALIDATION:])
    return *sets, f"windows of {CONTEXT} characters, Python's help"


def loader_of(dataset, lists):
    """Return a DataLoader that yields a batch for each list of items, in the order of the lists."""
    # SIGTERM must not end a worker before its rank. (Python 3.14 would start the workers by another
    # process, which SIGTERM ends.)
    return DataLoader(dataset, batch_sampler=lists, num_workers=WORKERS,
                      worker_init_fn=ignore_sigterm,
                      multiprocessing_context="fork" if WORKERS else None)


class GPT(nn.Module):
    """Your model. This is a small GPT: characters, int64 (N, T), to logits (N, T, VOCABULARY)."""

    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, nn.functional.gelu,
                                       batch_first=True, norm_first=True) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, text):
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.characters(text) + self.positions(positions))
        future = nn.Transformer.generate_square_subsequent_mask(len(positions), text.device)
        for block in self.blocks:
            x = block(x, src_mask=future, is_causal=True)
        return self.head(x)


def mean_loss(model, batch, step):
    """Your loss: the mean over the batch of how badly each next character is predicted.

    batch: what the loader makes of your items, a list of tensors. The mean must be over examples:
    with class weights, take the sum, and divide by the number of examples. For a mean over tokens:
    recipes/unequal_micro_batches.py.
    """
    device = next(model.parameters()).device
    [windows] = [part.to(device, non_blocking=True) for part in batch]  # your data: images, labels
    # What all ranks must draw alike follows from the step alone. For a mixup, say (each image gets
    # its partner from the same rank's micro-batch):
    # share = numpy.random.default_rng(SEED + step).beta(0.2, 0.2) if model.training else 1.0
    # (In bfloat16: with torch.autocast(device.type, torch.bfloat16): around the next line.)
    logits = model(windows[:, :-1])  # your loss begins here
    return cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())  # your loss


@torch.no_grad()
def validate(model, validation_set):
    """Your metrics. Return each by its name, the same on all ranks.

    Every example counts once over all ranks. For a metric by class, all-reduce a sum and a count of
    each class. More: recipes/metrics.py.
    """
    # The shares may differ by one, so no rank may wait for another: this is a model without DDP.
    seed_all(SEED + dist.get_rank())  # if yours draws: the same numbers in each validation
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    share = range(dist.get_rank(), len(validation_set), dist.get_world_size())
    for batch in loader_of(validation_set, BatchSampler(share, 64, drop_last=False)):
        total += mean_loss(model, batch, 0) * len(batch[0])  # your metric
    model.train()
    dist.all_reduce(total)  # sum, then divide: a mean of means is wrong when shares differ
    return {"loss": total.item() / len(validation_set)}


def is_better(metrics, best):
    """Return whether these are the best metrics so far. best: those of before, if there are any."""
    return metrics["loss"] < best.get("loss", math.inf)  # your rule: > best.get("accuracy", 0), say


def update_average(averaged, plain):
    """Take the weights after a step into the average."""
    averaged.update_parameters(plain)
    # torch truncates the means of integers, so a table of indices drifts; and the mean of a mask's
    # -inf is nan. Copy these.
    for mean, latest in zip(averaged.module.buffers(), plain.buffers(), strict=True):
        mean.copy_(torch.where(latest.isfinite(), mean, latest)
                   if latest.is_floating_point() else latest)


def warm_up_and_cosine(steps_done, total_steps):
    """Return the learning rate of the next step, as a fraction of LEARNING_RATE.

    A plain number: a snapshot with one of NumPy's could not be loaded, see save.
    """
    if steps_done < WARM_UP_STEPS:
        return (steps_done + 1) / WARM_UP_STEPS
    progress = (steps_done - WARM_UP_STEPS) / max(1, total_steps - WARM_UP_STEPS)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def parse_args():
    """Return the arguments; stop if they, or the way of starting, cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("total_steps", type=int, nargs="?", default=60, help="60 by default")
    parser.add_argument("save_every", type=int, nargs="?", default=20, help="steps; 20 by default")
    parser.add_argument("--epochs", type=int, help="in place of TOTAL_STEPS; validated after each")
    parser.add_argument("--patience", type=int, help="validations without a better loss; then stop")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step, all ranks")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches on each rank")
    parser.add_argument("--snapshot-path", default="one_machine.pt")
    parser.add_argument("--crash-step", type=int, help="kill the last rank there, on attempt 0")
    args = parser.parse_args()
    counts = {"TOTAL_STEPS": args.total_steps, "SAVE_EVERY": args.save_every,
              "--accumulate": args.accumulate, "--epochs": args.epochs, "--patience": args.patience}
    if wrong := [name for name, count in counts.items() if count is not None and count < 1]:
        stop(f"{' and '.join(wrong)} must be 1 or more")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        stop("this script is for one machine: use 03_multinode.py on several")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")
    return args


# ---- Keep this: without it, a resumed run is not equal to an unbroken one ----


def load_snapshot(path, parts, batches):
    """Load all parts from the snapshot at path. Return the rest of it, or that of a new job."""
    if not os.path.exists(path):
        return {"step": 0, "due": False, "best": {"step": 0}, "losses": [0, 0]}
    try:
        with zipfile.ZipFile(path) as archive:  # the format of torch.save
            if damaged := archive.testzip():  # torch.load does not look at the checksums
                raise ValueError(f"wrong checksum of {damaged}")
        # weights_only: an ordinary pickle can run any code while it is read. map_location:
        # otherwise the tensors go to the GPU that they were saved from, rank 0's.
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in parts.items():  # without them, AdamW has lost its moments, and so on
            part.load_state_dict(snapshot[name])
        if snapshot["batches"] != batches:  # the epoch's slices would be others
            stop(f"{path} goes on with batches of {snapshot['batches']}, as before: with {batches},"
                 " some would come twice or never", status=1)
        return {name: value for name, value in snapshot.items() if name not in parts}
    except Exception as error:  # a damaged file can raise almost any exception
        reason = str(error).strip().partition("\n")[0]
        stop(f"cannot continue from {path} ({type(error).__name__}: {reason}): move it away to"
             " start anew, or choose another --snapshot-path if it is another script's", status=1)


def seed_all(seed):
    """Seed all that your model and your data may draw random numbers from."""
    # (A generator of your Dataset's own does not follow. Make it anew in each __getitem__:
    # seed = torch.randint(2**62, ()).item(), and then, say, numpy.random.default_rng(seed).)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # for GPUs, too; and the workers of a DataLoader start from it


class GlobalBatches(Sampler):
    """A rank's share of each step's batch. For DataLoader(SeededItems(...), batch_sampler=...)."""

    def __init__(self, steps, items, batch_size, rank, world_size, micro_batches=1):
        """steps: a range, counted from 0 over all epochs. batch_size: that of all ranks."""
        self.steps, self.items, self.batch_size = steps, items, batch_size
        self.rank, self.world_size, self.micro_batches = rank, world_size, micro_batches

    def __len__(self):
        return len(self.steps) * self.micro_batches

    def __iter__(self):
        # An epoch is a shuffle of all items; each step takes the next slice of it. (The rest, less
        # than a batch, is left out; another epoch leaves out others.) The number of ranks plays no
        # part, so a job can go on with more or fewer. Keep its batch size: it makes the slices.
        for step in self.steps:
            epoch, place = divmod(step, self.items // self.batch_size)
            batch = shuffled(epoch, self.items)[place * self.batch_size :][: self.batch_size]
            # If world_size does not divide batch_size, some ranks have one item more. The loss must
            # then be weighed by len(share) * world_size / batch_size.
            share = batch[self.rank :: self.world_size]
            for part in share.tensor_split(self.micro_batches):
                yield [(epoch, item) for item in part.tolist()]


@functools.lru_cache(maxsize=1)  # so that a step need not shuffle again
def shuffled(epoch, items):
    """Return the indices from 0 to items - 1 in the order of an epoch: the same on all ranks."""
    return torch.randperm(items, generator=torch.Generator().manual_seed(SEED + epoch))


class SeededItems(Dataset):
    """Asked for (epoch, item): what your Dataset draws at random for it follows from these two."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, epoch_and_item):
        epoch, item = epoch_and_item
        seed_all(ITEM_SEEDS + epoch * len(self.dataset) + item)
        return self.dataset[item]


def settle_reduction_order(model, batch):
    """Run DDP once without a step, so that a resumed run adds up gradients in the same order."""
    # DDP collects gradients in buckets, and regroups these once, after its first backward. That
    # changes the order of additions and, with three ranks or more, the rounding.
    buffers = [buffer.clone() for buffer in model.buffers()]
    mean_loss(model, batch, 0).backward()
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


# ---- Keep this: without it, a kill, a full disk or wrong data costs more than it must ----


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


def exit_with_launcher():
    """End this process when torchrun is gone."""
    def watch():
        while os.getppid() == LAUNCHER:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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


def check_sets(train_set, validation_set, args):
    """Return a batch of two training examples. Stop if the sets, or the batch size, do not fit."""
    for name, dataset in ("validation", validation_set), ("training", train_set):
        if len(dataset) == 0:
            stop(f"the {name} set is empty", status=1)
        # Through the loader, not as dataset[0]: that could open a file (HDF5) in this process, and
        # the loader's workers would then share it. (Open yours in the first call of __getitem__.)
        try:
            batch = next(iter(loader_of(dataset, [[0, len(dataset) - 1]])))
            parts = batch if isinstance(batch, tuple | list) else []
            why = f"a batch is {[type(part).__name__ for part in parts] or type(batch).__name__}"
        except Exception as error:
            if "collate" not in str(error):  # an error in your Dataset
                raise
            parts, why = [], str(error).strip().rpartition("\n")[2]
            why = "they differ in size" if "resize" in why else why
        if not parts or not all(map(torch.is_tensor, parts)):
            stop(f"the items of the {name} set must be tuples of tensors (of one size) or numbers:"
                 f" {why}. Has it a transform that makes such tensors?", status=1)
    smallest = dist.get_world_size() * args.accumulate
    if not smallest <= args.batch_size <= len(train_set):
        stop(f"--batch-size must be from {smallest} (an example for each of"
             f" {dist.get_world_size()} ranks in each of {args.accumulate} micro-batches) to"
             f" {len(train_set)}")
    return batch


# ---- Helpers for convenience ----


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
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
