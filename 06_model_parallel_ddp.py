"""A model split over two devices, or over two processes, and the split model replicated by DDP.

    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py                  # CPU: both
    torchrun --standalone --nproc-per-node=2 06_model_parallel_ddp.py --mode devices   # 4 GPUs
    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py --mode pipeline  # 4 GPUs

If a model does not fit on one device, divide its layers. In mode devices, one process drives two
devices, each with half of the layers. In mode pipeline, each half (a stage) has its own process.
The stages send each other activations (the output of a layer) and their gradients. Both ways cut a
batch into smaller micro-batches, so that both halves can work at the same time. Around that,
DistributedDataParallel (DDP) trains replicas: copies of the split model, which see different
examples and average their gradients. You will see that loss and gradients are those of the unsplit
model, how much memory each rank (process) needs, and the pipeline at work:

    [rank 0/4]             stage 0     stage 1
    [rank 0/4] replica 0   rank 0  <-> rank 1
    [rank 0/4] replica 1   rank 2  <-> rank 3
    [rank 0/4] pipeline, 1F1B: gradients off by 4.7e-07, loss by 9.8e-08
    [rank 0/4] stage 0 |001.............aaaaa222222..bbbbbb3.....ccccccc...........ddddddddddd|
    [rank 0/4] stage 1 |...00aaaaaaa...111bbbb......222cccccc...333dddddddddddddd.............|
    [rank 0/4] 1F1B: idle 41%. The bubble at start and end alone is (p - 1) / (m + p - 1) = 20%
    [rank 0/4] 2 replicas of each stage are identical, sha256 e7c69206c97e, 11148062c836

In the bubble a stage has nothing to do yet, or nothing any more. (These four processes share two
cores, so a stage also waits for a core.) New here: a model on two devices, meshes, pipelines. For a
single layer that is too big for a device: recipes/tensor_parallel.py, recipes/shard_with_fsdp2.py.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # else DDP imports it later, which keeps the group alive to the end
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 0
TIMEOUT = timedelta(minutes=2)  # how long ranks wait for each other; default: NCCL 10, Gloo 30
WIDTH, BLOCKS, CLASSES, STAGES = 256, 8, 10, 2


@record  # passes an exception's traceback to torchrun; without it, torchrun's report shows none
def main():
    args = parse_args()
    # Step 1: start. Every process learns who it is, and takes its device. torchrun tells it its
    # number on this machine (local rank) and how many processes the job has (world size).
    if "LOCAL_WORLD_SIZE" not in os.environ:
        stop("this script needs a launcher:"
             " torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    check_call(args, world_size, local_world_size)
    if torch.cuda.is_available() and args.mode == "devices":
        devices = [torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)]
        device, backend = pick_device(2 * local_rank)
    else:
        device, backend = pick_device(local_rank)
        devices = [device, device]
    share_cores(local_world_size)
    if local_world_size == world_size:  # the whole job is on this machine
        listen_locally()

    # Step 2: meet. The processes form a group, in which each has a number (rank).
    # device_id binds the group to one GPU: right for a stage, wrong for a process that drives two.
    # torch 2.15 has new code for NCCL, which binds it in any case. This brings the older code back.
    bound = device if device.type == "cuda" and args.mode == "pipeline" else None
    if args.mode == "devices":
        os.environ["TORCH_DIST_USE_NCCL2"] = "0"  # torch reads it in init_process_group
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=bound)
    log(f"pid {os.getpid()}, {device}, {backend}", every_rank=True)
    log(f"batch size {args.batch_size}: each replica cuts its share into {args.microbatches}"
        " micro-batches.")

    # Steps 3 to 5: share the data, wrap the model, train. Each way has a function of its own.
    if args.mode in ("devices", "all"):
        train_devices(devices, args)
    if args.mode in ("pipeline", "all"):
        train_pipeline(device, args)

    # Step 6: leave. DDP objects are in reference cycles: without gc.collect() some processes abort
    # at exit. Not in a "finally": after an error, NCCL would wait here for ranks that never come.
    gc.collect()
    dist.destroy_process_group()


def train_devices(devices, args):
    """First way: one process drives two devices, and is one replica."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log("== devices: each rank is a replica, one process that drives two devices")
    for other, pair in enumerate(gathered(devices)):
        log(f"rank {other}: first half on {pair[0]}, second half on {pair[1]}")
    if devices[0] == devices[1]:
        log("the halves share the CPU: the code is the same, but there is nothing to gain")

    # Step 3: share the data. Each replica takes its own examples from every batch.
    share = next(batches(0, args.batch_size, rank, world_size))

    # Step 4: wrap the model. DDP starts all replicas from the same weights. Do not pass device_ids:
    # that names the one device of a model, and DDP refuses it for a model on two. Without it, DDP
    # leaves the parameters where they are. gradient_as_bucket_view: DDP sends gradients in buckets
    # (many in one tensor). They live there, instead of a second time beside them.
    split = TwoDevices(make_model(), devices, args.microbatches)  # your model
    model = DDP(split, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(inputs, labels):
        labels = labels.to(devices[1])  # first: after the forward pass, this copy would wait for it
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)  # your loss
        loss.backward()  # in here DDP averages the gradients over the replicas
        return loss.detach()

    # Does the split model compute what the unsplit one does? And how long does a step take?
    seconds = {}
    for microbatches in (args.microbatches, 1):
        split.microbatches = microbatches
        name = f"devices, {microbatches} micro-batches" if microbatches > 1 else "devices, no cut"
        compare_with_unsplit(name, args.batch_size, step(*share), world_size, split)
        seconds[microbatches] = seconds_of(lambda: step(*share), devices)
    log(f"a step: {1000 * seconds[1]:.1f} ms with the share in one piece,"
        f" {1000 * seconds[args.microbatches]:.1f} ms in {args.microbatches} micro-batches")
    split.microbatches = args.microbatches
    check_backward(split, lambda: step(*share))

    # Step 5: train. Every step averages the gradients; rank 0 reports.
    train_epochs(args, step, optimizer, rank, world_size)
    compare_replicas(model, "the model")
    show_memory(split.first, optimizer, "first half")
    show_memory(split.second, optimizer, "second half")


class TwoDevices(nn.Module):
    """A model with the first half of its blocks on one device, and the rest on another."""

    def __init__(self, model, devices, microbatches):
        super().__init__()
        self.devices, self.microbatches = devices, microbatches
        self.first = model[: BLOCKS // 2].to(devices[0])
        self.second = model[BLOCKS // 2 :].to(devices[1])

    def forward(self, x):
        # Python does not wait for a GPU: it queues the work and goes on. So the first device can
        # compute the next micro-batch while the second still has the one before. With the batch in
        # one piece (microbatches = 1), each device would be idle while the other computes.
        # Queue each second half right after its copy. A copy waits for what both GPUs have in their
        # queues, and what they get after it waits for the copy. If all copies came first, the
        # second GPU would wait for the last of them. (This is read in torch's source code. The
        # speed on two GPUs has not been measured.)
        outputs = []
        for chunk in x.to(self.devices[0]).tensor_split(self.microbatches):
            between = self.first(chunk).to(self.devices[1])
            outputs.append(self.second(between))
        return torch.cat(outputs)


def check_backward(split, step):
    """Raise RuntimeError unless backward() returns each micro-batch before it begins the next."""
    # Of what is ready, autograd takes first what forward() did last. So the order of forward()
    # decides whether the first device has work while the second goes on with the next micro-batch.
    order = []

    def note(tensor, what):
        tensor.register_hook(lambda gradient: order.append(what))  # called in the backward pass

    hooks = (split.second.register_forward_hook(lambda _, inputs, output: note(output, "begins")),
             split.second.register_forward_pre_hook(lambda _, inputs: note(inputs[0], "returns")))
    step()
    for hook in hooks:
        hook.remove()
    if order != ["begins", "returns"] * split.microbatches:
        raise RuntimeError(f"backward leaves the first device idle: a micro-batch {order}")
    log("backward: each micro-batch returns to the first half before the second begins another")


def compare_with_unsplit(what, batch_size, loss, replicas, module):
    """Raise RuntimeError unless loss and gradients are those of the unsplit model on all examples.

    module: this rank's part, after backward. Differences are relative: that of the loss to the
    loss, that of the gradients to the largest entry of all gradients. A model with BatchNorm would
    fail: a micro-batch has other statistics than the batch.
    """
    whole = make_model()
    inputs, labels = next(batches(0, batch_size))
    expected = cross_entropy(whole(inputs), labels)  # your loss
    expected.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    largest = max(gradient.abs().max() for gradient in gradients.values())
    off = torch.zeros(())
    for name, p in module.named_parameters():
        # A slice of a Sequential keeps its names: the second half begins with "4", not with "0".
        name = name.removeprefix("first.").removeprefix("second.")
        off = torch.maximum(off, (p.grad.cpu() - gradients[name]).abs().max() / largest)
    loss = sum(gathered(loss.item())) / replicas
    loss_off = abs(loss - expected.item()) / expected.item()
    off = torch.tensor(gathered(off.item())).max().item()  # Python's max may lose a nan
    log(f"{what}: gradients off by {off:.1e}, loss by {loss_off:.1e}")
    if not (off < 1e-5 and loss_off < 1e-5):  # written this way, nan fails too
        raise RuntimeError("the split model does not compute what the unsplit one does")


def compare_replicas(model, what, part=0):
    """Raise RuntimeError unless all replicas of each part have the same weights, bit for bit."""
    sha256 = hashlib.sha256()
    for p in model.parameters():
        sha256.update(p.detach().cpu().reshape(-1).view(torch.uint8).numpy())  # bytes, of any type
    digest = sha256.hexdigest()[:12]
    digests = {}  # of each part, one for each replica
    for other, found in gathered((part, digest)):
        digests.setdefault(other, []).append(found)
    if any(len(set(found)) > 1 for found in digests.values()):
        raise RuntimeError(f"replicas of {what} differ: sha256 {digests}")
    if len(digests[part]) == 1:
        log(f"one replica of {what}: no other to compare with")
    else:
        log(f"{len(digests[part])} replicas of {what} are identical,"
            f" sha256 {', '.join(found[0] for found in digests.values())}")


def train_pipeline(device, args):
    """Second way: one process for each stage; the stages in a row are one replica."""
    replicas = dist.get_world_size() // STAGES
    # A mesh is a grid of ranks. It makes a process group for each column ("dp": data parallel) and
    # for each row ("pp": pipeline parallel). They do not take over TIMEOUT.
    mesh = init_device_mesh(device.type, (replicas, STAGES), mesh_dim_names=("dp", "pp"))
    if hasattr(dist, "set_timeout"):  # torch 2.10 has no such function
        for group in mesh.get_all_groups():
            dist.set_timeout(TIMEOUT, group)
    replica, stage = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    log("== pipeline: each rank is a stage. In a row activations go right, and gradients left; DDP")
    log("averages gradients in a column. Each row and each column is a process group of its own:")
    show_grid(mesh)

    # Step 3: share the data. By replica, not by rank: the stages of a replica need the same share.
    share = next(batches(0, args.batch_size, replica, replicas))

    # Step 4: wrap the model. Each rank keeps its stage only, and DDP joins the ranks that have the
    # same stage. Here the whole model is made and then cut. If yours is too big to be made in one
    # piece, make only the layers of the stage.
    half = make_model()[: BLOCKS // 2] if stage == 0 else make_model()[BLOCKS // 2 :]  # your model
    model = DDP(half.to(device), process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    settle_stage(model, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(schedule, inputs, labels):
        optimizer.zero_grad()
        losses = []
        # The first stage takes the inputs, the last stage the labels. A schedule runs the forward
        # and backward passes of all micro-batches. It adds up their gradients and divides by their
        # number (right for a mean loss, wrong for a sum). In the last backward pass, DDP averages
        # the gradients over the replicas.
        if stage == 0:
            schedule.step(inputs.to(device))
        else:
            schedule.step(target=labels.to(device), losses=losses)
        # Only the last stage knows the loss. The other says 0, which leaves a sum over ranks right.
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    # Does the split model compute what the unsplit one does? And when does each stage compute what?
    # GPipe runs all forward passes, then all backward passes. 1F1B (one forward, one backward)
    # starts a backward pass as soon as it can, and so keeps fewer activations in memory.
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        # With NCCL, torch 2.15 warns here of "an eager NCCL communicator". That is about traffic to
        # several other stages, and here each has one. (With more, try init_device_mesh's
        # backend_override={"pp": "nccl-lazy"}; no GPU has run this here.)
        timed = TimedStage(model, stage, STAGES, device, group=mesh.get_group("pp"))
        schedule = schedule_class(timed, args.microbatches, loss_fn=cross_entropy)  # your loss
        name = schedule_class.__name__.removeprefix("Schedule")
        loss = step(schedule, *share)
        compare_with_unsplit(f"pipeline, {name}", args.batch_size, loss, replicas, half)
        runs = []
        for _ in range(5):
            timed.spans = ()
            dist.barrier()
            step(schedule, *share)
            runs.append(gathered(timed.spans)[:STAGES])  # replica 0 has the first ranks
        show_schedule(name, min(runs, key=duration), args.microbatches)

    # Step 5: train. Every step averages the gradients; rank 0 reports. Now with a plain stage: the
    # clock of TimedStage makes a GPU wait.
    plain = PipelineStage(model, stage, STAGES, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(plain, args.microbatches, loss_fn=cross_entropy)  # your loss
    train_epochs(args, functools.partial(step, schedule), optimizer, replica, replicas)
    compare_replicas(model, "each stage", stage)
    show_memory(half, optimizer, f"stage {stage}")


def settle_stage(model, device):
    """Let DDP arrange its buckets before the pipeline runs, whose second step fails otherwise."""
    # During its first backward pass DDP records the order in which gradients come. At the next
    # forward pass it arranges its buckets in that order. In the first step of a pipeline, each
    # gradient is recorded twice (torch 2.15), and that forward pass fails: "rebuilt parameter
    # indices size is not same as original model parameters size". Two plain passes beforehand get
    # this done without a pipeline. find_unused_parameters=True (pytorch/PiPPy pull request 665)
    # also helps, but searches the graph of the model in every step.
    for _ in range(2):
        model(torch.zeros(1, WIDTH, device=device)).sum().backward()  # your stage's kind of input
        model.zero_grad()


# ---- What any training script needs: the batches, the data, the model, the epochs ----


def batches(epoch, batch_size, replica=0, replicas=1):
    """Yield (inputs, labels): this replica's share of each global batch, in the epoch's order."""
    inputs, labels = make_data()  # your data
    generator = torch.Generator().manual_seed(SEED + epoch)  # one order for all ranks
    order = torch.randperm(len(inputs), generator=generator)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        share = order[start + replica : start + batch_size : replicas]
        yield inputs[share], labels[share]


def make_data(count=1024):
    """Return inputs, float32 (count, WIDTH), and labels, int64 (count,): ten clouds of points."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    return centers[labels] + 3 * torch.randn(count, WIDTH, generator=generator), labels


def make_model():
    """Return the whole model, the same on every rank: float32 (N, WIDTH) to logits (N, CLASSES)."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


class Block(nn.Module):
    """One layer of a deep MLP: float32 (N, WIDTH) to the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.layers(x)


def train_epochs(args, step, optimizer, replica, replicas):
    for epoch in range(1, args.epochs + 1):
        losses = []
        for inputs, labels in batches(epoch, args.batch_size, replica, replicas):
            losses.append(step(inputs, labels))  # gradients, averaged over the replicas
            optimizer.step()  # no exchange here: all replicas take the same step
        loss = sum(gathered(torch.stack(losses).mean().item())) / replicas
        log(f"epoch {epoch}/{args.epochs} | loss {loss:.4f}")


# ---- Helpers that are no part of the lesson ----


def seconds_of(step, devices):
    """Return the median seconds of five steps, after one to warm up."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        step()
        for device in devices:
            if device.type == "cuda":  # where calls return before the work is done
                torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def show_memory(module, optimizer, what):
    """Log what the ranks hold, beside the unsplit model with Adam, which is 4 times its weights."""
    def mib(tensors):
        return sum(tensor.nbytes for tensor in tensors) / 2**20

    parameters = list(module.parameters())
    states = [t for p in parameters for t in optimizer.state[p].values() if t.dim()]
    held = mib(parameters), mib(p.grad for p in parameters), mib(states)
    share = sum(held) / (4 * mib(make_model().parameters()))
    line = (f"{what}: weights {held[0]:.1f} MiB, gradients {held[1]:.1f}, Adam {held[2]:.1f};"
            f" {share:.0%} of the whole")
    ranks = {}
    for rank, held_there in enumerate(gathered(line)):
        ranks.setdefault(held_there, []).append(str(rank))
    for held_there, those in ranks.items():
        log(f"rank {' '.join(those)}, {held_there}")


def show_grid(mesh):
    log("            " + "     ".join(f"stage {stage}" for stage in range(STAGES)))
    for replica, ranks in enumerate(mesh.mesh.tolist()):
        log(f"replica {replica}   " + " <-> ".join(f"rank {rank:<2}" for rank in ranks).rstrip())


class TimedStage(PipelineStage):
    """A stage that notes what it computes when: ("F" or "B", micro-batch, start, end)."""

    spans = ()

    def forward_one_chunk(self, chunk, *args, **kwargs):
        return self.timed("F", chunk, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk, *args, **kwargs):
        return self.timed("B", chunk, super().backward_one_chunk, *args, **kwargs)

    def timed(self, kind, chunk, compute, *args, **kwargs):
        self.finish()  # NCCL's wait() stops the GPU, not Python: waiting would count as work
        start = time.time()
        result = compute(chunk, *args, **kwargs)
        self.finish()
        self.spans = (*self.spans, (kind, chunk, start, time.time()))
        return result

    def finish(self):
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def duration(stages):
    """Return the seconds from the first start to the last end in [spans of a stage, ...]."""
    spans = [span for stage in stages for span in stage]
    return max(end for *_, end in spans) - min(start for *_, start, _ in spans)


def show_schedule(name, stages, microbatches, columns=70):
    """Draw when each stage computed what, from the measured times."""
    if int(os.environ["LOCAL_WORLD_SIZE"]) < STAGES:
        log(f"{name}: no drawing, as the stages are on several machines, whose clocks differ")
        return
    begin, whole = min(start for spans in stages for *_, start, _ in spans), duration(stages)
    log(f"the shortest of 5 steps, {1000 * whole:.0f} ms: 0 1 2 forward, a b c backward of a"
        " micro-batch, . idle")
    for stage, spans in enumerate(stages):
        line = ["."] * columns
        for kind, chunk, start, end in spans:
            first, last = (round((t - begin) / whole * columns) for t in (start, end))
            mark = ("0123456789" if kind == "F" else "abcdefghij")[chunk % 10]
            line[first:last] = mark * (last - first)
        log(f"stage {stage} |{''.join(line)}|")
    busy = sum(end - start for spans in stages for *_, start, end in spans)
    bubble = (STAGES - 1) / (microbatches + STAGES - 1)
    idle = 1 - busy / (STAGES * whole)
    log(f"{name}: idle {idle:.0%}. The bubble at start and end alone is (p - 1) / (m + p - 1) ="
        f" {bubble:.0%}")
    log(f"for p = {STAGES} stages, m = {microbatches} micro-batches; the rest waits. DDP's part is"
        " in the last backward")


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


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


def check_call(args, world_size, local_world_size):
    """Stop if the call asks for what this number of processes and GPUs cannot do."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and args.mode == "all":
        stop("on GPUs the two ways need different numbers of processes: choose --mode devices"
             " (two GPUs a process) or --mode pipeline (one)")
    if args.mode == "devices" and 0 < gpus < 2 * local_world_size:
        stop(f"--mode devices wants two GPUs a process, not {gpus} for {local_world_size}: use half"
             " as many processes as GPUs, or the CPU with CUDA_VISIBLE_DEVICES= in front")
    if 0 < gpus < local_world_size:
        stop(f"{local_world_size} processes want a GPU each and there are {gpus}:"
             " use --nproc-per-node=gpu, or the CPU with CUDA_VISIBLE_DEVICES= in front")
    if args.mode != "devices" and world_size % STAGES:
        stop(f"{world_size} processes make no grid of {STAGES} stages: use an even number,"
             " such as --nproc-per-node=4, or --mode devices")
    for mode, replicas in (("devices", world_size), ("pipeline", world_size // STAGES)):
        if args.mode not in (mode, "all"):
            continue
        share = args.batch_size // replicas
        if args.batch_size % replicas or args.batch_size > 1024:
            stop(f"--batch-size {args.batch_size} is impossible: give a multiple of {replicas}, the"
                 f" number of replicas with --mode {mode}, up to 1024 (the training set)")
        if args.microbatches > share:
            stop(f"{share} examples a replica cannot be cut into {args.microbatches} micro-batches:"
                 f" use --microbatches {share} or fewer, or a larger --batch-size")
        if mode == "pipeline" and args.microbatches < STAGES:
            stop(f"the schedule 1F1B wants {STAGES} micro-batches or more, one for each stage")
        if mode == "pipeline" and share % args.microbatches:
            stop(f"a pipeline wants micro-batches of one size, and {share} examples a replica make"
                 f" no {args.microbatches} equal ones: change --microbatches or --batch-size")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("epochs", type=int, nargs="?", default=3, help="3 by default")
    parser.add_argument("--mode", choices=("devices", "pipeline", "all"), default="all")
    parser.add_argument("--microbatches", type=int, default=4, help="of a replica's share")
    parser.add_argument("--batch-size", type=int, default=256, help="examples a step, all ranks")
    args = parser.parse_args()
    if min(args.epochs, args.microbatches, args.batch_size) < 1:
        stop("epochs, --microbatches and --batch-size must be 1 or more")
    return args


if __name__ == "__main__":
    main()
