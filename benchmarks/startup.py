"""Seconds from the command to the first trained step: 01, 02, 03 against the smallest DDP script.

    python benchmarks/startup.py

Two processes each, the scripts as they are, with generated images. Where the time goes:

launcher    until the last process has its interpreter: the launcher imports torch, too
imports     until it calls init_process_group
joining     in init_process_group
model       until DDP() has returned: images, model, optimizer. The first optimizer or DDP()
            imports a good part of torch that is not needed before, for a second or more
first step  until optimizer.step() has returned
"""

import itertools
import statistics
import sys

from parts.common import ROOT, alternate, finish, paired, parser, spread
from parts.launched import DEVICE, STATIONS, TORCHRUN, Job, have_reached

SMALLEST = {"spawn": "smallest, mp.spawn", "torchrun": "smallest, torchrun"}
SIDES = {  # {name: (command, which of the smallest it is compared with)}
    SMALLEST["spawn"]: ([sys.executable, ROOT / "benchmarks/parts/smallest_ddp.py", 1, 2], "spawn"),
    "01": ([sys.executable, ROOT / "01_single_node_multi_gpu.py", 1, "--nprocs", 2], "spawn"),
    SMALLEST["torchrun"]: ([*TORCHRUN, ROOT / "benchmarks/parts/smallest_ddp.py", 1], "torchrun"),
    "02": ([*TORCHRUN, ROOT / "02_torchrun_elastic.py", 1], "torchrun"),
    "03": ([*TORCHRUN, ROOT / "03_multinode.py", 1], "torchrun"),
}


def start(command):
    """Return the seconds of a start: [one for each of STATIONS], each since the one before."""
    with Job(*command) as job:
        ranks = job.wait_for(have_reached(STATIONS[-1])).values()
    times = [job.begin, *(max(rank[station] for rank in ranks) for station in STATIONS)]
    return [after - before for before, after in itertools.pairwise(times)]


def tables(figures):
    """[(title, columns, rows)] of {side: [[seconds to each station] of each round]}."""
    totals = {name: [sum(parts) for parts in rounds] for name, rounds in figures.items()}
    rows = []
    for name, rounds in figures.items():
        smallest = SMALLEST[SIDES[name][1]]
        rows.append(
            [
                name,
                *spread(totals[name]),
                *paired(totals[name], totals[smallest]),
                *(statistics.median(part) for part in zip(*rounds, strict=True)),
            ]
        )
    columns = {
        "script": "",
        "seconds": ".2f",
        "least": ".2f",
        "most": ".2f",
        "times smallest": ".2f",
        "from": ".2f",
        "to": ".2f",
        "launcher": ".2f",
        "imports": ".2f",
        "joining": ".2f",
        "model": ".2f",
        "first step": ".2f",
    }
    return [("to the first trained step", columns, rows)]


def main():
    new = parser(__doc__, rounds=5)
    new.add_argument("--only", nargs="+", choices=["01", "02", "03"], default=["01", "02", "03"])
    args = new.parse_args()
    used = {SIDES[name][1] for name in args.only}
    sides = {
        name: command
        for name, (command, launcher) in SIDES.items()
        if name in args.only or name in {SMALLEST[each] for each in used}
    }
    sides = {name: lambda command=command: start(command) for name, command in sides.items()}
    figures = alternate(sides, args.rounds)
    finish("startup", args, DEVICE, {"rounds": args.rounds}, figures, tables(figures))


if __name__ == "__main__":
    main()
