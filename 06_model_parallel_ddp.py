"""Split a model over two devices, or over two processes, and train replicas of it with DDP.

    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py                  # CPU: both
    torchrun --standalone --nproc-per-node=2 06_model_parallel_ddp.py --mode devices   # 4 GPUs
    torchrun --standalone --nproc-per-node=4 06_model_parallel_ddp.py --mode pipeline  # 4 GPUs

A model too large for one device is most often sharded (FSDP2). Or cut it between layers:
- mode devices: one process drives two devices, each with half of the layers.
- mode pipeline: each half, a stage, has a process (a rank) of its own. The stages send each other
  activations (what a layer returns) and their gradients.
Both cut a batch into micro-batches, so that both halves of the model can compute at once, each on
another micro-batch. DDP trains replicas of the split model, as in 01. You see that they end with
the weights of the unsplit model:

    [rank 0/4] replica 0: stage 0 is rank 0 <-> stage 1 is rank 1
    [rank 0/4] replica 1: stage 0 is rank 2 <-> stage 1 is rank 3
    [rank 0/4] stage 0 |00.11.........aaaaaaa222222bbbb33......cccccccc............ddddddddddd|
    [rank 0/4] stage 1 |.....0000aaaaa....11bbbbbb........22ccc...333ddddddddddd..............|
    [rank 0/4] 1F1B: idle 44%, the bubble alone 20%; stage 0 kept the activations of 2 micro-batches
    [rank 0/4] against the unsplit model: weights off by 7.9e-07 of their largest change

Time runs to the right. 0 to 3: forward passes of 4 micro-batches; a to d: their backward passes (in
d, DDP exchanges, too). A dot: the stage is idle, while the pipeline fills and empties (the bubble),
and here also because 4 processes share 2 cores. 1F1B and GPipe are two schedules. For a model of
your own, read docs/which_parallelism.md. Next: template/, for a job of your own.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # keep it: imported later, by DDP, it holds the connections open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 0
BATCH = 256  # examples a step, over all replicas
STAGES = 2  # of the pipeline
WIDTH, BLOCKS, CLASSES = 256, 8, 10  # of the model


@record  # when a process fails, torchrun's report shows its traceback
def main():
    args = parse_args()

    # Part 1: start. torchrun has started this file once for each process, and tells each of them
    # its number on this machine. In mode devices, process 0 takes GPUs 0 and 1, process 1 takes
    # GPUs 2 and 3, and so on.
    local_rank = int(os.environ["LOCAL_RANK"])
    device, backend = pick_device(2 * local_rank if args.mode == "devices" else local_rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback: this machine
    if args.mode == "all" and device.type != "cpu":
        raise SystemExit("on GPUs, choose --mode devices (two a process) or --mode pipeline (one)")

    # Part 2: meet. device_id names the one GPU on which a process exchanges tensors. A process that
    # drives two leaves it out: DDP exchanges gradients on both.
    if args.mode == "devices":
        let_nccl_use_two_gpus()
    one_gpu = args.mode == "pipeline" and device.type != "cpu"
    dist.init_process_group(backend, device_id=device if one_gpu else None)

    if args.mode != "pipeline":
        train_devices(device, args)  # parts 3, 4 and 5, the first way
    if args.mode != "devices":
        mesh = make_mesh(device)
        for schedule_class in (ScheduleGPipe, Schedule1F1B):
            train_pipeline(schedule_class, mesh, device, args)  # parts 3, 4 and 5, the second way

    # Part 6: leave. Free DDP, which still holds the connections. Then close them.
    gc.collect()
    dist.destroy_process_group()


def train_devices(device, args):
    """First way: one process drives two devices, and is one replica."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # On a CPU, both halves are on the same device: that shows how it is done, and gains nothing.
    second_device = device if device.type == "cpu" else torch.device(device.type, device.index + 1)
    log("== devices: each rank is a replica, one process that drives two devices")
    log(f"first half on {device}, second half on {second_device}", every_rank=True)

    # Part 3: share the data. Each rank trains on its own share of every batch.
    data = make_data()  # your data

    # Part 4: build the model, and wrap it. DDP leaves the parameters where they are. It gets no
    # device_ids, which other guides give: they are for a model on one device.
    split = TwoDevices(make_model(), device, second_device, args.microbatches)  # your model
    model = DDP(split, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model.parameters())

    # Part 5: train, as in 01. But the model returns its outputs on the second device.
    for epoch in range(1, args.epochs + 1):
        losses = []
        for inputs, labels in batches(data, epoch, rank, world_size):
            inputs, labels = inputs.to(device), labels.to(second_device)
            loss = cross_entropy(model(inputs), labels)  # your loss
            optimizer.zero_grad()
            loss.backward()  # in here, DDP averages the gradients over the replicas
            optimizer.step()
            losses.append(loss.detach())
        log_epoch(epoch, args, losses, world_size)

    show_memory([mib(split.first, optimizer), mib(split.second, optimizer)])
    compare_with_unsplit(model, 1, args)


class TwoDevices(nn.Module):
    """A model with the first half of its layers on one device, and the rest on another."""

    def __init__(self, layers, device, second_device, microbatches):
        super().__init__()
        self.second_device, self.microbatches = second_device, microbatches
        half = len(layers) // 2  # cut where both halves fit, and take about as much time
        self.first = layers[:half].to(device)
        self.second = layers[half:].to(second_device)

    def forward(self, inputs):
        # Python does not wait for a GPU: it queues the work and goes on. So the first GPU can
        # compute a micro-batch while the second still has the one before. With the batch in one
        # piece, each GPU would be idle while the other computes.
        outputs = []
        for chunk in inputs.tensor_split(self.microbatches):
            middle = self.first(chunk).to(self.second_device)  # backward() copies its gradient back
            outputs.append(self.second(middle))
        return torch.cat(outputs)


def make_mesh(device):
    """Return a grid of ranks: a row for each replica, a column for each stage."""
    # Each column ("dp", data parallel: the replicas of a stage) and each row ("pp", pipeline
    # parallel: the stages of a replica) is a process group of its own.
    replicas = dist.get_world_size() // STAGES
    mesh = init_device_mesh(device.type, (replicas, STAGES), mesh_dim_names=("dp", "pp"))
    log("== pipeline: each rank is a stage. Activations go right, and gradients left")
    for replica, ranks in enumerate(mesh.mesh.tolist()):
        stages = (f"stage {index} is rank {rank}" for index, rank in enumerate(ranks))
        log(f"replica {replica}: {' <-> '.join(stages)}")
    return mesh


def train_pipeline(schedule_class, mesh, device, args):
    """Second way: one process for each stage; the stages of a row are one replica."""
    replica, stage_index = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    replicas = mesh.size(0)
    name = schedule_class.__name__.removeprefix("Schedule")
    log(f"== pipeline, {name}")

    # Part 3: share the data. By replica, not by rank: the stages of a replica need the same share.
    data = make_data()  # your data

    # Part 4: build the model, and wrap it. Each rank keeps the layers of its stage. DDP gets the
    # group of its column, and averages gradients over the replicas of this stage.
    whole = make_model()  # your model
    begin = len(whole) * stage_index // STAGES
    end = len(whole) * (stage_index + 1) // STAGES
    layers = whole[begin:end].to(device)
    model = DDP(layers, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    # Two plain passes first. In the first, DDP notes the order of the gradients; before the second,
    # it sorts its buckets. A schedule's passes would confuse it: pitfalls/ddp_around_a_stage.py.
    for _ in range(2):
        model(torch.zeros(2, WIDTH, device=device)).sum().backward()  # any input of its kind
    optimizer = make_optimizer(model.parameters())

    # The schedule is the order in which a stage computes. GPipe: all forward passes, then all
    # backward passes. 1F1B, "one forward, one backward": after the first ones, each forward pass
    # waits for a backward pass. So fewer activations are in memory; the bubble is the same.
    # (TimedStage notes when it computes. For a real job, take PipelineStage.)
    stage = TimedStage(model, stage_index, STAGES, device, group=mesh.get_group("pp"))
    schedule = schedule_class(stage, args.microbatches, loss_fn=cross_entropy)  # your loss

    # Part 5: train. schedule.step runs the forward and backward passes of all micro-batches, and
    # sends activations and gradients to the other stages. It averages the gradients of the weights
    # over the micro-batches, and DDP, in the last backward pass, over the replicas.
    for epoch in range(1, args.epochs + 1):
        losses, step_losses = [], []
        for inputs, labels in batches(data, epoch, replica, replicas):
            optimizer.zero_grad()
            if stage_index == 0:
                schedule.step(inputs.to(device))
            elif stage_index < STAGES - 1:
                schedule.step()  # its inputs come from the stage before
            else:
                schedule.step(target=labels.to(device), losses=step_losses)  # a list it clears
            optimizer.step()  # schedule.step, despite its name, changes no weights
            losses += step_losses
        log_epoch(epoch, args, losses, replicas)

    draw(name, stage.spans, args.microbatches)
    show_memory(gathered(mib(model, optimizer))[:STAGES])
    compare_with_unsplit(model, STAGES, args)


def log_epoch(epoch, args, losses, replicas):
    """Log the mean loss. Only the last stage of a replica has losses: the others add 0."""
    loss = sum(gathered(torch.stack(losses).mean().item() if losses else 0)) / replicas
    log(f"epoch {epoch}/{args.epochs} | loss {loss:.4f}")


# ---- The lesson ends here. Below: what measures and compares; model, data, what scripts need. ----


class TimedStage(PipelineStage):
    """A PipelineStage that notes when it computes which chunk (micro-batch)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.spans = []  # (stage, mark of the pass, start, end)

    def forward_one_chunk(self, chunk, *args, **kwargs):
        with self.noted("0123456789"[chunk % 10]):
            return super().forward_one_chunk(chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk, *args, **kwargs):
        with self.noted("abcdefghij"[chunk % 10]):
            return super().backward_one_chunk(chunk, *args, **kwargs)

    @contextlib.contextmanager
    def noted(self, mark):
        start = self.now()
        yield
        self.spans.append((self.stage_index, mark, start, self.now()))

    def now(self):
        if self.device.type != "cpu":  # wait for the GPU, to time it
            torch.accelerator.current_stream(self.device).synchronize()
        return time.time()


def draw(name, spans, microbatches, columns=70):
    """Draw the shortest of all steps: when did each stage of replica 0 compute what?"""

    def duration(step):
        return max(end for *_, end in step) - min(start for *_, start, _ in step)

    size = 2 * microbatches  # spans of a step: a forward and a backward pass of each
    stages = gathered([spans[i : i + size] for i in range(0, len(spans), size)])[:STAGES]
    steps = [[*itertools.chain(*parts)] for parts in zip(*stages)]
    step = min(steps, key=duration)
    begin, total = min(start for *_, start, _ in step), duration(step)
    lines = [["."] * columns for _ in range(STAGES)]
    for index, mark, start, end in step:
        first, last = (round((t - begin) / total * columns) for t in (start, end))
        lines[index][first:last] = mark * (last - first)
    for index, line in enumerate(lines):
        log(f"stage {index} |{''.join(line)}|")

    # Even with equal passes and no time for messages, a pipeline idles while it fills and empties:
    # p - 1 of m + p - 1 turns, for p stages and m micro-batches. This is its bubble.
    idle = 1 - sum(end - start for *_, start, end in step) / (STAGES * total)
    bubble = (STAGES - 1) / (microbatches + STAGES - 1)
    # A forward pass leaves activations in memory, and the backward pass frees them.
    changes = (1 if mark.isdigit() else -1 for index, mark, *_ in step if index == 0)
    kept = max(itertools.accumulate(changes))
    log(
        f"{name}: idle {idle:.0%}, the bubble alone {bubble:.0%}; stage 0 kept the activations of"
        f" {kept} micro-batches"
    )


def mib(layers, optimizer):
    """Return the MiB of some layers' weights, gradients and momentum."""
    held = [t for p in layers.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    return sum(t.nbytes for t in held) / 2**20


def show_memory(parts):
    """parts: the MiB of each part of the model."""
    held = " + ".join(f"{part:.1f}" for part in parts)
    log(f"the parts hold {held} MiB of weights, gradients and momentum")


def compare_with_unsplit(model, ranks_a_replica, args):
    """Raise RuntimeError unless all replicas have the weights that the unsplit model trains to."""
    weights = gathered(vector(model))  # of each rank; the stages of a replica follow each other
    if dist.get_rank() > 0:
        return  # rank 0 compares: there is no collective below
    firsts = range(0, len(weights), ranks_a_replica)
    replicas = [torch.cat(weights[first : first + ranks_a_replica]) for first in firsts]
    digests = [hashlib.sha256(replica.numpy()).hexdigest()[:12] for replica in replicas]
    if len(set(digests)) > 1:
        raise RuntimeError(f"the replicas differ: {digests}")
    before, after = train_unsplit(args.epochs)
    off = ((replicas[0] - after).abs().max() / (after - before).abs().max()).item()
    if not off < 1e-5:  # in float32, rounding stays below that
        raise RuntimeError(f"the unsplit model trains to other weights: off by {off:.1e}")
    log(f"against the unsplit model: weights off by {off:.1e} of their largest change")
    if len(replicas) > 1:
        log(f"{len(replicas)} replicas of the model are identical, sha256 {digests[0]}")


@functools.cache
def train_unsplit(epochs):
    """Train the unsplit model in this process alone; return its weights before and after."""
    model, data = make_model(), make_data()
    optimizer, before = make_optimizer(model.parameters()), vector(model)
    for epoch in range(1, epochs + 1):
        for inputs, labels in batches(data, epoch):
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return before, vector(model)


def vector(model):
    """Return all weights of a model, on whatever devices, as one vector on the CPU."""
    return torch.cat([weights.detach().cpu().flatten() for weights in model.parameters()])


def make_model():
    """Return the whole model, the same on every rank: float32 (N, WIDTH) to logits (N, CLASSES)."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


class Block(nn.Module):
    """One layer of a deep MLP: float32 (N, WIDTH) to the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.layers(x)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)  # your optimizer


def make_data():
    """Return inputs, float32 (1024, WIDTH), and labels, int64 (1024,): ten clouds of points."""
    generator = torch.Generator().manual_seed(SEED)  # all ranks must generate the same set
    labels = torch.randint(CLASSES, (1024,), generator=generator)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    return centers[labels] + 3 * torch.randn(1024, WIDTH, generator=generator), labels


def batches(data, epoch, replica=0, replicas=1):
    """Yield (inputs, labels): a replica's share of each batch, in the epoch's order."""
    inputs, labels = data
    generator = torch.Generator().manual_seed(SEED + epoch)  # one order for all ranks
    for batch in torch.randperm(len(inputs), generator=generator).split(BATCH):
        share = batch[replica::replicas]
        yield inputs[share], labels[share]


def pick_device(local_rank):
    """Return (device, backend): GPU number local_rank with its backend, or the CPU with Gloo."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(gpu or "cpu")
    if backend != "gloo":
        if local_rank >= torch.accelerator.device_count():
            raise SystemExit("each process needs a GPU: start fewer, or set CUDA_VISIBLE_DEVICES=")
        torch.accelerator.set_device_index(local_rank)  # without it, all take memory of GPU 0, too
        return torch.device(gpu.type, local_rank), backend
    # The CPU, also on a Mac: Gloo cannot send tensors of its GPU. One thread for each process:
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # often faster
    return torch.device("cpu"), "gloo"


def let_nccl_use_two_gpus():
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"  # torch 2.15's new code for NCCL takes one only


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("epochs", type=int, nargs="?", default=3, help="3 by default")
    parser.add_argument("--mode", choices=("devices", "pipeline", "all"), default="all")
    parser.add_argument("--microbatches", type=int, default=4, help="of a replica; 4 by default")
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    world_size = int(os.environ["WORLD_SIZE"])
    if args.mode != "devices" and world_size % STAGES:
        parser.error(f"{world_size} processes make no grid of {STAGES} stages")
    if min(args.epochs, args.microbatches) < 1 or BATCH % (world_size * args.microbatches):
        parser.error(
            f"EPOCHS and --microbatches must be 1 or more, and {BATCH} examples a step a"
            " multiple of processes x micro-batches"
        )
    if args.mode != "devices" and args.microbatches < STAGES:
        parser.error(f"{STAGES} stages need {STAGES} micro-batches or more")
    return args


if __name__ == "__main__":
    main()
