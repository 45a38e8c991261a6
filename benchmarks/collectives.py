"""What the operations of 04 cost: time and bandwidth, from 4 KiB to 64 MiB.

    python benchmarks/collectives.py

The ranks are those of one machine: one for each GPU, or two on the CPU. A size is that of the whole
tensor, which all_gather collects and reduce_scatter adds up. Bus bandwidth is size / time, times
the bytes that a rank has to send for each byte of the tensor. So it can be compared with the speed
of the link between two ranks, however many there are (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
A turn is 5 to 64 calls, and their median counts.
Besides the operations alone, what 04 says of them:

all_gather of objects          the tensors as pickles
reduce_scatter and all_gather  the two of which an all_reduce can be made
ring of 04                     its all_reduce by hand
many calls                     1 MiB in one all_reduce, or in many small ones
"""

import time
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from parts.common import (
    alternate,
    find_gpus,
    finish,
    load_script,
    number,
    paired,
    parser,
    process_group,
    run_ranks,
    spread,
)

SIZES = [4096 * 4**k for k in range(8)]
MANY = 2**20  # bytes that are sent in one call, or in many
BESIDE = {  # {operation: the plain one, which it is compared with}
    "all_gather of objects": "all_gather",
    "reduce_scatter and all_gather": "all_reduce",
    "ring of 04": "all_reduce",
}
SCRIPT = load_script("04_collectives.py")


def sides_of(size, world_size, device):
    """{operation: call} on a tensor of that many bytes, or a little less, to make equal chunks."""
    length = size // 4 // world_size
    chunk, whole = (torch.zeros(n, device=device) for n in (length, length * world_size))

    def both():
        SCRIPT.reduce_scatter_single(chunk, whole)
        SCRIPT.all_gather_single(whole, chunk)

    return {
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_gather": lambda: SCRIPT.all_gather_single(whole, chunk),
        "all_gather of objects": lambda: SCRIPT.gathered(chunk.cpu()),
        "reduce_scatter": lambda: SCRIPT.reduce_scatter_single(chunk, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter and all_gather": both,
        "ring of 04": lambda: SCRIPT.ring_all_reduce(whole),
    }


def measure(rank, world_size, store, sizes, rounds):
    """Return {"size operation": [ms of a call in each round]}."""
    device, backend = SCRIPT.pick_device(rank)

    with process_group(backend, store, "collectives", rank, world_size):
        sides = {
            f"{size} {name}": partial(median_ms, call, max(5, min(64, 2**24 // size)), device)
            for size in sizes
            for name, call in sides_of(size, world_size, device).items()
        }
        return alternate(sides, rounds)


def median_ms(call, count, device):
    """Return the median ms of so many calls, one after the other, on the slowest rank."""
    times = []
    dist.barrier()
    for _ in range(count):
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return max(SCRIPT.gathered(median(times)))


def bus_factor(name, world_size):
    """How many bytes a rank has to send, at least, for each byte of the whole tensor."""
    if name == "broadcast":
        return 1
    part = (world_size - 1) / world_size
    return part if BESIDE.get(name, name) in ("all_gather", "reduce_scatter") else 2 * part


def label(size):
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def tables(figures, ranks):
    """[(title, columns, rows)] of {"size operation": [ms of a call in each round]}."""
    rows, many = {}, []
    for key, ms in figures.items():
        size, _, name = key.partition(" ")
        middle, *ends = spread(ms)
        gigabytes = int(size) / middle / 1e6 * bus_factor(name, ranks)
        beside = paired(ms, figures[f"{size} {BESIDE[name]}"]) if name in BESIDE else [None] * 3
        rows.setdefault(int(size), []).append([name, middle, *ends, gigabytes, *beside])
        if name == "all_reduce" and int(size) < MANY and f"{MANY} {name}" in figures:
            calls = MANY // int(size)
            one, all_calls = figures[f"{MANY} {name}"], [calls * each for each in ms]
            many.append([calls, *spread(all_calls), *paired(all_calls, one)])
    columns = {
        "operation": "",
        "ms": ".3f",
        "least": ".3f",
        "most": ".3f",
        "bus, GB/s": ".2f",
        "times the plain one": ".2f",
        "from": ".2f",
        "to": ".2f",
    }
    of_many = {
        "calls": "d",
        "ms in all": ".2f",
        "least": ".2f",
        "most": ".2f",
        "times one call": ".1f",
        "from": ".1f",
        "to": ".1f",
    }
    found = [(f"{label(size)}, {ranks} ranks: ms of a call", columns, rows[size]) for size in rows]
    return [*found, (f"{label(MANY)} by all_reduce in many calls, beside one", of_many, many)]


def main():
    new = parser(__doc__, rounds=9)
    new.add_argument("--sizes", type=number, nargs="+", default=SIZES, help="bytes")
    args = new.parse_args()
    gpus, device = find_gpus(least=2)
    ranks = gpus or 2
    figures = run_ranks(measure, ranks, args.sizes, args.rounds)
    settings = {"ranks": ranks, "rounds": args.rounds}
    finish("collectives", args, device, settings, figures, tables(figures, ranks))


if __name__ == "__main__":
    main()
