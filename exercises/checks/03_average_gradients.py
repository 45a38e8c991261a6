"""The check of exercises/03_average_gradients.py."""

import time

import answer
import torch
import torch.distributed as dist
from checker import Waiting, expect
from torch import nn

HINTS = {  # by the collectives that were called, where a gradient is still the rank's own
    (): "which collective adds up over the ranks, and leaves the sum on each of them?",
    ("broadcast",): "broadcast copies the gradient of one rank: which collective adds up?",
    ("reduce",): "reduce leaves the sum on one rank alone: which collective leaves it on all?",
    ("allreduce",): "all_reduce works in place: give it the gradient itself, not a copy",
}


def trial():
    mine = new_model()
    for step in range(2):
        figures = check_step(step, mine)
    return figures


def check_step(step, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(step)
    rows = torch.randn(world_size, 4, 8)
    if step == 1:
        rows[-1] = 0  # the last rank's first gradient is zero: it has to take part all the same
    whole, *each = (new_model() for _ in range(1 + world_size))
    mine.zero_grad()
    for model, batch in (
        (mine, rows[rank]),
        (whole, rows.flatten(0, 1)),
        *zip(each, rows, strict=True),
    ):
        model(batch).square().mean().backward()
    weights = [p.detach().clone() for p in mine.parameters()]
    time.sleep(0.1 * (rank == step))  # the others have begun: who does not wait() for it is seen
    with Waiting() as exchanges:
        answer.average_gradients(mine)
    exchanges.look_for_waits(f"in step {step},")
    kinds = tuple(sorted({kind for kind, _ in exchanges.calls}))
    worst = 0
    for (name, p), right, *parts in zip(
        mine.named_parameters(),
        whole.parameters(),
        *(one.parameters() for one in each),
        strict=True,
    ):
        if right.grad is None:
            expect(
                p.grad is None, f"{name} does not train, and has a gradient now", "leave it None"
            )
            continue
        told = f"the gradient of {name}"
        expect(p.grad is not None, f"{name} has no gradient any more", "write into p.grad")
        expect(
            not torch.equal(p.grad, parts[rank].grad),
            f"{told} is still the rank's own",
            HINTS.get(
                kinds,
                "p.grad itself has to become the mean: a tensor of your own that"
                " holds it is not enough",
            ),
        )
        of = next((r for r in range(world_size) if torch.equal(p.grad, parts[r].grad)), None)
        expect(of is None, f"{told} is that of rank {of}", HINTS[()])
        expect(p.grad.any(), f"{told} is zero now", HINTS[()])
        times = (p.grad.norm() / right.grad.norm()).item()
        off = ((p.grad - right.grad).norm() / right.grad.norm()).item()
        direction = ((p.grad / times - right.grad).norm() / right.grad.norm()).item()
        expect(
            off < 1e-5 or direction > 1e-5,
            f"{told} is {times:.2f} times the mean",
            "all_reduce adds up. What turns a sum into a mean? Do it once.",
        )
        expect(
            off < 1e-5,
            f"{told} is off by {off:.1e} of its length",
            "does each rank get the sum of all ranks, of each parameter, before it goes on?",
            "all_reduce, not reduce; with async_op=True, first wait(), and only then divide",
        )
        worst = max(worst, off)
    expect(
        all(map(torch.equal, weights, mine.parameters())),
        "the weights were changed",
        "exchange p.grad: the optimizer's step comes later",
    )
    expect(kinds, "the gradients are right, but nothing was exchanged", HINTS[()])
    return (
        f"gradients off by {worst:.0e}, {len(exchanges.calls)} exchanges,"
        f" {exchanges.bytes_sent()} bytes sent"
    )


def new_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2), Scale())
    model[0].bias.requires_grad_(False)
    return model


class Scale(nn.Module):
    """Has a parameter that is neither a weight nor a bias by name, and has no dimension."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, rows):
        return rows * self.scale
