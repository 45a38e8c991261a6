"""The finished epoch saved as the one to go on with: every resume trains an epoch twice.

    python pitfalls/off_by_one_epoch.py
    python pitfalls/off_by_one_epoch.py --fixed

You see a training of four epochs that stops after the third one. A second start goes on from the
snapshot. It trains epoch 3 again, and its weights differ from those of a training without a stop.

Recognise it: list the epochs in your log, over all restarts (grep epoch *.log). An epoch that comes
twice, with the lower loss the second time, was trained twice. If an epoch takes an hour and the job
is restarted every hour, the job never ends: each start repeats what the one before has done.
Cure: save the epoch to go on with, epoch + 1, under a name that says so: "next_epoch".
"""

import argparse
import os
import tempfile

import torch


def broken(last_epoch, path):
    model, optimizer, snapshot = new_or_saved(path)
    epochs = range(snapshot.get("epoch", 1), last_epoch + 1)
    for epoch in epochs:
        train_a_step(model, optimizer, epoch)
        # The mistake: this epoch is done, and a resume starts with it.
        torch.save({"model": model.state_dict(), "epoch": epoch}, path)
    return list(epochs)


def fixed(last_epoch, path):
    model, optimizer, snapshot = new_or_saved(path)
    epochs = range(snapshot.get("next_epoch", 1), last_epoch + 1)
    for epoch in epochs:
        train_a_step(model, optimizer, epoch)
        # The cure: the epoch that a resume starts with.
        torch.save({"model": model.state_dict(), "next_epoch": epoch + 1}, path)
    return list(epochs)


def main(cure):
    train_until = fixed if cure else broken
    with tempfile.TemporaryDirectory() as folder:
        first = train_until(3, f"{folder}/stopped.pt")
        second = train_until(4, f"{folder}/stopped.pt")
        train_until(4, f"{folder}/whole.pt")
        stopped, whole = (torch.load(f"{folder}/{name}.pt") for name in ("stopped", "whole"))
    print(f"first start:  epochs {first}, then it stops\nsecond start: epochs {second}")
    difference = (stopped["model"]["weight"] - whole["model"]["weight"]).abs().max().item()
    trained = first + second
    if trained != ([1, 2, 3, 4] if cure else [1, 2, 3, 3, 4]) or cure != (difference == 0):
        raise RuntimeError(f"epochs {trained}, weights off by {difference}")
    print(
        f"{'cured' if cure else 'symptom'}: trained epochs {' '.join(map(str, trained))};"
        f" the weights are off by {difference:.2g}"
    )


def new_or_saved(path):
    """Return a new model and its optimizer, and the snapshot at path, if there is one."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    snapshot = torch.load(path) if os.path.exists(path) else {}
    if snapshot:
        model.load_state_dict(snapshot["model"])
    return model, torch.optim.SGD(model.parameters(), lr=0.05), snapshot


def train_a_step(model, optimizer, epoch):
    """One step, which is an epoch here, with samples that depend on the epoch."""
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(epoch))
    optimizer.zero_grad()
    (model(inputs).squeeze(1) - inputs.sum(1)).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
