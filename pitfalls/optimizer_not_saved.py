"""A snapshot without the optimizer: training goes on from the right weights at the wrong speed.

    python pitfalls/optimizer_not_saved.py
    python pitfalls/optimizer_not_saved.py --fixed

You see three epochs without a break. Then the third one is trained once more, from a snapshot made
after the second. It begins with the right weights and ends with others: SGD has lost its momentum
and must pick up speed again. (Adam would lose the two averages that it keeps for every weight.)

Recognise it: nothing fails. After each resume the loss falls more slowly for a while, or jumps.
Cure: save optimizer.state_dict() too, and that of the scheduler, and load them on every rank. DDP
copies the model of rank 0 to all ranks when you wrap it, but not the optimizer.
"""

import argparse
import tempfile

import torch


def broken(model, optimizer, path):
    torch.save({"model": model.state_dict()}, path)  # the mistake: the optimizer is missing
    model, optimizer = new_start()  # as after a crash
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    return model, optimizer


def fixed(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    model, optimizer = new_start()  # as after a crash
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])  # the cure, with what is saved above
    return model, optimizer


def main(cure):
    model, optimizer = new_start()
    for epoch in (1, 2):
        descend(model, optimizer, f"without a break: epoch {epoch}")
    with tempfile.TemporaryDirectory() as folder:
        save_and_resume = fixed if cure else broken
        resumed, its_optimizer = save_and_resume(model, optimizer, f"{folder}/snapshot.pt")
    descend(model, optimizer, "without a break: epoch 3")
    descend(resumed, its_optimizer, "resumed:         epoch 3")
    difference = (resumed.weight - model.weight).abs().max().item()
    if cure != (difference == 0):
        raise RuntimeError(f"after epoch 3 weights differ by {difference}")
    print(f"{'cured' if cure else 'symptom'}: after epoch 3 weights differ by {difference:.2g}")


def new_start():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def descend(model, optimizer, name):
    """One epoch: 20 steps, always with the same samples."""
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
