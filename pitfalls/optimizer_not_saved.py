"""A snapshot without the optimizer: training goes on from the right place at the wrong speed.

    python pitfalls/optimizer_not_saved.py
    python pitfalls/optimizer_not_saved.py --fixed

You see three epochs without a break, then the third once more, from a snapshot made after the
second. It begins with the right weights and ends with others: SGD has lost its momentum and must
pick up speed again. (Adam would lose the mean and the scale that it keeps for every weight.)
Recognise it: after each resume the loss falls more slowly for a while, or jumps. Nothing fails.
Cure: save optimizer.state_dict() too (the scheduler's as well) and load it, on every rank: DDP
gives all ranks rank 0's model, and takes no care of the optimizer.
"""

import argparse
import tempfile

import torch


def main(fixed):
    model, optimizer = new_start()
    for epoch in (1, 2):
        descend(model, optimizer, f"without a break: epoch {epoch}")
    snapshot = {"model": model.state_dict(), "next_epoch": 3}  # the mistake: this is all
    if fixed:
        snapshot["optimizer"] = optimizer.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(snapshot, f"{folder}/snapshot.pt")
        snapshot = torch.load(f"{folder}/snapshot.pt", weights_only=True)
    descend(model, optimizer, "without a break: epoch 3")
    resumed, optimizer = new_start()
    resumed.load_state_dict(snapshot["model"])
    if fixed:
        optimizer.load_state_dict(snapshot["optimizer"])
    descend(resumed, optimizer, f"resumed:         epoch {snapshot['next_epoch']}")
    difference = (resumed.weight - model.weight).abs().max().item()
    assert fixed == (difference == 0), f"it turned out differently: {difference}"
    print(f"{'cured' if fixed else 'symptom'}: after epoch 3 weights differ by {difference:.2g}")


def new_start():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def descend(model, optimizer, name):
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"{name}, loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
