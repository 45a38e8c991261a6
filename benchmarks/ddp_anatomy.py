"""Inside one step of DDP: when its buckets are exchanged, and what each of its means is worth.

    python benchmarks/ddp_anatomy.py

The experiments of S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training" (VLDB 2020), figures 6, 7 and 10, at the size of one machine, and two more:

timeline    the layers' backward passes and the buckets' all-reduces, from the profiler
overlap     (figure 6) exchange during backward, as DDP does, and after it
buckets     (figure 7) sizes from 1 to 64 MiB
no_sync     (figure 10) gradients of several batches added up before they are exchanged
memory      of gradients, with and without gradient_as_bucket_view
hooks       gradients sent as fp16 or bf16, half the bytes

Figure 9, more ranks, is scaling.py's. The model: layers of Linear and GELU, all of one width.
It should run on GPUs, one a rank, and has not been tried there so far.
"""

import contextlib
import copy
import gc
import os
import pathlib
import statistics

import torch
import torch.distributed as dist
from common import (
    alternate,
    finish,
    load_script,
    number,
    parser,
    process_group,
    ratio,
    run_ranks,
    seconds,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

SCRIPT = load_script("02_torchrun_elastic.py")
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # MiB
ACCUMULATED = (1, 2, 4, 8, 16)  # batches


def warmed_up(model, batch):
    """Return model after two passes: DDP lays its buckets out anew at the second."""
    for _ in range(2):
        model(batch).sum().backward()
    return model


def profile_step(model, batch, optimizer):
    """Return [[lane, begin, end]], in ms, of one step: layers forth and back, exchange, optimizer.

    On a GPU the exchanges are the kernels of NCCL, the layers the matrix products' kernels.
    """
    activities = [ProfilerActivity.CPU]
    if batch.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        with record_function("## forward"):
            loss = model(batch).sum()
        with record_function("## backward"):
            loss.backward()
        with record_function("## optimizer"):
            optimizer.step()
        if batch.is_cuda:
            torch.cuda.synchronize()
    lanes = {"## forward": "forward", "## backward": "backward", "## optimizer": "optimizer",
             "AddmmBackward0": "layers", "gloo:all_reduce": "all_reduce"}
    spans = []
    for event in profiler.events():
        lane = lanes.get(event.name)
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if event.is_user_annotation:
                continue  # not a kernel: the name of what the CPU had asked for
            lane = "all_reduce" if "nccl" in event.name.lower() else "layers"
        if lane:
            spans.append([lane, event.time_range.start / 1000, event.time_range.end / 1000])
    begin = min(start for _, start, _ in spans)
    return [[lane, start - begin, end - begin] for lane, start, end in spans]


def resident(device):
    """Return the MB that this process, or its tensors on the GPU, take up."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 1e6
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def new_net(rank, world_size, layers, width, batch_size):
    """Return (layers of Linear and GELU, a batch of this rank, the backend)."""
    device, backend = SCRIPT.pick_device(rank)
    SCRIPT.share_cores(world_size)
    torch.manual_seed(0)
    stack = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*stack).to(device), torch.randn(batch_size, width, device=device), backend


def measure_memory(rank, world_size, store, layers, width, batch_size):
    """Return {with or without view: MB of gradients and buckets, after two steps}."""
    net, batch, backend = new_net(rank, world_size, layers, width, batch_size)
    found = {}
    with process_group(backend, store, "memory", rank, world_size):
        warmed_up(DDP(copy.deepcopy(net)), batch)  # once, so that the rest is gradients' alone
        for view in (False, True):
            gc.collect()
            before = resident(batch.device)
            model = DDP(copy.deepcopy(net), gradient_as_bucket_view=view)
            warmed_up(model, batch)
            weights = sum(p.nbytes for p in net.parameters()) / 1e6
            found["with view" if view else "without"] = resident(batch.device) - before - weights
            del model
    return found


def overlap_sides(net, batch):
    """{name: call} of the parts of a step, apart and together."""
    model = warmed_up(DDP(copy.deepcopy(net), gradient_as_bucket_view=True), batch)
    gradient = torch.zeros(sum(p.numel() for p in net.parameters()), device=batch.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def backward(synchronised=True):
        with contextlib.nullcontext() if synchronised else model.no_sync():
            model(batch).sum().backward()

    def exchange_at_the_end():
        backward(synchronised=False)
        gradient.div_(dist.get_world_size())  # as DDP does; one bucket with all gradients
        dist.all_reduce(gradient)

    @torch.no_grad()
    def forward():
        model.module(batch)

    return {
        "forward": forward, "forward and backward": lambda: backward(synchronised=False),
        "exchange": lambda: dist.all_reduce(gradient), "optimizer": optimizer.step,
        "all, exchange after": exchange_at_the_end, "all, exchange during": backward,
    }  # fmt: skip


def bucket_side(net, batch, size):
    model = warmed_up(
        DDP(copy.deepcopy(net), gradient_as_bucket_view=True, bucket_cap_mb=size), batch)
    return lambda: model(batch).sum().backward()


def hook_side(net, batch, hook):
    model = DDP(copy.deepcopy(net), gradient_as_bucket_view=True)
    if hook:
        model.register_comm_hook(None, hook)
    warmed_up(model, batch)
    return lambda: model(batch).sum().backward()


def accumulation_side(net, batch, count):
    model = warmed_up(DDP(copy.deepcopy(net), gradient_as_bucket_view=True), batch)

    def accumulate():
        with model.no_sync():
            for _ in range(count - 1):
                model(batch).sum().backward()
        model(batch).sum().backward()

    return accumulate


def measure(rank, world_size, store, layers, width, batch_size, rounds):
    net, batch, backend = new_net(rank, world_size, layers, width, batch_size)
    with process_group(backend, store, "anatomy", rank, world_size):
        experiments = {
            "overlap": overlap_sides(net, batch),
            "buckets": {size: bucket_side(net, batch, size) for size in BUCKETS},
            "no_sync": {n: accumulation_side(net, batch, n) for n in ACCUMULATED},
            "hooks": {"fp32": hook_side(net, batch, None),
                      "fp16": hook_side(net, batch, default_hooks.fp16_compress_hook),
                      "bf16": hook_side(net, batch, default_hooks.bf16_compress_hook)},
        }  # fmt: skip
        figures = {}
        for name, sides in experiments.items():
            timed = {side: lambda call=call: 1000 * seconds(call, batch.device)
                     for side, call in sides.items()}
            figures[name] = alternate(timed, rounds)
        model = warmed_up(
            DDP(copy.deepcopy(net), gradient_as_bucket_view=True, bucket_cap_mb=8), batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        optimizer.step()
        return figures | {"timeline": profile_step(model, batch, optimizer)}


def tables(figures, parameters):
    """[(title, columns, rows)]; parameters: how many the model has."""
    def rows_of(experiment, base, first, count=lambda name: 1):
        sides = {str(name): values for name, values in figures[experiment].items()}
        return [[first(name), statistics.median(values) / count(name),
                 ratio(values, sides[base]) * count(base) / count(name)]
                for name, values in sides.items()]

    def columns(first, base):
        return {first: "", "ms": ".1f", f"times {base}": ".2f"}

    megabytes = parameters * 4 / 1e6
    exchanges = [[n, e - b] for n, (b, e) in enumerate(
        ((b, e) for lane, b, e in figures["timeline"] if lane == "all_reduce"), 1)]
    during = sum(e - b for lane, b, e in figures["timeline"] if lane == "backward")
    timeline = f"timeline: all-reduces of buckets of 8 MiB, in a backward pass of {during:.1f} ms"
    return [
        (timeline, {"bucket": "d", "ms": ".1f"}, exchanges),
        ("overlap", columns("a step's parts", "the last"),
         rows_of("overlap", "all, exchange during", lambda name: name)),
        ("buckets", columns("MiB", "8 MiB"), rows_of("buckets", "8", lambda name: name)),
        ("no_sync: time of one batch, when several are added up before the exchange",
         columns("batches", "1 batch"), rows_of("no_sync", "1", lambda name: name, int)),
        ("hooks: gradients sent as", columns("type", "fp32"),
         rows_of("hooks", "fp32", lambda name: name)),
        (f"memory of gradients and buckets ({megabytes:.0f} MB of weights)",
         {"gradient_as_bucket_view": "", "MB": ".0f", "times weights": ".2f"},
         [[name, value, value / megabytes] for name, value in figures["memory"].items()]),
    ]


def main():
    new = parser(__doc__, rounds=5)
    new.add_argument("--layers", type=number, default=12)
    new.add_argument("--width", type=number, default=1024)
    new.add_argument("--batch-size", type=number, default=64, help="of a rank")
    args = new.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own remarks: none
    gpus = torch.cuda.device_count()
    if gpus < 2:  # there is nothing to exchange on one: two ranks on the CPU
        gpus, os.environ["CUDA_VISIBLE_DEVICES"] = 0, ""
    sizes = (args.layers, args.width, args.batch_size)
    figures = run_ranks(measure, gpus or 2, *sizes, args.rounds)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system at once
    figures["memory"] = run_ranks(measure_memory, gpus or 2, *sizes)
    parameters = args.layers * (args.width + 1) * args.width
    settings = {"layers": args.layers, "width": args.width, "batch size": args.batch_size,
                "parameters": parameters, "ranks": gpus or 2, "rounds": args.rounds}
    finish("ddp_anatomy", args, "cuda" if gpus else "cpu", settings, figures,
           tables(figures, parameters))


if __name__ == "__main__":
    main()
