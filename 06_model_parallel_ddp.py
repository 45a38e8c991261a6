"""Split a model over two devices, or over two processes, and train replicas of it with DDP.

    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py                  # CPU, both
    torchrun --standalone --nproc-per-node=2 06_model_parallel_ddp.py --mode devices   # 4 GPUs
    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py --mode pipeline  # 4 GPUs

If a model does not fit on one device, cut it between two of its layers. There are two ways:
- mode devices: one process drives two devices, each with half of the layers.
- mode pipeline: each half, a stage, has a process (a rank) of its own. The stages send each other
  activations (the output of a layer) and their gradients.
Take devices if two GPUs of a machine are enough, pipeline for more GPUs or machines; and see first
whether docs/which_parallelism.md has an easier way. (This is a lesson, not a template: for your own
training, see the notes at the second step 5.) Both ways cut a batch into micro-batches: while one
half of the model computes one of them, the other half computes the next. DDP trains replicas
(copies) of the split model, as in 01. Loss and gradients are those of the unsplit model:

    [rank 0/4]             stage 0     stage 1
    [rank 0/4] replica 0   rank 0  <-> rank 1
    [rank 0/4] replica 1   rank 2  <-> rank 3
    [rank 0/4] pipeline, 1F1B: gradients off by 4.7e-07, loss by 9.8e-08
    [rank 0/4] stage 0 |001.............aaaaa222222..bbbbbb3.....ccccccc...........ddddddddddd|
    [rank 0/4] stage 1 |...00aaaaaaa...111bbbb......222cccccc...333dddddddddddddd.............|
    [rank 0/4] 1F1B: idle 41%. The bubble alone is (p - 1) / (m + p - 1) = 20%, for p = 2 stages
    [rank 0/4] 2 replicas of each stage are identical, sha256 e7c69206c97e, 11148062c836

Time goes to the right. 0 to 3: the forward passes of m = 4 micro-batches; a to d: their backward
passes; a dot: idle. 1F1B is a schedule: one forward, one backward, in turns. The bubble is the idle
time while the pipeline fills and empties. (Here, four processes also wait for one of two cores.)
Read 01 before this. Here, read main, train_devices and TwoDevices, then train_pipeline; skip the
checks. Next: docs/which_parallelism.md, for a layer too big for a device.
Now write it yourself: exercises/16_pipeline.py.
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
import torch.distributed.nn  # imported by DDP, after step 2, it would keep the group open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 0
TIMEOUT = timedelta(minutes=2)  # how long ranks wait for each other; default: NCCL 10, Gloo 30
WIDTH, BLOCKS, CLASSES = 256, 8, 10
STAGES = 2  # of the pipeline; the number of processes must be a multiple of it


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
    # In mode devices, a process takes two GPUs: number 2 * local_rank, and the next one.
    device, backend = pick_device(2 * local_rank if args.mode == "devices" else local_rank)
    share_cores(local_world_size)
    if local_world_size == world_size:  # the whole job is on this machine
        listen_locally()

    # Step 2: meet. The processes form a group, in which each has a number (rank). device_id binds
    # the group to one GPU: right for a stage, wrong for a process that drives two, as DDP then
    # exchanges gradients on both. (The new code for NCCL in torch 2.15 binds it in any case.
    # TORCH_DIST_USE_NCCL2=0 selects the older code.)
    bound = device if device.type != "cpu" and args.mode == "pipeline" else None
    if backend == "nccl" and args.mode == "devices":
        os.environ["TORCH_DIST_USE_NCCL2"] = "0"
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=bound)
    log(f"pid {os.getpid()}, {device}, {backend}", every_rank=True)
    log(f"batch size {args.batch_size}: each replica cuts its share into {args.microbatches}"
        " micro-batches.")

    if args.mode in ("devices", "all"):
        train_devices(device, args)  # steps 3, 4 and 5
    if args.mode in ("pipeline", "all"):
        train_pipeline(device, args)  # steps 3, 4 and 5, the second way

    # Step 6: leave. First free DDP, whose threads can abort a process that ends while they run. Not
    # in a "finally": after an error, NCCL would wait here for ranks that never come.
    gc.collect()
    dist.destroy_process_group()


def train_devices(device, args):
    """First way: one process drives two devices, and is one replica."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    second = device if device.type == "cpu" else torch.device(device.type, device.index + 1)
    devices = [device, second]
    log("== devices: each rank is a replica, one process that drives two devices")
    for other, pair in enumerate(gathered(devices)):
        log(f"rank {other}: first half on {pair[0]}, second half on {pair[1]}")
    if devices[0] == devices[1]:
        log("the halves share the CPU: the code is the same, but there is nothing to gain")

    # Step 3: share the data. batches gives each replica a share of its own of every batch. Training
    # (step 5) goes through all batches. The checks before it use the share of one batch, the probe.
    probe = next(batches(0, args.batch_size, rank, world_size))

    # Step 4: build the model, and wrap it. DDP leaves the parameters where they are. (Other guides
    # give it device_ids=[local_rank]. That is for a model on one device: DDP refuses it here.)
    split = TwoDevices(make_model(), devices, args.microbatches)  # your model
    model = DDP(split, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # your optimizer

    def forward_backward(inputs, labels):
        labels = labels.to(devices[1])  # first: a copy waits for all work in a GPU's queue
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)  # your loss
        loss.backward()  # in here DDP averages the gradients over the replicas
        return loss.detach()

    # Checks, for the lesson only: does the split model compute what the unsplit one does, and how
    # long does that take? Leave them out of your script. (They make the whole model.)
    for microbatches in (1, args.microbatches):
        split.microbatches = microbatches
        name = f"devices, {microbatches} micro-batch{'es' if microbatches > 1 else ''}"
        compare_with_unsplit(name, args.batch_size, forward_backward(*probe), world_size, split)
        seconds = seconds_of(lambda: forward_backward(*probe), devices)
        log(f"{name}: {1000 * seconds:.1f} ms for forward and backward pass")
    check_backward(split, lambda: forward_backward(*probe))

    # Step 5: train. Every step averages the gradients; rank 0 reports.
    train_epochs(args, forward_backward, optimizer, rank, world_size)
    compare_replicas(model, "the model")
    show_memory(split.first, optimizer, "first half")
    show_memory(split.second, optimizer, "second half")


class TwoDevices(nn.Module):
    """A model with the first half of its blocks on one device, and the rest on another."""

    def __init__(self, model, devices, microbatches):
        super().__init__()
        self.devices, self.microbatches = devices, microbatches
        # Cut where both halves take about as much time, and fit. If your model is no nn.Sequential,
        # write its halves as two modules: what the first returns is what the second takes. If that
        # is more than one tensor, split and move each in forward.
        self.first = model[: BLOCKS // 2].to(devices[0])
        self.second = model[BLOCKS // 2 :].to(devices[1])

    def forward(self, x):
        # Python does not wait for a GPU: it queues the work and goes on. So the first GPU can
        # compute the next micro-batch while the second still has the one before. With the batch in
        # one piece (microbatches = 1), each GPU would be idle while the other computes.
        # Trap: .to copies between GPUs. A copy begins when both GPUs have done all that stands in
        # their queues before it. So the order is: copy, second half, next copy, next second half.
        # If all copies came first, the second GPU would wait for the last of them. (This is read in
        # torch's source code. The speed on two GPUs has not been measured.)
        outputs = []
        for chunk in x.to(self.devices[0]).tensor_split(self.microbatches):
            between = self.first(chunk).to(self.devices[1])
            outputs.append(self.second(between))
        return torch.cat(outputs)


def train_epochs(args, forward_backward, optimizer, replica, replicas):
    """Train on this replica's share of every batch. Rank 0 reports each epoch's mean loss."""
    for epoch in range(1, args.epochs + 1):
        losses = []
        for inputs, labels in batches(epoch, args.batch_size, replica, replicas):
            losses.append(forward_backward(inputs, labels))  # in here DDP averages gradients
            optimizer.step()  # no exchange here: all replicas take the same step
        loss = sum(gathered(torch.stack(losses).mean().item())) / replicas
        log(f"epoch {epoch}/{args.epochs} | loss {loss:.4f}")


def train_pipeline(device, args):
    """Second way: one process for each stage; the stages in a row are one replica."""
    replicas = dist.get_world_size() // STAGES
    # A mesh is a grid of ranks: a row for each replica, a column for each stage. It makes a process
    # group of each column ("dp", data parallel: replicas of one stage) and of each row ("pp",
    # pipeline parallel: the stages of one replica). These groups do not take over TIMEOUT.
    mesh = init_device_mesh(device.type, (replicas, STAGES), mesh_dim_names=("dp", "pp"))
    if hasattr(dist, "set_timeout"):  # torch 2.11 has no such function
        for group in mesh.get_all_groups():
            dist.set_timeout(TIMEOUT, group)
    # This rank's place in its column, and in its row (which has nothing to do with LOCAL_RANK):
    replica, stage = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    log("== pipeline: each rank is a stage. In a row activations go right, and gradients left; DDP")
    log("averages gradients in a column. Each row and each column is a process group of its own:")
    show_grid(mesh)

    # Step 3: share the data. By replica, not by rank: the stages of a replica need the same share.
    # With the loader of 01 instead of batches: DistributedSampler(train_set, num_replicas=replicas,
    # rank=replica, seed=SEED, drop_last=True), and share = batch_size // replicas.
    probe = next(batches(0, args.batch_size, replica, replicas))

    # Step 4: build the model, and wrap it. Each rank keeps its stage only. DDP gets the group of
    # its column, and so averages gradients over the replicas of this stage. Here the whole model is
    # made and then cut. If yours is too big to be made in one piece, make only the stage's layers.
    # If yours is no nn.Sequential, write a module for each stage, which takes what the one before
    # returns: a tensor, or a tuple of tensors. (If all stages need a mask, each rank gives that of
    # the whole share to schedule.step(..., mask=mask), which cuts it up.) No weights may be in two
    # stages: tied ones would come apart.
    model = make_model()  # your model
    cuts = [BLOCKS * number // STAGES for number in range(STAGES)] + [len(model)]
    half = model[cuts[stage] : cuts[stage + 1]]
    model = DDP(half.to(device), process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    settle_stage(model, device)  # without it, the second step fails
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # your optimizer

    def forward_backward(schedule, inputs, labels):
        optimizer.zero_grad()
        losses = []
        # The first stage takes the inputs, the last stage the labels. schedule.step changes no
        # weights: it runs the forward and backward passes of all micro-batches. It adds up their
        # gradients and divides by their number (right for a mean loss, wrong for a sum). It tells
        # DDP to average the gradients over the replicas in the last backward pass alone.
        if stage == 0:
            schedule.step(inputs.to(device))
        elif stage < STAGES - 1:
            schedule.step()
        else:
            schedule.step(target=labels.to(device), losses=losses)
        # Only the last stage knows the loss. The other returns 0: the sum over ranks stays right.
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    # Checks, for the lesson only: does the split model compute what the unsplit one does? When does
    # each stage compute? GPipe runs all forward passes, then all backward passes. 1F1B (one
    # forward, one backward) starts a backward pass as soon as it can, and so keeps fewer
    # activations in memory.
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        # With NCCL, torch 2.15 warns here of "an eager NCCL communicator". The warning is about a
        # stage that exchanges tensors with several others. Here each stage has one neighbour.
        timed = TimedStage(model, stage, STAGES, device, group=mesh.get_group("pp"))
        schedule = schedule_class(timed, args.microbatches, loss_fn=cross_entropy)  # your loss
        name = schedule_class.__name__.removeprefix("Schedule")
        loss = forward_backward(schedule, *probe)
        compare_with_unsplit(f"pipeline, {name}", args.batch_size, loss, replicas, half)
        runs = []
        for _ in range(5):
            timed.spans = ()
            dist.barrier()
            forward_backward(schedule, *probe)
            runs.append(gathered(timed.spans)[:STAGES])  # replica 0 has the first ranks
        show_schedule(name, min(runs, key=duration), args.microbatches)

    # Step 5: train. As in the first way, but with a plain stage: TimedStage, which measures, makes
    # Python wait for the GPU. Notes for a training of your own:
    # - All batches, and so all micro-batches, need the same shape.
    # - To clip: add up the squared norms of the stages, by all_reduce with mesh.get_group("pp").
    #   Scale the gradients of each stage by min(1, limit / the root of that).
    # - To evaluate: call model.eval(), then schedule.eval with the arguments of schedule.step. On
    #   the last stage, it returns the outputs of the batch: count there, and 0 on the other stages.
    #   Then all ranks all_reduce the count. All replicas need equally many batches, as large as
    #   those of training: fill up the last one, and do not count what you have filled in.
    # - To save: each rank of replica 0 saves its stage and its optimizer, in a file of its own. A
    #   slice of a Sequential keeps its names, so that all stages' state_dicts together are that of
    #   the model. To resume, each rank loads its stage's file before DDP wraps the stage. A crash
    #   may come between two of the saves: put the epoch into the names, and take the last epoch
    #   that all stages have.
    # - For bfloat16: put torch.autocast into the forward of your stages.
    # - With class weights, divide by the weights of the whole batch. Before schedule.step, the last
    #   stages compute total = class_weights[labels].sum(), and all_reduce it with
    #   mesh.get_group("dp"). loss_fn, a function beside forward_backward that reads total, returns
    #   cross_entropy(outputs, labels, weight=class_weights, reduction="sum") * args.microbatches
    #   * replicas / total.
    # - With dropout: seed in train_epochs by epoch and rank, as in 01.
    # - In both modes, BatchNorm normalises each micro-batch by itself.
    # In mode devices, the rest is as in 01, but labels and sums belong on the second device.
    plain = PipelineStage(model, stage, STAGES, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(plain, args.microbatches, loss_fn=cross_entropy)  # your loss
    forward_backward = functools.partial(forward_backward, schedule)
    train_epochs(args, forward_backward, optimizer, replica, replicas)
    compare_replicas(model, "each stage", stage)
    show_memory(half, optimizer, f"stage {stage}")


def settle_stage(model, device):
    """Let DDP arrange its buckets now: otherwise the second step of the pipeline fails."""
    # During its first backward pass, DDP records the order in which gradients come. At the next
    # forward pass it arranges its buckets in that order. But the first step of a pipeline records
    # each gradient twice (torch 2.15). Then the next forward pass fails: "rebuilt parameter indices
    # size is not same as original model parameters size". So make two passes without a pipeline
    # first. (find_unused_parameters=True also helps, but searches the model's graph in every step.
    # With BatchNorm, put its buffers back afterwards, as settle_buckets in 02.)
    for _ in range(2):
        model(torch.zeros(2, WIDTH, device=device)).sum().backward()  # your stage's kind of input
        model.zero_grad()


# The checks of both ways. Skip them at first.


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


def check_backward(split, forward_backward):
    """Raise RuntimeError unless backward() returns each micro-batch before it begins the next."""
    # Of what is ready, autograd takes first what forward() did last. So the order of forward()
    # decides whether the first device has work while the second goes on with the next micro-batch.
    order = []

    def note(tensor, what):
        tensor.register_hook(lambda gradient: order.append(what))  # called in the backward pass

    hooks = (split.second.register_forward_hook(lambda _, inputs, output: note(output, "begins")),
             split.second.register_forward_pre_hook(lambda _, inputs: note(inputs[0], "returns")))
    forward_backward()
    for hook in hooks:
        hook.remove()
    if order != ["begins", "returns"] * split.microbatches:
        raise RuntimeError(f"backward leaves the first device idle: a micro-batch {order}")
    log("backward: each micro-batch returns to the first half before the second begins another")


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


# ---- What any training script needs: the batches, the data, the model ----


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


# ---- Helpers that are no part of the lesson ----


def seconds_of(call, devices):
    """Return the median seconds of five calls, after one to warm up."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        for device in devices:
            if device.type != "cpu":  # a GPU's calls return before the work is done
                torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def show_memory(module, optimizer, what):
    """Log what each rank holds. The unsplit model with gradients and Adam: 4 times its weights."""
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
        self.finish()  # NCCL's wait() holds up the GPU, not Python: waiting would count as work
        start = time.time()
        result = compute(chunk, *args, **kwargs)
        self.finish()
        self.spans = (*self.spans, (kind, chunk, start, time.time()))
        return result

    def finish(self):
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()


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
    log(f"{name}: idle {idle:.0%}. The bubble alone is (p - 1) / (m + p - 1) = {bubble:.0%}, for"
        f" p = {STAGES} stages")
    log(f"and m = {microbatches} micro-batches. DDP averages gradients in the last backward pass")


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


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
    gpus = count_gpus()
    if gpus and args.mode == "all":
        stop("on GPUs the two ways need different numbers of processes: choose --mode devices"
             " (two GPUs a process) or --mode pipeline (one)")
    if args.mode == "devices" and 0 < gpus < 2 * local_world_size:
        stop(f"--mode devices wants two GPUs a process, not {gpus} for {local_world_size}: use half"
             " as many processes as GPUs, or the CPU with CUDA_VISIBLE_DEVICES= in front")
    if 0 < gpus < local_world_size:
        stop(f"{local_world_size} processes want a GPU each and there are {gpus}:"
             f" use --nproc-per-node={gpus}, or the CPU with CUDA_VISIBLE_DEVICES= in front")
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
