"""What tools/check_training.py costs the script that it watches: small steps of DDP, two ranks.

    python benchmarks/watching.py

Two jobs of one script, started by torchrun, the second one by check_training, too. They take turns
of 20 steps, and sleep between them. Before, each has trained for 220 steps: check_training looks
closely at the first 200.

ms         of a step
ms of cpu  of all threads of a rank in a step, which other programs disturb least
"""

import gc
import json
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # else destroy_process_group() leaves connections open
from parts.common import ROOT, alternate, finish, number, paired, parser, share_cores, spread
from parts.launched import TORCHRUN
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIRST, TURN = 220, 20  # steps


def train(port, side, rounds, width):
    """What each rank does: the first steps, then a turn whenever the store has its side's key."""
    store, rank = dist.TCPStore("127.0.0.1", port, is_master=False), os.environ["RANK"]
    share_cores(2)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = 64 * (FIRST + TURN * (rounds + 1))
    dataset = TensorDataset(torch.randn(rows, width), torch.randn(rows, 1))
    layers = [nn.Linear(width, width) for _ in range(8)]
    model = DDP(nn.Sequential(*layers, nn.Linear(width, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    batches = iter(DataLoader(dataset, 32, sampler=DistributedSampler(dataset)))
    for turn in range(rounds + 2):
        count = TURN if turn else FIRST
        store.get(f"{side} {turn}")  # waits
        before = time.perf_counter(), time.process_time()
        for _ in range(count):
            x, y = next(batches)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        after = time.perf_counter(), time.process_time()
        mine = [1e3 * (b - a) / count for a, b in zip(before, after, strict=True)]
        store.set(f"{side} {turn} {rank}", json.dumps(mine))


def tables(figures):
    """[(title, columns, rows)] of {side: [[ms, ms of cpu] of each round]}."""
    columns = {
        "a step": "",
        "bare": ".2f",
        "least": ".2f",
        "most": ".2f",
        "times if watched": ".2f",
        "from": ".2f",
        "to": ".2f",
    }
    rows = []
    for i, what in enumerate(("ms", "ms of cpu")):
        bare, watched = ([turn[i] for turn in figures[side]] for side in ("bare", "watched"))
        rows.append([what, *spread(bare), *paired(watched, bare)])
    return [("a step of DDP, watched by check_training", columns, rows)]


def main():
    new = parser(__doc__, rounds=51)
    new.add_argument("--width", type=number, default=160)
    args = new.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [*TORCHRUN, __file__, store.port]
    check = [sys.executable, ROOT / "tools/check_training.py", "--seconds", 3600, "--stall", 600]
    jobs, turns = {"bare": [], "watched": [*check, "--"]}, dict.fromkeys(("bare", "watched"), 0)

    def take(side):
        """Let both ranks of a job do their next turn; return [ms, ms of cpu] of the slower one."""
        turn, turns[side] = turns[side], turns[side] + 1
        store.set(f"{side} {turn}", "go")
        return max(json.loads(store.get(f"{side} {turn} {rank}")) for rank in range(2))

    environment, running = (
        os.environ
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": socket.if_indextoname(1),
            "OMP_NUM_THREADS": "1",
        },
        [],
    )
    try:
        for side, before in jobs.items():
            words = [*before, *command, side, args.rounds, args.width]
            running.append(
                subprocess.Popen(
                    [*map(str, words)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            )
        for side in jobs:
            take(side)
        figures = alternate({side: lambda side=side: take(side) for side in jobs}, args.rounds)
        for process in running:
            process.wait()
    finally:
        for process in running:
            process.terminate()
            process.wait()
    settings = {"rounds": args.rounds, "width": args.width, "ranks": 2, "steps a turn": TURN}
    finish("watching", args, "cpu", settings, figures, tables(figures))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
        gc.collect()
        dist.destroy_process_group()
    else:
        main()
