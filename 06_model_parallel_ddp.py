"""A model split over two devices, or over two processes, and the split model replicated by DDP.

    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py                  # CPU: both
    torchrun --standalone --nproc-per-node=2 06_model_parallel_ddp.py --mode devices   # 4 GPUs
    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py --mode pipeline  # 4 GPUs

When a model does not fit one device, its layers are divided. devices: one process drives two
devices, with half of the layers on each. pipeline: each half, or stage, has a process of its own,
and activations travel between the two. In both ways a batch is cut into micro-batches, so that one
half need not stand idle while the other computes, and DDP replicates the whole. You will see that
loss and gradients are those of the unsplit model, what each rank holds, and the pipeline at work:

    [rank 0/4]             stage 0     stage 1
    [rank 0/4] replica 0   rank 0  <-> rank 1
    [rank 0/4] replica 1   rank 2  <-> rank 3
    [rank 0/4] pipeline, 1F1B: gradients off by 2.4e-07, loss by 6.5e-08
    [rank 0/4] stage 0 |000.......111........aaaa222........bbbbb33...........cccc..dddddddddd|
    [rank 0/4] stage 1 |...000aaaa...111bbbb........222cccc.........333dddddddddddd...........|
    [rank 0/4] 1F1B: idle 51%. The bubble at start and end alone is (p - 1) / (m + p - 1) = 20%

(Four processes on two cores: here a stage waits for a core, too.)

New here: a model on two devices, device meshes, pipeline schedules. For layers that are themselves
too big for one device there are tensor parallelism and sharding (FSDP), which are not shown here.
"""

import argparse
import contextlib
import gc
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 0
TIMEOUT = timedelta(minutes=2)  # how long a rank waits for the others; the default is 10 to 30
WIDTH, BLOCKS, CLASSES, STAGES = 256, 8, 10, 2


class Block(nn.Module):
    """One layer of a deep MLP: float32 (N, WIDTH) to the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.layers(x)


def make_model():
    """Return the whole model, the same on every rank: float32 (N, WIDTH) to logits (N, CLASSES)."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def make_data(count=1024):
    """Return inputs, float32 (count, WIDTH), and labels, int64 (count,): ten clouds of points."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    return centers[labels] + 3 * torch.randn(count, WIDTH, generator=generator), labels


def batches(epoch, batch_size, replica=0, replicas=1):
    """Yield (inputs, labels): this replica's share of each global batch, in the epoch's order."""
    inputs, labels = make_data()
    generator = torch.Generator().manual_seed(SEED + epoch)
    order = torch.randperm(len(inputs), generator=generator)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        share = order[start + replica : start + batch_size : replicas]
        yield inputs[share], labels[share]


# First way: one process, two devices.


class TwoDevices(nn.Module):
    """A model with the first half of its blocks on one device, and the rest on another."""

    def __init__(self, model, devices, microbatches):
        super().__init__()
        self.devices, self.microbatches = devices, microbatches
        self.first = model[: BLOCKS // 2].to(devices[0])
        self.second = model[BLOCKS // 2 :].to(devices[1])

    def forward(self, x):
        # Python only queues work for a GPU, and goes on: while the second device has one micro-
        # batch, the first can have the next. With the batch in one piece (microbatches = 1), each
        # would stand idle while the other computes. All first halves before any second: a copy
        # waits for what is queued on both GPUs, so a second half in between would hold up the next.
        between = [self.first(chunk).to(self.devices[1], non_blocking=True)
                   for chunk in x.to(self.devices[0]).tensor_split(self.microbatches)]
        return torch.cat([self.second(chunk) for chunk in between])


def train_devices(devices, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log("== devices: each rank is a replica, one process that drives two devices")
    for other, pair in enumerate(gathered(devices)):
        log(f"rank {other}: first half on {pair[0]}, second half on {pair[1]}")
    if devices[0] == devices[1]:
        log("the halves share the CPU: the code is the same, but there is nothing to gain")
    # No device_ids: it names the one device of a whole module, and DDP refuses it for a module on
    # two. Without it DDP leaves the parameters where they are, and gives each device its buckets.
    model = DDP(TwoDevices(make_model(), devices, args.microbatches), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(inputs, labels):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels.to(devices[1]))
        loss.backward()
        return loss.detach()

    share = next(batches(0, args.batch_size, rank, world_size))
    seconds = {}
    for microbatches in (args.microbatches, 1):
        model.module.microbatches = microbatches
        name = f"devices, {microbatches} micro-batches" if microbatches > 1 else "devices, no cut"
        compare(name, args.batch_size, step(*share), world_size, model.module)
        seconds[microbatches] = seconds_of(lambda: step(*share), devices)
    log(f"a step: {1000 * seconds[1]:.1f} ms with the share in one piece,"
        f" {1000 * seconds[args.microbatches]:.1f} ms in {args.microbatches} micro-batches")
    model.module.microbatches = args.microbatches
    for epoch in range(1, args.epochs + 1):
        losses = []
        for inputs, labels in batches(epoch, args.batch_size, rank, world_size):
            losses.append(step(inputs, labels))
            optimizer.step()
        report(epoch, args.epochs, torch.stack(losses).mean(), world_size)
    check_equal(model, dist.group.WORLD, "the model")
    show_memory(model.module.first, optimizer, "first half")
    show_memory(model.module.second, optimizer, "second half")


# Second way: one process a stage, on a mesh of replicas and stages.


class TimedStage(PipelineStage):
    """A stage that notes what it computes when: ("F" or "B", micro-batch, start, end)."""

    spans = ()

    def forward_one_chunk(self, chunk, *args, **kwargs):
        return self.timed("F", chunk, super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk, *args, **kwargs):
        return self.timed("B", chunk, super().backward_one_chunk, *args, **kwargs)

    def timed(self, kind, chunk, compute, *args, **kwargs):
        self.finish()  # NCCL's wait() holds up the GPU, not Python: waiting would count as work
        start = time.time()
        result = compute(chunk, *args, **kwargs)
        self.finish()
        self.spans = (*self.spans, (kind, chunk, start, time.time()))
        return result

    def finish(self):
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def train_pipeline(device, args):
    replicas = dist.get_world_size() // STAGES
    # The mesh makes groups of its own, without our timeout: on Gloo they wait for 30 minutes.
    mesh = init_device_mesh(device.type, (replicas, STAGES), mesh_dim_names=("dp", "pp"))
    replica, stage = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    log("== pipeline: each rank is a stage. In a row activations go right, and gradients left; DDP")
    log("averages gradients in a column. Each row and each column is a process group of its own:")
    show_grid(mesh)
    # Cut from the whole, which is small here. A model too big for that is built in parts.
    half = make_model()[: BLOCKS // 2] if stage == 0 else make_model()[BLOCKS // 2 :]
    model = DDP(half.to(device), process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    settle_stage(model, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(schedule, inputs, labels):
        optimizer.zero_grad()
        losses = []
        # Inputs go to the first stage, labels to the last. The gradients of all micro-batches add
        # up, and are divided by their number at the end (right for a mean loss, wrong for a sum);
        # DDP averages them over the replicas in the last backward.
        if stage == 0:
            schedule.step(inputs.to(device))
        else:
            schedule.step(target=labels.to(device), losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros((), device=device)

    share = next(batches(0, args.batch_size, replica, replicas))
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        timed = TimedStage(model, stage, STAGES, device, group=mesh.get_group("pp"))
        schedule = schedule_class(timed, args.microbatches, loss_fn=cross_entropy)
        name = schedule_class.__name__.removeprefix("Schedule")
        compare(f"pipeline, {name}", args.batch_size, step(schedule, *share), replicas, half)
        runs = []
        for _ in range(5):
            timed.spans = ()
            dist.barrier()
            step(schedule, *share)
            runs.append(gathered(timed.spans)[:STAGES])  # replica 0 has the first ranks
        show_schedule(name, min(runs, key=duration), args.microbatches)
    # Train without the clock, which would hold up a GPU.
    plain = PipelineStage(model, stage, STAGES, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(plain, args.microbatches, loss_fn=cross_entropy)
    for epoch in range(1, args.epochs + 1):
        losses = []
        for inputs, labels in batches(epoch, args.batch_size, replica, replicas):
            losses.append(step(schedule, inputs, labels).detach())
            optimizer.step()
        report(epoch, args.epochs, torch.stack(losses).mean(), replicas)
    check_equal(model, mesh.get_group("dp"), "each stage")
    show_memory(half, optimizer, f"stage {stage}")


def settle_stage(model, device):
    """Let DDP lay out its buckets before the pipeline runs, whose second step fails otherwise."""
    # DDP notes the order of the gradients until its first exchange, and lays its buckets out anew
    # at the next forward. In a pipeline's first step each gradient is noted twice (torch 2.15), and
    # that forward fails ("rebuilt parameter indices size is not same as original model parameters
    # size"). Two plain passes get it over with before. find_unused_parameters=True
    # (pytorch/PiPPy pull request 665) helps too, and costs a search of the graph in every step.
    for _ in range(2):
        model(torch.zeros(1, WIDTH, device=device)).sum().backward()
        model.zero_grad()


def show_grid(mesh):
    log("            " + "     ".join(f"stage {stage}" for stage in range(STAGES)))
    for replica, ranks in enumerate(mesh.mesh.tolist()):
        log(f"replica {replica}   " + " <-> ".join(f"rank {rank:<2}" for rank in ranks).rstrip())


def duration(stages):
    """Return the seconds from the first start to the last end in [spans of a stage, ...]."""
    spans = [span for stage in stages for span in stage]
    return max(end for *_, end in spans) - min(start for *_, start, _ in spans)


def show_schedule(name, stages, microbatches, columns=70):
    """Draw when each stage computed what, from the measured times."""
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


# What both ways share.


def compare(what, batch_size, loss, replicas, module):
    """Fail unless loss and gradients equal those of the unsplit model on the whole batch.

    Both differences are relative, the gradients' to the largest entry of all gradients.
    """
    whole = make_model()
    inputs, labels = next(batches(0, batch_size))
    expected = cross_entropy(whole(inputs), labels)
    expected.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    largest = max(gradient.abs().max() for gradient in gradients.values())
    off = torch.zeros(())
    for name, p in module.named_parameters():
        # A slice of a Sequential keeps its names: the second half begins with "4", not with "0".
        name = name.removeprefix("first.").removeprefix("second.")
        off = torch.maximum(off, (p.grad.cpu() - gradients[name]).abs().max() / largest)
    loss = sum(gathered(loss.item())) / replicas
    off, loss_off = max(gathered(off.item())), abs(loss - expected.item()) / expected.item()
    log(f"{what}: gradients off by {off:.1e}, loss by {loss_off:.1e}")
    if not (off < 1e-5 and loss_off < 1e-5):  # so written, it holds for nan as well
        raise RuntimeError("the split model does not compute what the unsplit one does")


def check_equal(model, group, what):
    """Raise RuntimeError unless the ranks of each group hold the same weights, bit for bit."""
    difference = 0.0
    for p in model.parameters():
        first = p.detach().clone()
        dist.broadcast(first, src=dist.get_process_group_ranks(group)[0], group=group)
        difference = max(difference, (p.detach() - first).abs().max().nan_to_num(torch.inf).item())
    difference = max(gathered(difference))
    if difference != 0:
        raise RuntimeError(f"replicas of {what} differ (inf: or hold nan) by {difference:.1e}")
    if group.size() == 1:
        log(f"one replica of {what}: no other to compare with")
    else:
        log(f"{group.size()} replicas of {what} are identical: max |difference| {difference:g}")


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


def report(epoch, epochs, loss, replicas):
    loss = sum(gathered(loss.item())) / replicas
    log(f"epoch {epoch}/{epochs} | loss {loss:.4f}")


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


def gathered(value):
    """Return every rank's value, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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


def listen_locally():
    """Let Gloo listen on the loopback interface alone, if the whole job is on this machine."""
    # By default it listens at the address of this machine's name, for whoever connects.
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # lo; on a Mac lo0


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


@record  # hands an exception's traceback to torchrun, whose report shows none otherwise
def main():
    args = parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        stop("this script needs a launcher:"
             " torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    check_call(args, world_size, local_world_size, torch.cuda.device_count())
    if torch.cuda.is_available() and args.mode == "devices":
        devices = [torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)]
        device, backend = pick_device(2 * local_rank)
    else:
        device, backend = pick_device(local_rank)
        devices = [device, device]
    share_cores(local_world_size)
    listen_locally()
    # device_id binds the group to one GPU, and NCCL then refuses tensors on any other: not for a
    # process that drives two. (In 04_collectives.py it is right.)
    bound = device if device.type == "cuda" and args.mode == "pipeline" else None
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=bound)
    log(f"pid {os.getpid()}, {device}, {backend}", every_rank=True)
    log(f"batch size {args.batch_size}: each replica cuts its share into {args.microbatches}"
        " micro-batches.")
    if args.mode in ("devices", "all"):
        train_devices(devices, args)
    if args.mode in ("pipeline", "all"):
        train_pipeline(device, args)
    # Collect, then destroy, and not in a "finally": 01_single_node_multi_gpu.py says why.
    gc.collect()
    dist.destroy_process_group()


def check_call(args, world_size, local_world_size, gpus):
    """Stop if the call asks for what this number of processes and GPUs cannot do."""
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
    def number(text):
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("epochs", type=number, nargs="?", default=3, help="3 by default")
    parser.add_argument("--mode", choices=("devices", "pipeline", "all"), default="all")
    parser.add_argument("--microbatches", type=number, default=4, help="of a replica's share")
    parser.add_argument("--batch-size", type=number, default=256, help="examples a step, all ranks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
