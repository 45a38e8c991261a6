"""What a network costs DDP: the same steps between machines whose links are held to a rate.

    python benchmarks/network.py

On one machine, two ranks on CPUs share their cores with the exchange of their gradients, so that
nothing can overlap. Here each rank has a machine of launch/lab, and each link carries so many
bits a second: the exchange takes time, and hardly any of the cores. The first part repeats the
experiments of S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training" (VLDB 2020), figures 6, 7 and 10, on two machines and at three rates:

overlap     no exchange, exchange after backward, exchange during backward (as DDP does)
buckets     of several sizes
no_sync     gradients of several batches added up before they are exchanged
hooks       gradients sent as fp16, as bf16, or by PowerSGD (matrix rank 4, one bucket)

A step is forward, backward and exchange of a stack of layers of Linear and GELU, without the
optimizer. The second part is the cost of more machines, 1 to 8, each with one rank. All of them
share the cores of this computer, so that the computation is a sleep of fixed length there:

meeting     seconds from the command to a connected group, and what went through machine 1's card
step        the sleep and an all-reduce of 1 MB: efficiency is the sleep's part of it
model       an all-reduce of S bytes over N ranks takes 2 (N - 1) a + 2 (N - 1) / N * S / b. The
            latency a and the bandwidth b are fitted on 2 and 4 machines; the rest is a prediction

Needs Linux and launch/lab: network namespaces, tc, and a kernel with tbf.
"""

import copy
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
from parts.common import (
    alternate,
    finish,
    load_script,
    number,
    paired,
    parser,
    process_group,
    seconds,
    spread,
)
from parts.machines import bits_per_second, machines
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

BUCKETS = (0.5, 1, 2, 4, 8)  # MiB; a layer has half a MiB, all of them six
ACCUMULATED = (2, 4, 8, 16)  # batches
CPU = torch.device("cpu")
SIZES = (16_000, 125_000, 1_000_000)  # bytes of an all-reduce
SLEEP = 0.05  # seconds: the computation of a step in the second part


def new_model(layers, width, rows):
    torch.manual_seed(0)
    stack = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*stack), torch.randn(rows, width)


def steps_of(model, batch, count=1):
    """A call: a step of a DDP model over count batches, after the two in which it settles."""

    def step():
        with model.no_sync():
            for _ in range(count - 1):
                model(batch).sum().backward()
        model(batch).sum().backward()

    for _ in range(2):  # DDP lays its buckets out anew at the second
        step()
    return step


def with_hook(model, state, hook):
    model.register_comm_hook(state, hook)
    return model


def ddp_sides(net, batch):
    """{name: (call, how many batches it computes)}"""

    def ddp(**options):
        return DDP(copy.deepcopy(net), gradient_as_bucket_view=True, **options)

    usual = ddp()
    gradient = torch.zeros(sum(p.numel() for p in net.parameters()))

    def compute():
        with usual.no_sync():
            usual(batch).sum().backward()

    def exchange_after():
        compute()
        dist.all_reduce(gradient)

    # In one bucket: with several, PowerSGD's exchanges come in different orders on Gloo, and abort.
    power = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    sides = {
        "no exchange": compute,
        "exchange alone": lambda: dist.all_reduce(gradient),
        "exchange after backward": exchange_after,
        "exchange during backward": steps_of(usual, batch),
    }
    sides |= {
        f"buckets of {size} MiB": steps_of(ddp(bucket_cap_mb=size), batch) for size in BUCKETS
    }
    sides |= {
        "sent as fp16": steps_of(with_hook(ddp(), None, default_hooks.fp16_compress_hook), batch),
        "sent as bf16": steps_of(with_hook(ddp(), None, default_hooks.bf16_compress_hook), batch),
        "sent by PowerSGD": steps_of(
            with_hook(ddp(bucket_cap_mb=1000), power, powerSGD_hook), batch
        ),
    }
    found = {name: (call, 1) for name, call in sides.items()}
    return found | {
        f"{n} batches, one exchange": (steps_of(ddp(), batch, n), n) for n in ACCUMULATED
    }


def measure_ddp(rank, world_size, store, layers, width, rows, batches, rounds):
    """{side: [ms of one batch in each round]}; a turn has so many batches, at least."""
    net, batch = new_model(layers, width, rows)
    with process_group("gloo", store, "ddp", rank, world_size):
        timed = {}
        for name, (call, count) in ddp_sides(net, batch).items():
            turns = -(-batches // count)

            def take_turn(call=call, count=count, turns=turns):
                elapsed = seconds(lambda: [call() for _ in range(turns)], CPU)
                return 1000 * elapsed / (turns * count)

            timed[name] = take_turn
        return {"ms": alternate(timed, rounds)}


def card_bytes():
    """What has gone through this machine's network card so far, in both directions."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = counts.split()
            return int(fields[0]) + int(fields[8])
    raise RuntimeError("this machine has no eth0")


def measure_growth(rank, world_size, store, repeats, rounds):
    """{"meeting": [...], "ms": {side: [ms in each round]}} of one number of machines."""
    ring_all_reduce = load_script("04_collectives.py").ring_all_reduce
    before, begin = card_bytes(), time.perf_counter()
    with process_group("gloo", store, "growth", rank, world_size):
        joining, traffic = time.perf_counter() - begin, card_bytes() - before
        dist.barrier()
        connected = time.time()
        tensors = {size: torch.zeros(size // 4) for size in SIZES}
        sides = {
            f"all-reduce of {size} bytes": lambda t=t: dist.all_reduce(t)
            for size, t in tensors.items()
        }

        def step():
            time.sleep(SLEEP)
            dist.all_reduce(tensors[SIZES[-1]])

        sides["step"] = step
        if world_size > 1:
            sides["ring of 04"] = lambda: ring_all_reduce(tensors[SIZES[-1]])
        timed = {
            name: lambda call=call: (
                1000 / repeats * seconds(lambda: [call() for _ in range(repeats)], CPU)
            )
            for name, call in sides.items()
        }
        return {
            "joining": joining,
            "traffic": traffic,
            "connected": connected,
            "ms": alternate(timed, rounds),
        }


def fit(growth, fitted=(2, 4)):
    """The model's (latency in ms, bandwidth in bytes a ms), from all sizes on those machines.

    Least squares of the relative errors: each all-reduce counts alike, the short and the long.
    """
    rows = []
    for count in fitted:
        for size in SIZES:
            ms = statistics.median(growth[str(count)]["ms"][f"all-reduce of {size} bytes"])
            rows.append([2 * (count - 1) / ms, 2 * (count - 1) / count * size / ms])
    solution = torch.linalg.lstsq(
        torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), 1, dtype=torch.float64)
    ).solution
    latency, inverse = solution.flatten().tolist()
    return latency, 1 / inverse


def predicted(count, size, latency, bandwidth):
    """ms of an all-reduce of size bytes over count machines."""
    return 2 * (count - 1) * latency + 2 * (count - 1) / count * size / bandwidth


def best_buckets(sides):
    """(the sizes chosen, [ms in each round]): a round takes the size that is best in the others.

    The least median of five sizes is partly luck. In a round that had no part in the choice, a size
    that was only lucky is no faster than the others.
    """
    buckets = {name: ms for name, ms in sides.items() if name.startswith("buckets")}
    rounds = range(len(sides["exchange during backward"]))

    def median_elsewhere(name, left_out):
        return statistics.median(ms for n, ms in enumerate(buckets[name]) if n != left_out)

    chosen = [min(buckets, key=lambda name: median_elsewhere(name, n)) for n in rounds]
    sizes = [name.split()[2] for name in buckets if name in chosen]
    ms = [buckets[name][n] for n, name in enumerate(chosen)]
    return f"buckets of {' or '.join(sizes)} MiB", ms


def tables(figures, weights):
    """[(title, columns, rows)]; weights: the bytes of the model of the first part."""
    ddp, growth = figures["ddp"], figures["growth"]
    latency, bandwidth = fit(growth)
    return [
        *(table_of_ddp(rate, sides) for rate, sides in ddp.items()),
        table_of_all_reduces(ddp, weights),
        table_of_growth(growth, figures["growth rate"]),
        table_of_model(growth, latency, bandwidth),
        table_of_line(latency, bandwidth),
    ]


def table_of_ddp(rate, sides):
    during = sides["exchange during backward"]
    rows = [[name, *spread(ms), *paired(ms, during)] for name, ms in sides.items()]
    if len(during) > 1:
        names, ms = best_buckets(sides)
        rows.append([f"{names}, chosen in the other rounds", *spread(ms), *paired(ms, during)])
    columns = {
        "side": "",
        "median": ".0f",
        "least": ".0f",
        "most": ".0f",
        "times DDP": ".2f",
        "from": ".2f",
        "to": ".2f",
    }
    return f"two machines at {rate}: ms of a batch", columns, rows


def table_of_all_reduces(ddp, weights):
    rows = []
    for rate, sides in ddp.items():
        model = 1000 * 8 * weights / bits_per_second(rate)
        after = [
            a - b
            for a, b in zip(sides["exchange after backward"], sides["no exchange"], strict=True)
        ]
        rows.append([rate, model, *spread(sides["exchange alone"]), statistics.median(after)])
    columns = {
        "rate": "",
        "bytes / rate": ".0f",
        "alone": ".0f",
        "least": ".0f",
        "most": ".0f",
        "after backward": ".0f",
    }
    return f"all-reduce of {weights / 1e6:.1f} MB between two machines, ms", columns, rows


def table_of_growth(growth, rate):
    base, rows = growth["1"]["ms"]["step"], []
    for count, found in growth.items():
        ms, ring = found["ms"], None
        if "ring of 04" in ms:
            ring = paired(ms["ring of 04"], ms[f"all-reduce of {SIZES[-1]} bytes"])[0]
        rows.append(
            [
                int(count),
                found["connected"] - found["begin"],
                found["joining"],
                found["traffic"] / 1000,
                *spread(ms["step"]),
                paired(base, ms["step"])[0],
                ring,
            ]
        )
    columns = {
        "machines": "d",
        "to the group, s": ".1f",
        "joining, s": ".2f",
        "kB while joining": ".0f",
        "a step, ms": ".0f",
        "least": ".0f",
        "most": ".0f",
        "efficiency": ".2f",
        "04's ring / Gloo's": ".2f",
    }
    title = (
        f"machines at {rate}: a sleep of {1000 * SLEEP:.0f} ms, and an all-reduce of"
        f" {SIZES[-1] / 1e6:.0f} MB"
    )
    return title, columns, rows


def table_of_model(growth, latency, bandwidth):
    rows = []
    for count in [count for count in (2, 4, 8) if str(count) in growth]:
        for size in SIZES:
            measured = growth[str(count)]["ms"][f"all-reduce of {size} bytes"]
            model = predicted(count, size, latency, bandwidth)
            rows.append(
                [
                    f"{count}, {'predicted' if count == 8 else 'fitted'}",
                    size / 1000,
                    *spread(measured),
                    model,
                    model / statistics.median(measured) - 1,
                ]
            )
    columns = {
        "machines": "",
        "kB": ".0f",
        "ms": ".1f",
        "least": ".1f",
        "most": ".1f",
        "model": ".1f",
        "off by": "+.0%",
    }
    return (
        f"the model: {latency:.2f} ms a message, {8 * bandwidth / 1e3:.0f} Mbit/s",
        columns,
        rows,
    )


def table_of_line(latency, bandwidth):
    rows = []
    for count in (16, 64, 256, 1024):
        ms = predicted(count, SIZES[-1], latency, bandwidth)
        rows.append([count, ms, 1000 * SLEEP / (1000 * SLEEP + ms)])
    columns = {"machines": "d", "all-reduce, ms": ".0f", "efficiency": ".2f"}
    return (
        "the model's line, not measured; it knows no stragglers, shared links or trees",
        columns,
        rows,
    )


def main():
    new = parser(__doc__, rounds=5)
    new.add_argument("--rates", nargs="+", default=["4gbit", "2gbit", "1gbit"])
    new.add_argument("--growth-rate", default="200mbit")
    new.add_argument("--layers", type=number, default=12)
    new.add_argument("--width", type=number, default=368)
    new.add_argument("--rows", type=number, default=256, help="of a batch")
    new.add_argument("--batches", type=number, default=10, help="of a turn; default 10")
    new.add_argument(
        "--machines",
        type=number,
        nargs="+",
        default=[1, 2, 4, 8],
        help="of the second part; 1, 2 and 4 must be among them",
    )
    args = new.parse_args()
    if not {1, 2, 4} <= set(args.machines):
        new.error("--machines: 1, 2 and 4, and others")
    figures = {"ddp": {}, "growth": {}, "growth rate": args.growth_rate}
    for rate in args.rates:
        with machines(2, rate) as call:
            figures["ddp"][rate] = call(
                measure_ddp, args.layers, args.width, args.rows, args.batches, args.rounds
            )["ms"]
    for count in args.machines:
        with machines(count, args.growth_rate) as call:
            figures["growth"][str(count)] = call(measure_growth, args.batches, args.rounds)
    weights = args.layers * (args.width + 1) * args.width * 4
    settings = {
        "layers": args.layers,
        "width": args.width,
        "rows": args.rows,
        "batches": args.batches,
        "rounds": args.rounds,
        "bytes": weights,
    }
    finish("network", args, "cpu", settings, figures, tables(figures, weights))


if __name__ == "__main__":
    main()
