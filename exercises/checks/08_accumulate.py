"""The check of exercises/08_accumulate.py."""

import contextlib
import weakref
from collections import Counter
from dataclasses import dataclass

import answer
import torch
import torch.distributed as dist
from checker import FLOAT32, Waiting, bytes_of, expect
from torch import nn
from torch.nn.functional import mse_loss

STEPS = [  # the rows of each rank's micro-batches
    [[4, 4, 4], [4, 4, 4], [4, 4, 4], [4, 4, 4]],
    [[4, 4, 1], [4, 4, 1], [4, 4, 1], [4, 4, 1]],
    [[4, 2], [3], [5, 5, 1], [2]],
    [[2, 1], [], [3], [4]],
    [[], [300, 20], [1], [4]],
]
FEW = 2000  # bytes of numbers, or of pickles; each gradient has more


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step, rows in enumerate(STEPS):
        rows = rows[:world_size]
        torch.manual_seed(step)
        each = [
            [(torch.randn(n, 6).double(), torch.randn(n, 5).double()) for n in counts]
            for counts in rows
        ]  # of each rank
        with Waiting() as exchanges:
            model = Model(exchanges.calls)
            answer.accumulate(model, [(one.clone(), other.clone()) for one, other in each[rank]])
        told = f"with micro-batches of {rows} rows"
        exchanges.look_for_waits(f"{told},")
        check_memory(told, model, rows[rank])
        check_cost(told, model, exchanges.calls)
        off = check_gradient(told, model, each)
    return (
        f"gradients off by {off:.0e}, {len(exchanges.calls)} exchange(s) of"
        f" {exchanges.bytes_sent()} bytes in a step"
    )


def check_memory(told, model, rows):
    expect(
        all(map(torch.equal, model.parameters(), Model().parameters())),
        "the weights were changed",
        "the optimizer's step comes later",
    )
    expect(
        rows or not model.rows,
        f"{told}, the model was called on a rank without a micro-batch",
        "what does such a rank add to a sum?",
    )
    most = max(model.rows, default=0)
    expect(
        most <= max(rows, default=0),
        f"{told}, {most} rows went through the model at once",
        "one micro-batch at a time: memory is short",
    )
    expect(
        model.most_open <= 1,
        f"{told}, {model.most_open} micro-batches were in memory at once",
        "backward() frees what forward keeps: call it for each micro-batch",
    )
    expect(
        sum(model.rows) <= sum(rows),
        f"{told}, {sum(model.rows)} rows went through the model of a rank that has {sum(rows)}",
        "each row once, and only this rank's own",
    )


def check_cost(told, model, calls):
    expect(calls, f"{told}, nothing was exchanged", "all ranks take part, also one without rows")
    early, size = max(model.exchanged, default=0), bytes_of(list(model.parameters()))
    expect(
        exchanged(calls) < size + FEW,
        f"{told}, the gradients were sent {exchanged(calls) / size:.3g} times in a step",
        "p.grad adds up by itself: exchange it after the last micro-batch"
        if early > FEW
        else "each goes into one exchange, or two that bring the sum to all. Which one goes twice?",
    )


def exchanged(calls):
    """Return how many bytes were averaged, by whatever calls."""
    n, sizes = dist.get_world_size(), Counter()
    parts = {
        "allreduce": 2 * (n - 1) / n,
        "allgather": n - 1,
        "reducescatter": (n - 1) / n,
        "alltoall": (n - 1) / n,
        "send": n - 1,
        "scatter": n - 1,
    }  # are sent of a tensor
    for kind, sent in calls:
        to = {
            "allreduce": "all",
            "send": "all",
            "allgather": "second",
            "broadcast": "second",
            "scatter": "second",
        }.get(kind, "first")  # of two that bring the sum to all ranks
        sizes[to] += sent / parts.get(kind, 1)
    return sizes["all"] + max(sizes["first"], sizes["second"])


def check_gradient(told, model, each):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expect(
        all(p.grad is not None for p in model.parameters()),
        f"{told}, p.grad is None",
        "without micro-batches, a rank has no gradient: what does it add to the sum?",
        "zeros; and the sum has to come into its p.grad, too",
    )
    found = nn.utils.parameters_to_vector(p.grad for p in model.parameters())
    whole = gradient([one for mine in each for one in mine])

    def off(other):
        return ((found - other).norm() / other.norm()).item()

    if off(whole) < 1e-12:
        return off(whole)
    told, times = f"{told}, the gradient is", (found.norm() / whole.norm()).item()
    wrong = f"{told} off by {off(whole):.1e} of its length"
    expect(off(whole) > 1e-6, wrong, FLOAT32)
    sums = "no rank knows the number of all rows: exchange sums, as in exercise 2, divide last"
    own, ones = gradient(each[rank]), [gradient([one]) for mine in each for one in mine]
    for other, what, *hints in (
        (own, "still the rank's own", "exchange p.grad itself, or copy the result back"),
        (
            5 * whole,
            "5 times that of the whole batch, and the targets have 5 columns",
            'what does mse_loss add up, with reduction="sum", and how many numbers are that?',
        ),
        (
            times * whole,
            f"{times:.2f} times that of the whole batch",
            f"{world_size} ranks, {len(each[rank])} micro-batches here: what divides what?",
            sums,
        ),
        (
            sum(ones) / len(ones),
            "the mean of the micro-batches' gradients",
            "a row of a small micro-batch must not count more than one of a large one",
            sums,
        ),
        (
            sum(map(gradient, each)) / world_size,
            "the mean of the ranks' gradients",
            "a row on a rank with few rows must not count more than one elsewhere",
            sums,
        ),
    ):
        expect(off(other) > 1e-6, f"{told} {what}", *hints)
    expect(False, wrong, "is each row in the sum, once, and with the same weight?", sums)


def gradient(micro_batches):
    """What one process gets, with all rows in one batch."""
    model, batch = Model(), [torch.cat(parts) for parts in zip(*micro_batches, strict=True)]
    loss = mse_loss(model(batch[0]), batch[1]) if batch else 0 * model(torch.zeros(1, 6).double())
    loss.sum().backward()
    return nn.utils.parameters_to_vector(p.grad for p in model.parameters())


class Model(nn.Sequential):
    """Notes the rows it gets, the backward passes still to come, and what is exchanged before."""

    def __init__(self, calls=()):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 5, bias=False))
        self.double()
        self.calls, self.open, self.most_open, self.rows, self.exchanged = calls, [], 0, [], []
        self.kept = weakref.WeakSet()  # what forward passes keep until backward frees it

    def forward(self, inputs):
        self.most_open = max(self.most_open, 2 * bool(self.kept))
        inside = torch._C._functorch.peek_interpreter_stack()  # torch.func.grad knows no such hooks
        with (
            contextlib.nullcontext()
            if inside
            else torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor)
        ):
            outputs = super().forward(inputs)
        if outputs.requires_grad and not inside:
            self.open.append(outputs.register_hook(lambda _: self.open.pop() and None))
        self.most_open = max(self.most_open, len(self.open))
        self.rows.append(len(inputs))
        self.exchanged.append(exchanged(self.calls))
        return outputs

    def keep(self, tensor):
        self.kept.add(kept := Kept(tensor))
        return kept


@dataclass(eq=False)
class Kept:
    tensor: torch.Tensor
