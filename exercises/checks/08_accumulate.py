"""The check of exercises/08_accumulate.py."""

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect
from torch import nn
from torch.nn.functional import mse_loss

STEPS = [  # the rows of each rank's micro-batches
    [[4, 4, 4], [4, 4, 4], [4, 4, 4], [4, 4, 4]],
    [[4, 4, 1], [4, 4, 1], [4, 4, 1], [4, 4, 1]],
    [[4, 2], [3], [5, 5, 1], [2]],
    [[2, 1], [], [3], [4]],
]


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step, rows in enumerate(STEPS):
        rows = rows[:world_size]
        torch.manual_seed(step)
        each = [[(torch.randn(n, 6).double(), torch.randn(n, 5).double()) for n in counts]
                for counts in rows]  # of each rank
        model = Model()
        with Exchanges() as exchanges:
            copies = [(inputs.clone(), targets.clone()) for inputs, targets in each[rank]]
            answer.accumulate(model, copies)
        told = f"with micro-batches of {rows} rows"
        check_cost(told, model, max(rows[rank], default=0), exchanges.bytes_sent())
        off = check_gradient(told, model, each)
    return (f"gradients off by {off:.0e}, {len(exchanges.calls)} exchange(s) of"
            f" {exchanges.bytes_sent()} bytes in a step")


def check_cost(told, model, most, sent):
    world_size, untouched = dist.get_world_size(), Model()
    expect(all(map(torch.equal, model.parameters(), untouched.parameters())),
           "the weights were changed", "the optimizer's step comes later")
    once = 2 * (world_size - 1) / world_size * sum(p.nbytes for p in model.parameters())
    expect(sent > 0, f"{told}, nothing was exchanged",
           "all ranks take part, also one that has no micro-batch")
    expect(sent < 1.5 * once, f"{told}, the gradients were sent {sent / once:.0f} times in a step",
           "p.grad adds up by itself: exchange it after the last micro-batch")
    expect(model.most_rows <= most, f"{told}, {model.most_rows} rows went through the model at"
           " once", "one micro-batch at a time: memory is short")
    expect(model.most_open <= 1, f"{told}, {model.most_open} micro-batches were in memory at once",
           "backward() frees what forward keeps: call it for each micro-batch")


def check_gradient(told, model, each):
    """Return by how much the gradient is off. each: the micro-batches of each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expect(all(p.grad is not None for p in model.parameters()), f"{told}, p.grad is None",
           "without micro-batches, a rank has no gradient: what does it add to the sum?",
           "zeros: all ranks make the same call, with tensors of the same shape")
    found, whole = flat_gradient(model), gradient([one for mine in each for one in mine])

    def off(other):
        return ((found - other).norm() / other.norm()).item()

    hints = ("a row of a small micro-batch must not count more than one of a large one",
             "no rank knows the number of all rows: exchange sums, as in exercise 2, divide last")
    if off(whole) > 1e-6:
        told = f"{told}, the gradient is"
        expect(not each[rank] or off(gradient(each[rank])) > 1e-6,
               f"{told} still the rank's own", "exchange p.grad itself, or copy the result back")
        times = (found.norm() / whole.norm()).item()
        expect(abs(times - 5) > 1e-6, f"{told} 5 times that of the whole batch, and the targets"
               " have 5 columns", "what has mse_loss added up, and what has it divided by?",
               'reduction="sum" adds up rows times columns')
        expect(off(whole * times) > 1e-6, f"{told} {times:.2f} times that of the whole batch",
               f"{world_size} ranks, {len(each[rank])} micro-batches here: what is to be divided,"
               " by what, and how often?", *hints[1:])
        means = [gradient([one]) for mine in each for one in mine]
        expect(off(torch.stack(means).mean(0)) > 1e-6,
               f"{told} the mean of the micro-batches' gradients", *hints)
        means = [gradient(mine) if mine else torch.zeros_like(whole) for mine in each]
        expect(off(torch.stack(means).mean(0)) > 1e-6,
               f"{told} the mean of the ranks' gradients",
               "a row on a rank with few rows must not count more than one elsewhere", hints[1])
        expect(False, f"{told} off by {off(whole):.1e} of its length",
               "is each row in the sum, once, and with the same weight?", hints[1])
    return off(whole)


def gradient(micro_batches):
    """What one process gets, with all rows in one batch."""
    model = Model()
    inputs, targets = map(torch.cat, zip(*micro_batches, strict=True))
    mse_loss(model(inputs), targets).backward()
    return flat_gradient(model)


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class Model(nn.Sequential):
    """Notes how many rows it gets at once, and how many backward passes are still to come."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5))
        self.double()
        self.open = self.most_open = self.most_rows = 0

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.most_rows = max(self.most_rows, len(inputs))
        outputs.register_hook(self.close)
        return outputs

    def close(self, gradient):
        self.open -= 1
