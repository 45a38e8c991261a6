"""How much faster are 2 and 4 ranks than one? The training loop of 02 on each, and the ideal.

    python benchmarks/scaling.py

One rank has one core, or one GPU. The ideal is as many times the speed of one rank as there are
ranks, and no more than there are cores or GPUs: 4 ranks on 2 cores can be twice as fast as one.

per rank    the batch of each rank is fixed: more ranks, larger steps (weak scaling)
in all      the batch of a step is fixed: more ranks, smaller shares (strong scaling), as 02 does
usual       per rank, but without the scheduling as a batch job that 02 asks Linux for: a
            step, and an all-reduce
strangers   as many single processes side by side, without DDP: what the machine itself allows
all cores   one rank with a thread on each core: the other way to use a CPU

At the end, where a step of the first kind loses time: against a stranger's step, and the all-reduce
of its gradients alone. What is left is waiting, each step, for the slowest rank.
"""

import statistics

import torch
from parts.common import (
    alternate,
    count_cores,
    find_gpus,
    finish,
    load_script,
    number,
    paired,
    parser,
    process_group,
    run_ranks,
    seconds,
    share_cores,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

SCRIPT = load_script("02_torchrun_elastic.py")
pick_device = load_script("04_collectives.py").pick_device


def epoch_speed(device, data, share, steps, ddp):
    """Return the images/s of all ranks of the present group together, in steps of 02's loop."""
    world_size = SCRIPT.dist.get_world_size()
    train_set = TensorDataset(*(tensor[: share * steps * world_size] for tensor in data))
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(
        train_set, batch_size=None, sampler=BatchSampler(sampler, share, drop_last=True)
    )
    torch.manual_seed(0)
    model = SCRIPT.Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    model = DDP(model, gradient_as_bucket_view=True) if ddp else model
    SCRIPT.train_epoch(model, list(loader)[:3], optimizer, device)  # DDP's first steps are its own
    elapsed = seconds(lambda: SCRIPT.train_epoch(model, loader, optimizer, device), device)
    return share * steps * world_size / elapsed


def exchange_ms(device, steps):
    """Return the mean of the ms of an all-reduce as large as the gradients of 02's model."""
    gradient = torch.zeros(sum(p.numel() for p in SCRIPT.Net().parameters()), device=device)

    def exchange():
        for _ in range(steps):
            SCRIPT.dist.all_reduce(gradient)

    exchange()
    return 1000 * seconds(exchange, device) / steps


def measure(rank, _, store, world_sizes, batch_size, steps, rounds):
    """Return {"setting ranks": [images/s of each round]}."""
    device, backend = pick_device(rank)
    data = SCRIPT.generate_data(batch_size * steps * max(world_sizes))
    turns = iter(range(10**6))

    def side(world_size, figure, *arguments, threads=1, batch=True):
        def take_turn():
            turn, result = next(turns), 0.0
            if rank < world_size:  # the others sit it out
                share_cores(1, "SCHED_BATCH" if batch else "SCHED_OTHER")  # also of Gloo's threads
                torch.set_num_threads(threads)
                with process_group(backend, store, f"turn {turn}", rank, world_size):
                    result = figure(device, *arguments)
                if rank == 0:
                    store.set(f"end of turn {turn}", "")
            store.wait([f"end of turn {turn}"])
            return result

        return take_turn

    sides = {}
    for world_size in world_sizes:
        share = batch_size // world_size
        sides[f"per rank {world_size}"] = side(
            world_size, epoch_speed, data, batch_size, steps, True
        )
        sides[f"in all {world_size}"] = side(world_size, epoch_speed, data, share, steps, True)
        if device.type == "cpu":  # with GPUs, the scheduling stays as it is
            sides[f"usual {world_size}"] = side(
                world_size, epoch_speed, data, batch_size, steps, True, batch=False
            )
        sides[f"strangers {world_size}"] = side(
            world_size, epoch_speed, data, batch_size, steps, False
        )
        sides[f"exchange {world_size}"] = side(world_size, exchange_ms, steps)
        if device.type == "cpu":
            sides[f"exchange, usual {world_size}"] = side(
                world_size, exchange_ms, steps, batch=False
            )
    if device.type == "cpu":
        sides["all cores 1"] = side(
            1, epoch_speed, data, batch_size, steps, True, threads=count_cores()
        )
    return alternate(sides, rounds)


def tables(figures, batch_size, places):
    """[(title, columns, rows)]; places: how many cores or GPUs there are."""
    titles = {
        "per rank": f"batch size {batch_size} per rank",
        "in all": f"batch size {batch_size} in all",
        "usual": f"usual scheduling, batch size {batch_size} per rank",
        "strangers": f"strangers, batch size {batch_size} each: no DDP, what the machine allows",
        "all cores": f"one rank with a thread on each core, batch size {batch_size}",
    }
    columns = {
        "ranks": "d",
        "images/s": ".0f",
        "times one rank": ".2f",
        "ideal": "d",
        "efficiency": ".2f",
        "times, from": ".2f",
        "to": ".2f",
    }
    found = []
    for setting, title in titles.items():
        rows = []
        for key, speeds in figures.items():
            if key.startswith(setting):
                ranks = int(key.split()[-1])
                base = figures["per rank 1" if setting == "all cores" else f"{setting} 1"]
                ideal = places if setting == "all cores" else min(ranks, places)
                times, *ends = paired(speeds, base)
                rows.append([ranks, statistics.median(speeds), times, ideal, times / ideal, *ends])
        if rows:
            found.append((title, columns, rows))
    rows = []
    for key, speeds in figures.items():
        if key.startswith("per rank"):
            ranks = int(key.split()[-1])
            step, alone = (
                statistics.median(1000 * batch_size * ranks / speed for speed in side)
                for side in (speeds, figures[f"strangers {ranks}"])
            )
            exchange = statistics.median(figures[f"exchange {ranks}"])
            rows.append([ranks, step, alone, exchange, step - alone - exchange])
    columns = {
        "ranks": "d",
        "a step": ".1f",
        "a stranger's": ".1f",
        "all-reduce": ".1f",
        "the rest": ".1f",
    }
    found.append((f"ms of a step, batch size {batch_size} per rank", columns, rows))
    rows = [
        [
            ranks,
            *paired(figures[f"per rank {ranks}"], usual),
            *paired(figures[f"exchange, usual {ranks}"], figures[f"exchange {ranks}"]),
        ]
        for ranks, usual in (
            (int(key.split()[-1]), speeds)
            for key, speeds in figures.items()
            if key.startswith("usual")
        )
        if ranks > 1
    ]
    if rows:
        columns = {
            "ranks": "d",
            "images/s": ".2f",
            "from": ".2f",
            "to": ".2f",
            "all-reduce": ".2f",
            " from": ".2f",
            " to": ".2f",
        }
        found.append(
            (
                "batch against usual scheduling: speed; usual against batch: all-reduce",
                columns,
                rows,
            )
        )
    return found


def main():
    new = parser(__doc__, rounds=9)
    new.add_argument("--ranks", type=number, nargs="+", help="default: 1 2 4, on GPUs 1 to all")
    new.add_argument("--batch-size", type=number, default=256)
    new.add_argument("--steps", type=number, default=20, help="a turn; default 20")
    args = new.parse_args()
    gpus, device = find_gpus()
    places = gpus or count_cores()
    ranks = args.ranks or ([n for n in (1, 2, 4, 8) if n <= gpus] if gpus else [1, 2, 4])
    ranks = sorted({1, *ranks})  # one is what all are compared with
    if max(ranks) > args.batch_size:
        new.error(f"--batch-size: {max(ranks)} or more, an image for each rank")
    figures = run_ranks(measure, max(ranks), ranks, args.batch_size, args.steps, args.rounds)
    settings = {
        "batch size": args.batch_size,
        "steps": args.steps,
        "rounds": args.rounds,
        "cores or GPUs": places,
    }
    finish("scaling", args, device, settings, figures, tables(figures, args.batch_size, places))


if __name__ == "__main__":
    main()
