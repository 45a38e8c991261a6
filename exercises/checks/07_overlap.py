"""The check of exercises/07_overlap.py."""

import time

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect
from torch import nn

PATIENCE = 4  # seconds for a backward() that should take milliseconds


def trial(folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, worst = Model(), 0
    finish = answer.overlap(mine)
    expect(callable(finish), f"overlap() returned {finish!r}", "return a function: finish")
    for step in range(2):
        torch.manual_seed(step)
        rows = torch.randn(world_size, 4, 8)
        alone, whole = Model(), Model()
        alone(rows[rank]).square().mean().backward()
        whole(rows.flatten(0, 1)).square().mean().backward()
        mine.zero_grad()
        loss = mine(rows[rank]).square().mean()
        first = rank == step  # it begins alone; the others come when its backward() is through
        if not first:
            wait_for(folder / f"{step}", step)
            time.sleep(0.1)  # a finish() that does not wait is back by now
            (folder / f"{step}-{rank}").touch()
        with Exchanges() as mine.exchanges:
            loss.backward()
            (folder / f"{step}").touch()
            finish()
            late = [r for r in range(world_size)
                    if r != step and not (folder / f"{step}-{r}").exists()]  # fmt: skip
        check_order(step, mine, late if first else [])
        worst = max(worst, check_gradients(step, mine, alone, whole))
    return f"gradients off by {worst:.0e}, {len(mine.exchanges.calls)} exchanges, begun in backward"


def wait_for(path, rank):
    deadline = time.monotonic() + PATIENCE
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    expect(path.exists(), f"rank {rank} waits in backward() for this rank, which has not begun",
           "nothing that runs in backward() may wait: async_op=True, and no wait() in the hook")


def check_order(step, model, late):
    calls, sent = model.exchanges.calls, model.sent_at_first_layer
    expect(calls, f"in step {step}, nothing was exchanged", "which call adds up over the ranks?",
           "one hook for each parameter that trains, registered once, in overlap()")
    told = f"in step {step}, when backward() came to the first layer,"
    expect(sent > 0, f"{told} no exchange had begun",
           "begin in backward(), not in finish(): a hook is called there",
           "in the hook: dist.all_reduce(p.grad, async_op=True)")
    last = sum(p.nbytes for p in model.layers[-1].parameters())
    expect(sent >= last, f"{told} {sent} bytes had been sent, and the last layer has {last}",
           "begin with each gradient as soon as it is complete")
    expect(not late, f"in step {step}, finish() came back before rank {min(late, default=0)} had"
           " begun: it has not waited", "async_op=True returns an object with wait(). Keep it")


def check_gradients(step, mine, alone, whole):
    """Return by how much the worst gradient is off."""
    worst = 0
    for (name, p), own, right in zip(
            mine.named_parameters(), alone.parameters(), whole.parameters(), strict=True):
        told = f"in step {step}, the gradient of {name}"
        expect((p.grad is None) == (right.grad is None),
               f"{told} is {p.grad}, and in one process {right.grad}", "do not set p.grad")
        if right.grad is None:
            continue
        times = (p.grad.norm() / right.grad.norm()).item()
        direction = ((p.grad / times - right.grad).norm() / right.grad.norm()).item()
        off = ((p.grad - right.grad).norm() / right.grad.norm()).item()
        expect(not torch.equal(p.grad, own.grad), f"{told} is still the rank's own",
               "all_reduce works in place: give it the gradient itself, or copy the mean back")
        hints = ["step 0 was right. Is something left over from it, or used before its wait()?"]
        hints *= step > 0
        expect(off < 1e-5 or direction > 1e-5, f"{told} is {times:.2f} times the mean",
               *hints, "all_reduce adds up. What makes a mean of a sum, and how often?")
        expect(off < 1e-5, f"{told} is off by {off:.1e} of its length",
               *hints, "before wait(), a tensor may hold anything: do not use it until then")
        worst = max(worst, off)
    return worst


class Model(nn.Module):
    """Notes how many bytes had been sent when backward() came to the first layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 2)])
        self.layers[1].bias.requires_grad_(False)
        self.exchanges, self.sent_at_first_layer = Exchanges(), 0

    def forward(self, rows):
        rows = self.layers[0](rows).tanh()
        rows.register_hook(self.at_first_layer)  # before the layer's own gradient is computed
        return self.layers[2](self.layers[1](rows).tanh())

    def at_first_layer(self, gradient):
        self.sent_at_first_layer = self.exchanges.bytes_sent()
