"""The check of exercises/20_experts.py."""

import answer
import torch
import torch.distributed as dist
from checker import FLOAT32, Waiting, case, expect
from torch import nn

D = 48
# How many rows a rank has, and which expert each of them chooses.
CASES = {
    "rows for all experts": lambda rank, n: torch.randint(n, (400 + 9 * rank,)),
    "no row for expert 0": lambda rank, n: 1 + torch.randint(n - 1, (11 + rank,)),
    "all rows of all ranks for the last expert": lambda rank, n: torch.full((17 - rank,), n - 1),
    "all rows for the next rank": lambda rank, n: torch.full((8 + rank,), (rank + 1) % n),
    "rank 0 without rows": lambda rank, n: torch.randint(n, (14 * rank,)),
    "all rows stay on their ranks": lambda rank, n: torch.full((30,), rank),
    "no rows at all": lambda rank, n: torch.zeros(0, dtype=torch.int64),
}


def trial():
    worst = 0
    for name, choose in CASES.items():
        for trained in (True, False) if choose is CASES["rows for all experts"] else (True,):
            torch.manual_seed(len(name))
            with case(name if trained else f"{name}, which require no gradient") as told:
                off, sent, least = look_at(told, choose, trained)
            worst = max(worst, off)
            if trained and choose is CASES["rows for all experts"]:
                figures = f"{sent} bytes sent in both passes, {least} of them rows"
    look_at_two("two layers of experts after each other", True)
    look_at_two("two calls, then two times backward(), in the same order", False)
    return f"gradients off by {worst:.0e}, {figures}"


def look_at_two(told, chained):
    """The second call comes before the first's backward pass. chained: on the first's result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    chosen = [torch.randint(ranks, (2, 9 + its)) for its in range(ranks)]
    everyone = [torch.randn(9 + its, D, dtype=torch.float64) for its in range(ranks)]
    layers = [[Expert(10 * layer + number) for number in range(ranks)] for layer in range(2)]
    inputs = [its.clone().requires_grad_() for its in everyone]
    for its, which in zip(inputs, chosen, strict=True):
        for row, first, second in zip(its, *which, strict=True):
            one = layers[0][first].compute(row)
            other = layers[1][second].compute(one if chained else row)
            (other if chained else one + other).sum().backward()
    rows, own = everyone[rank].requires_grad_(), [Expert(rank), Expert(10 + rank)]
    with case(told):
        one = answer.through_experts(rows, chosen[rank][0], own[0])
        other = answer.through_experts(one if chained else rows, chosen[rank][1], own[1])
        for found in (other,) if chained else (one, other):
            found.sum().backward()
    told += ": the gradient of the"
    look_at_gradient(f"{told} rows", rows.grad, inputs[rank].grad)
    for expert, layer in zip(own, layers, strict=True):
        look_at_gradient(f"{told} expert", expert.weight.grad, layer[rank].weight.grad)


def look_at(name, choose, trained):
    """Check one call. Return by how much gradients are off, bytes sent, and those of the rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chosen = [choose(its, ranks) for its in range(ranks)]  # of each rank
    everyone = [torch.randn(len(its), D, dtype=torch.float64) for its in chosen]
    factors = [torch.randn(D, len(its), dtype=torch.float64).mT for its in chosen]  # of the losses
    experts = [Expert(number) for number in range(ranks)]
    inputs = [its.clone().requires_grad_() for its in everyone]
    right = [
        torch.stack([experts[e].compute(row) for e, row in zip(which, its, strict=True)])
        if len(its)
        else its * 1
        for which, its in zip(chosen, inputs, strict=True)
    ]
    sum((one * factor).sum() for one, factor in zip(right, factors, strict=True)).backward()

    rows, own = everyone[rank].clone().requires_grad_(trained), Expert(rank)
    which, theirs = chosen[rank].clone(), factors[rank].mT.clone().mT  # mT: not contiguous
    with Waiting() as forward:
        found = answer.through_experts(rows, which, own)
    forward.look_for_waits(f"{name} forward,")
    look_at_results(name, found, right[rank].detach(), chosen, own)
    with Waiting() as backward:
        found.backward(theirs)
    backward.look_for_waits(f"{name} backward,")
    for what, now, before in (
        ("rows", rows.detach(), everyone[rank]),
        ("chosen", which, chosen[rank]),
        ("the gradient", theirs, factors[rank]),
    ):
        expect(torch.equal(now, before), f"{name} {what} was changed", "make a new tensor")
    expect(
        rows.requires_grad is trained,
        f"{name} afterwards the rows do",
        "a tensor of your own may require one: rows.detach().requires_grad_()",
    )
    worst = 0
    if trained:
        expect(
            rows.grad is not None,
            f"{name} no gradient has reached the rows",
            "each step from the rows to the results needs a way back, through autograd."
            " (dist.all_to_all_single has none)",
            "does it go through the expert's result on each rank, also where that has no rows?",
        )
        worst = look_at_gradient(f"{name} the gradient of the rows", rows.grad, inputs[rank].grad)
    if sum((its == rank).sum() for its in chosen):
        expect(
            own.weight.grad is not None,
            f"{name} no gradient has reached the expert",
            "from the results, backward() goes to the expert's rank first: is there a way?",
        )
        worst = max(
            worst,
            look_at_gradient(
                f"{name} the gradient of the expert", own.weight.grad, experts[rank].weight.grad
            ),
        )
    away = (chosen[rank] != rank).sum().item()
    there = sum((its == rank).sum().item() for its in chosen) - (chosen[rank] == rank).sum().item()
    least = 8 * D * (away + there)
    for what, exchanges in (("forward", forward), ("backward", backward)):
        sent, most = exchanges.bytes_sent(), least + 1000 * ranks
        expect(
            sent <= most,
            f"{name} {what}, this rank sends {sent} bytes. {away} of its rows"
            f" leave it, and {there} come and go back: {least} bytes",
            "each rank sends each other rank the rows for it, and no more",
            "all_to_all_single takes lists of unequal lengths",
        )
    expect(
        forward.bytes_sent() >= least,
        f"{name} this rank sent {forward.bytes_sent()} bytes, and"
        f" the rows that left it have {least}",
        "how did they get there?",
    )
    return worst, forward.bytes_sent() + backward.bytes_sent(), 2 * least


def look_at_results(name, found, right, chosen, own):
    rank = dist.get_rank()
    came = sum((its == rank).sum().item() for its in chosen)
    expect(
        len(own.calls) == 1,
        f"{name} the expert was called {len(own.calls)} times, with {own.calls} rows",
        "once, with all its rows, also if there are none",
    )
    expect(
        own.calls[0] == came,
        f"{name} the expert was called with {own.calls[0]} rows, and {came} have chosen it",
        "how many does each rank send to this one?",
    )
    expect(
        found.shape == right.shape,
        f"{name} the result has shape {tuple(found.shape)}, not {tuple(right.shape)}",
        "a result for each of this rank's rows",
    )
    off = (found - right).norm().item()
    if off > 1e-9:
        sums = [one.sum(dim=1).sort().values for one in (found, right)]
        expect(
            (sums[0] - sums[1]).norm() > 1e-9,
            f"{name} the results are right, but in another order than the rows",
            "they come back sorted by expert, as they were sent",
            "if order sorts the rows, order.argsort() puts them back",
        )
        expect(off > 1e-6 * right.norm(), f"{name} the results are off by {off:.0e}", FLOAT32)
        wrong = (found - right).norm(dim=1) > 1e-9
        expect(
            False,
            f"{name} {int(wrong.sum())} of {len(right)} results are wrong; the first is"
            f" that of row {int(wrong.nonzero()[0])}, which has chosen expert"
            f" {int(chosen[rank][wrong][0])}",
            "has each row been to the expert that it chose, and is its result back in its place?",
        )
    expect(
        found.requires_grad,
        f"{name} no gradient can go back: the result does not require one",
        "autograd does not see through a collective: a torch.autograd.Function tells it the way",
    )


def look_at_gradient(what, found, right):
    off = (found - right).norm().item() / (right.norm().item() or 1)
    times = ((found * right).sum() / (right.square().sum() or 1)).item()
    if off > 1e-9 and times:
        expect(
            (found - right * times).norm() > 1e-9 * right.norm(),
            f"{what} is {times:.2g} times what it should be",
            "all ranks' losses are added up, and nobody divides",
        )
    expect(not 1e-9 < off < 1e-6, f"{what} is off by {off:.0e} of its length", FLOAT32)
    expect(
        off < 1e-9,
        f"{what} is off by {off:.0e} of its length",
        "a gradient goes back the way"
        " that its row has come: the same exchange, with the numbers of rows swapped",
        "also of the results that came from this rank's expert to other ranks",
    )
    return off


class Expert(nn.Module):
    """A network, which notes with how many rows it was called."""

    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(D, D, dtype=torch.float64, generator=generator) / D**0.5
        self.weight, self.calls = nn.Parameter(weight), []

    def forward(self, rows):
        self.calls.append(len(rows))
        return self.compute(rows).mT.contiguous().mT  # not contiguous

    def compute(self, rows):
        return torch.tanh(rows @ self.weight)
