"""What launch/check_training.py costs the script that it watches: small steps of DDP, two ranks.

    python benchmarks/watching.py

first     the first 200 steps, in which it looks at each step's time, and at the bits of many
later     the steps after these
cpu       seconds of the processor, of all threads of rank 0: what other programs disturb least
"""

import os
import sys
import tempfile
import time

import torch
from parts.common import (
    ROOT,
    alternate,
    finish,
    number,
    paired,
    parser,
    process_group,
    run_ranks,
    spread,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIRST = 200


def train(rank, world_size, store, records, steps, width):
    """Return {"first" and "later": [milliseconds of a step, of these on the processor]}."""
    if records:
        sys.path.insert(0, str(ROOT / "launch"))
        import check_training_recorder as recorder
        recorder.FOLDER = records
        recorder.install()
        recorder.begin_anew()
        recorder.me.live = True
    with process_group("gloo", store, "watching", rank, world_size):
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(64 * steps, width), torch.randn(64 * steps, 1))
        layers = [nn.Linear(width, width) for _ in range(8)]
        model = DDP(nn.Sequential(*layers, nn.Linear(width, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        loader = DataLoader(dataset, 32, sampler=DistributedSampler(dataset))
        marks = []
        for step, (x, y) in enumerate(loader):
            if step in (20, FIRST, steps - 1):
                marks.append((step, time.perf_counter(), time.process_time()))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return {name: [1e3 * (b - a) / (after[0] - before[0]) for a, b in zip(
        before[1:], after[1:], strict=True)] for name, before, after in zip(
        ("first", "later"), marks[:2], marks[1:], strict=True)}


def watched(steps, width):
    with tempfile.TemporaryDirectory() as records:
        return run_ranks(train, 2, records, steps, width)


def tables(figures):
    """[(title, columns, rows)] of {side: [{when: [ms, ms of cpu]} of each round]}."""
    rows = []
    for when in ("first", "later"):
        for i, what in enumerate(("ms", "ms of cpu")):
            bare, seen = ([turn[when][i] for turn in turns] for turns in figures.values())
            rows.append([f"{when}, {what}", *spread(bare), *paired(seen, bare)])
    columns = {"a step": "", "bare": ".2f", "least": ".2f", "most": ".2f",
               "times if watched": ".2f", "from": ".2f", "to": ".2f"}
    return [("a step of DDP, watched by check_training", columns, rows)]


def main():
    new = parser(__doc__, rounds=5)
    new.add_argument("--steps", type=number, default=600)
    new.add_argument("--width", type=number, default=256)
    args = new.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if args.steps <= FIRST + 1:
        new.error(f"--steps must be more than {FIRST + 1}")
    figures = alternate({
        "bare": lambda: run_ranks(train, 2, "", args.steps, args.width),
        "watched": lambda: watched(args.steps, args.width)}, args.rounds)
    settings = {"rounds": args.rounds, "steps": args.steps, "width": args.width, "ranks": 2}
    finish("watching", args, "cpu", settings, figures, tables(figures))


if __name__ == "__main__":
    main()
