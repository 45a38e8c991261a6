"""The finished epoch saved as the one to go on with: every resume trains an epoch twice.

    python pitfalls/off_by_one_epoch.py
    python pitfalls/off_by_one_epoch.py --fixed

You see a training of four epochs that stops after the third, and a second start that goes on from
the snapshot: it trains epoch 3 again, and ends with other weights than a training without a stop.
Recognise it: list the epochs that your log names, over all restarts (grep epoch *.log). One that
comes twice, with the lower loss the second time, was trained twice. With a restart every hour and
epochs of an hour, the job never ends: each start repeats what the last one had done.
Cure: save the epoch to go on with, epoch + 1, under a name that says so: "next_epoch".
"""

import argparse
import os
import tempfile

import torch


def main(fixed):
    with tempfile.TemporaryDirectory() as folder:
        first = train_until(3, f"{folder}/stopped.pt", fixed)
        second = train_until(4, f"{folder}/stopped.pt", fixed)
        train_until(4, f"{folder}/whole.pt", fixed)
        stopped, whole = (torch.load(f"{folder}/{name}.pt") for name in ("stopped", "whole"))
    print(f"first start:  epochs {first}, then it stops\nsecond start: epochs {second}")
    difference = (stopped["model"]["weight"] - whole["model"]["weight"]).abs().max().item()
    trained = first + second
    expected = [1, 2, 3, 4] if fixed else [1, 2, 3, 3, 4]
    assert trained == expected and fixed == (difference == 0), "it turned out differently"
    print(f"{'cured' if fixed else 'symptom'}: trained epochs {' '.join(map(str, trained))};"
          f" the weights are off by {difference:.2g}")


def train_until(last_epoch, path, fixed):
    """Go on from the snapshot at path, if there is one; return the epochs trained."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    snapshot = torch.load(path, weights_only=True) if os.path.exists(path) else {"epoch": 1}
    if "model" in snapshot:
        model.load_state_dict(snapshot["model"])
    epochs = list(range(snapshot["epoch"], last_epoch + 1))
    for epoch in epochs:
        inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(epoch))
        (model(inputs).squeeze(1) - inputs.sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        next_epoch = epoch + 1 if fixed else epoch  # the mistake: this epoch is done
        torch.save({"model": model.state_dict(), "epoch": next_epoch}, path)
    return epochs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
