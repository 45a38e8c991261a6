"""What a crash costs: seconds from SIGKILL of a rank to the next trained step, and of a snapshot.

    python benchmarks/recovery.py

One of two processes is killed under torchrun. Where the time goes until both train again:

noticing    until torchrun has ended the other one
restart     until the last new process has its interpreter
imports     until it calls init_process_group
joining     in init_process_group: the processes find each other anew
loading     until DDP() has returned: data, model, optimizer, and the snapshot. The first optimizer
            or DDP() imports a good part of torch that is not needed before
first step  until optimizer.step() has returned

The floor is the smallest DDP script. On top of this comes what was trained since the last snapshot,
and is trained again.

The second table: seconds in which training stands still for a snapshot of a size, written as 02
does, and how much of that would be left if it were copied and written in the background.
"""

import itertools
import os
import re
import signal
import statistics
import tempfile
import time

import torch
from parts.common import ROOT, alternate, finish, load_script, paired, parser, spread
from parts.launched import DEVICE, STATIONS, TORCHRUN, Job, alive, have_reached

SCRIPT = load_script("02_torchrun_elastic.py")
NAMES = ("noticing", "restart", "imports", "joining", "loading", "first step")
SMALLEST = "smallest DDP script"


def recover(command, epochs):
    """Kill rank 1 of a job after so many epochs; return ([seconds of each of NAMES], epoch).

    epoch: the median of the seconds of an epoch that the job has reported, or None.
    """
    with Job(*TORCHRUN, "--max-restarts=3", *command) as job:
        first = job.wait_for(have_reached(STATIONS[-1]))
        lines = r"epoch +\d+/.* \| +(\d+) images/s \| saved"
        job.wait_for(lambda job: len(re.findall(lines, job.output.read_text())) >= epochs)
        [victim] = [pid for pid, stations in first.items() if stations["rank"] == "1"]
        [survivor] = [pid for pid in first if pid != victim]
        times = [time.time()]
        os.kill(victim, signal.SIGKILL)
        job.wait_for(lambda job: not alive(survivor))
        times.append(time.time())
        again = job.wait_for(have_reached(STATIONS[-1], apart_from=first)).values()
        times += [max(rank[station] for rank in again) for station in STATIONS]
        speeds = [int(speed) for speed in re.findall(lines, job.output.read_text())]
    epoch = statistics.median(8192 / speed for speed in speeds) if speeds else None
    return [after - before for before, after in itertools.pairwise(times)], epoch


def snapshot_seconds(megabytes, folder):
    """Return [seconds to write a snapshot of that many MB as 02 does, seconds to copy it].

    It takes the place of one of its size, and the copy goes where the one before was, as in a job.
    """
    weights = torch.rand(int(megabytes * 1e6) // 4)
    copy = weights.clone()
    begin = time.perf_counter()
    SCRIPT.save({"model": {"weights": weights}}, os.path.join(folder, f"{megabytes:g}.pt"))
    written = time.perf_counter()
    copy.copy_(weights)
    return [written - begin, time.perf_counter() - written]


def tables(figures):
    """[(title, columns, rows)] of {"recoveries": ..., "snapshots": ..., "epoch": seconds}."""
    rows = []
    for name, rounds in figures["recoveries"].items():
        parts = [statistics.median(part) for part in zip(*rounds, strict=True)]
        rows.append([name, *spread([sum(times) for times in rounds]), *parts])
    columns = {"script": "", "seconds": ".2f", "least": ".2f", "most": ".2f"}
    columns |= {name: ".2f" for name in NAMES}
    found = [("from SIGKILL to the next trained step", columns, rows)]
    rows = []
    for megabytes, rounds in figures["snapshots"].items():
        writes, copies = zip(*rounds, strict=True)
        write, least, most = spread(writes)
        rows.append(
            [
                f"{float(megabytes):g} MB",
                write,
                least,
                most,
                float(megabytes) / write,
                write / figures["epoch"],
                100 * write,
                *spread(copies),
                1 - paired(copies, writes)[0],
            ]
        )
    columns = {
        "snapshot": "",
        "seconds": ".3f",
        "least": ".3f",
        "most": ".3f",
        "MB/s": ".0f",
        "of an epoch of 02": ".1%",
        "1 % of so many s": ".1f",
        "copy, s": ".3f",
        "from": ".3f",
        "to": ".3f",
        "saved by async": ".0%",
    }
    title = f"a snapshot; an epoch of 02 took {figures['epoch']:.2f} s"
    return [*found, (title, columns, rows)]


def main():
    new = parser(__doc__, rounds=5)
    new.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 1, 10, 100, 1000])
    new.add_argument("--folder", default=".", help="where to write the snapshots; default here")
    args = new.parse_args()
    if not os.access(args.folder, os.W_OK):
        new.error(f"cannot write in {args.folder}: give another --folder")
    if min(args.megabytes) <= 0:
        new.error("--megabytes: sizes above 0")
    # What 02 has within: without it, restarted workers read the addresses of the dead.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    results = alternate(
        {
            SMALLEST: lambda: recover([ROOT / "benchmarks/parts/smallest_ddp.py", 60_000], 0),
            "02": lambda: recover([ROOT / "02_torchrun_elastic.py", 1000], 2),
        },
        args.rounds,
    )
    figures = {name: [parts for parts, _ in found] for name, found in results.items()}
    epoch = statistics.median(epoch for _, epoch in results["02"])
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".snapshots-") as folder:
        sizes = {
            f"{size:g}": lambda size=size: snapshot_seconds(size, folder) for size in args.megabytes
        }
        figures = {
            "recoveries": figures,
            "epoch": epoch,
            "snapshots": alternate(sizes, args.rounds),
        }
    finish("recovery", args, DEVICE, {"rounds": args.rounds}, figures, tables(figures))


if __name__ == "__main__":
    main()
