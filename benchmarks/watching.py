"""What launch/check_training.py costs the script that it watches: small steps of DDP, two ranks.

    python benchmarks/watching.py

The recorder is in both ranks, and has seen the first 200 steps, in which it looks closely. Then it
is switched off and on in turns, for 10 steps each. (Switched off, its wrappers are still there: a
test of a flag for each call.)

ms         of a step
ms of cpu  of all threads of rank 0 in a step, which other programs disturb least
"""

import os
import sys
import tempfile
import time

import torch
from parts.common import ROOT, finish, number, paired, parser, process_group, run_ranks, spread
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIRST, TURN = 220, 10  # steps


def train(rank, world_size, store, records, rounds, width):
    """Return {"bare" and "watched": [[ms, ms of cpu] of a step, for each round]}."""
    sys.path.insert(0, str(ROOT / "launch"))
    import check_training_recorder as recorder
    recorder.FOLDER = records
    recorder.install()
    figures, steps = {"bare": [], "watched": []}, FIRST + 2 * TURN * rounds
    with process_group("gloo", store, "watching", rank, world_size):
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(64 * steps, width), torch.randn(64 * steps, 1))
        layers = [nn.Linear(width, width) for _ in range(8)]
        model = DDP(nn.Sequential(*layers, nn.Linear(width, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        batches = iter(DataLoader(dataset, 32, sampler=DistributedSampler(dataset)))

        def take(count):
            before = time.perf_counter(), time.process_time()
            for _ in range(count):
                x, y = next(batches)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            after = time.perf_counter(), time.process_time()
            return [1e3 * (b - a) / count for a, b in zip(before, after, strict=True)]

        take(FIRST)
        for turn in range(rounds):
            for side in sorted(figures, reverse=turn % 2):
                recorder.me.live = side == "watched"
                figures[side].append(take(TURN))
    return figures


def tables(figures):
    """[(title, columns, rows)] of {side: [[ms, ms of cpu] of each round]}."""
    columns = {"a step": "", "bare": ".2f", "least": ".2f", "most": ".2f",
               "times if watched": ".2f", "from": ".2f", "to": ".2f"}
    rows = []
    for i, what in enumerate(("ms", "ms of cpu")):
        bare, watched = ([turn[i] for turn in figures[side]] for side in ("bare", "watched"))
        rows.append([what, *spread(bare), *paired(watched, bare)])
    return [("a step of DDP, watched by check_training", columns, rows)]


def main():
    new = parser(__doc__, rounds=51)
    new.add_argument("--width", type=number, default=256)
    args = new.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as records:
        figures = run_ranks(train, 2, records, args.rounds, args.width)
    settings = {"rounds": args.rounds, "width": args.width, "ranks": 2, "steps a turn": TURN}
    finish("watching", args, "cpu", settings, figures, tables(figures))


if __name__ == "__main__":
    main()
