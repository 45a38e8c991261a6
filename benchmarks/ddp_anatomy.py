"""Inside one step of DDP: when its buckets are exchanged, and what its gradients need of memory.

    python benchmarks/ddp_anatomy.py

timeline    one step's backward passes and all-reduces of buckets, from the profiler
memory      of gradients, with and without gradient_as_bucket_view

The model: layers of Linear and GELU, all of one width. What overlap, bucket sizes and accumulation
are worth, network.py measures: between ranks on one CPU there is no network to wait for.
It should run on GPUs, one a rank, and has not been tried there so far.
"""

import copy
import gc
import os
import pathlib

import torch
import torch.distributed as dist
from parts.common import (
    find_gpus,
    finish,
    load_script,
    number,
    parser,
    process_group,
    run_ranks,
    spread,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, record_function

pick_device = load_script("04_collectives.py").pick_device


def warmed_up(model, batch):
    """Return model after two passes: DDP lays its buckets out anew at the second."""
    for _ in range(2):
        model(batch).sum().backward()
    return model


def profile_step(model, batch, optimizer):
    """Return [[lane, begin, end]], in ms, of one step: layers forth and back, exchange, optimizer.

    On a GPU the exchanges are the backend's kernels, the layers the matrix products' kernels.
    """
    with profile() as profiler:
        with record_function("## forward"):
            loss = model(batch).sum()
        with record_function("## backward"):
            loss.backward()
        with record_function("## optimizer"):
            optimizer.step()
        if batch.device.type != "cpu":
            torch.accelerator.synchronize()
        else:
            dist.barrier()  # Gloo's thread notes the end of the last exchange a moment after it
    lanes = {
        "## forward": "forward",
        "## backward": "backward",
        "## optimizer": "optimizer",
        "AddmmBackward0": "layers",
        "gloo:all_reduce": "all_reduce",
    }
    spans = []
    for event in profiler.events():
        lane = lanes.get(event.name)
        if event.device_type != torch.autograd.DeviceType.CPU:
            if event.is_user_annotation:
                continue  # not a kernel: the name of what the CPU had asked for
            lane = "all_reduce" if "ccl" in event.name.lower() else "layers"
        if lane:
            spans.append([lane, event.time_range.start / 1000, event.time_range.end / 1000])
    begin = min(start for _, start, _ in spans)
    return [[lane, start - begin, end - begin] for lane, start, end in spans]


def resident(device):
    """Return the MB that this process, or its tensors on the GPU, take up."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated() / 1e6
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def new_net(rank, layers, width, batch_size):
    """Return (layers of Linear and GELU, a batch of this rank, the backend)."""
    device, backend = pick_device(rank)
    torch.manual_seed(0)
    stack = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*stack).to(device), torch.randn(batch_size, width, device=device), backend


def measure_memory(rank, world_size, store, layers, width, batch_size):
    """Return {with or without view: MB of gradients and buckets, after two steps}."""
    net, batch, backend = new_net(rank, layers, width, batch_size)
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


def measure(rank, world_size, store, layers, width, batch_size):
    net, batch, backend = new_net(rank, layers, width, batch_size)
    with process_group(backend, store, "anatomy", rank, world_size):
        model = warmed_up(
            DDP(copy.deepcopy(net), gradient_as_bucket_view=True, bucket_cap_mb=8), batch
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        optimizer.step()
        return {"timeline": profile_step(model, batch, optimizer)}


def tables(figures, parameters):
    """[(title, columns, rows)]; parameters: how many the model has."""
    megabytes = parameters * 4 / 1e6
    exchanges = [
        [n, e - b]
        for n, (b, e) in enumerate(
            ((b, e) for lane, b, e in figures["timeline"] if lane == "all_reduce"), 1
        )
    ]
    during = sum(e - b for lane, b, e in figures["timeline"] if lane == "backward")
    timeline = f"timeline: all-reduces of buckets of 8 MiB, in a backward pass of {during:.1f} ms"
    return [
        (timeline, {"bucket": "d", "ms": ".1f"}, exchanges),
        (
            f"memory of gradients and buckets ({megabytes:.0f} MB of weights)",
            {
                "gradient_as_bucket_view": "",
                "MB": ".0f",
                "times weights": ".2f",
                "from": ".2f",
                "to": ".2f",
            },
            [
                [name, spread(values)[0], *(value / megabytes for value in spread(values))]
                for name, values in figures["memory"].items()
            ],
        ),
    ]


def main():
    new = parser(__doc__, rounds=5)
    new.add_argument("--layers", type=number, default=12)
    new.add_argument("--width", type=number, default=1024)
    new.add_argument("--batch-size", type=number, default=64, help="of a rank")
    args = new.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own remarks: none
    gpus, device = find_gpus(least=2)  # nothing is exchanged on one: two ranks on the CPU
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sizes = (args.layers, args.width, args.batch_size)
    figures = run_ranks(measure, gpus or 2, *sizes)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system at once
    turns = [run_ranks(measure_memory, gpus or 2, *sizes) for _ in range(args.rounds)]
    figures["memory"] = {name: [turn[name] for turn in turns] for name in turns[0]}
    parameters = args.layers * (args.width + 1) * args.width
    settings = {
        "layers": args.layers,
        "width": args.width,
        "batch size": args.batch_size,
        "parameters": parameters,
        "ranks": gpus or 2,
    }
    finish("ddp_anatomy", args, device, settings, figures, tables(figures, parameters))


if __name__ == "__main__":
    main()
