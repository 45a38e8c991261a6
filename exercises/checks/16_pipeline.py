"""The check of exercises/16_pipeline.py."""

import copy
import math

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect
from torch import nn
from torch.nn.functional import mse_loss

ROWS, WIDTH = 12, 5


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    last, worst = world_size - 1, 0
    for micro_batches in (4, 6):
        torch.manual_seed(micro_batches)
        inputs, targets = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
        stages = [Stage() for _ in range(world_size)]
        stage, weights = copy.deepcopy(stages[rank]), copy.deepcopy(stages[rank].state_dict())
        outputs = inputs
        for one in stages:
            outputs = one.layers(outputs)
        right = mse_loss(outputs, targets)
        right.backward()
        nothing = torch.full_like(inputs, math.nan)
        given = (inputs.clone() if rank == 0 else nothing.clone(),
                 targets.clone() if rank == last else nothing.clone())
        with Events(stage) as events:
            loss = answer.train_step(stage, *given, micro_batches)

        check_micro_batches(stage.taken, micro_batches)
        check_loss(loss, right.item(), micro_batches)
        worst = max(worst, gradients_off(stage, stages, rank, micro_batches, inputs, targets))
        expect(all(torch.equal(weights[name], p) for name, p in stage.state_dict().items()),
               "the weights were changed", "compute gradients: the optimizer's step comes later")
        check_order(stage.events, micro_batches)
        most = ((rank < last) + (rank > 0)) * ROWS * WIDTH * 8
        sent = events.bytes_sent()
        expect(sent <= most + 64 * micro_batches, f"this rank sends {sent} bytes, and its"
               f" {'outputs' if rank < last else ''}{' and ' if 0 < rank < last else ''}"
               f"{'gradients' if rank else ''} have {most}",
               "each output goes to the next rank alone, and each gradient to the one before")
        others = sorted({kind for kind, _ in events.calls} - {"send"})
        expect(not others, f"this rank also calls {' and '.join(others)}, for which all ranks meet",
               "rank r talks to ranks r - 1 and r + 1 alone: who needs to know the loss?")
    shown = "".join({"forward": "F", "backward": "B"}.get(event, "") for event in stage.events)
    return f"gradients off by {worst:.0e}, {sent} bytes sent, rank 0 computes {shown}"


def check_micro_batches(taken, micro_batches):
    rows = ROWS // micro_batches
    expect(taken == [rows] * micro_batches, f"with {micro_batches} micro-batches, the stage was"
           f" called with {taken} rows", f"call it {micro_batches} times, with {rows} rows each",
           "inputs.chunk(micro_batches)")


def check_loss(loss, right, micro_batches):
    if dist.get_rank() < dist.get_world_size() - 1:
        expect(loss is None, f"{loss!r} came back, and this is not the last rank",
               "only the last rank knows the loss. Who is last, of N ranks?")
        return
    expect(isinstance(loss, float), f"{loss!r} came back", "the last rank returns a float")
    told = f"the loss of the batch is {right:.6f}, and this rank returns {loss:.6f}"
    expect(abs(loss - right * micro_batches) > 1e-5, f"{told}: {micro_batches} times as much",
           "the micro-batches' losses are means. What is the mean over the batch?")
    expect(abs(loss - right) < 1e-5, told, "the mean over all micro-batches, each with its targets")


def gradients_off(stage, stages, rank, micro_batches, inputs, targets):
    of_last = copy.deepcopy(stages)  # the gradients that the last micro-batch alone has
    for one in of_last:
        one.zero_grad()
    outputs = inputs.chunk(micro_batches)[-1]
    for one in of_last:
        outputs = one.layers(outputs)
    (mse_loss(outputs, targets.chunk(micro_batches)[-1]) / micro_batches).backward()
    worst = 0
    for (name, p), right, wrong in zip(stage.named_parameters(), stages[rank].parameters(),
                                       of_last[rank].parameters(), strict=True):
        expect(p.grad is not None, f"{name} has no gradient",
               "what each stage needs for its backward pass comes from the rank behind it")
        expect(p.grad.isfinite().all(), f"the gradient of {name} is not a number (NaN)",
               "only rank 0 has the inputs, and only the last of the N ranks has the targets")
        off, times = (p.grad - right.grad).abs().max().item(), p.grad.norm() / right.grad.norm()
        expect(off < 1e-9 or (p.grad / times - right.grad).norm() / right.grad.norm() > 1e-6,
               f"the gradient of {name} is {times:.2f} times that of the whole batch",
               "the loss is a mean over the batch, and a micro-batch's is a mean over fewer rows",
               "divide each loss by the number of micro-batches, before its backward()")
        for factor in (1, micro_batches):
            expect(not torch.allclose(p.grad, factor * wrong.grad, rtol=1e-9),
                   f"the gradient of {name} is that of the last micro-batch alone",
                   "backward() adds to .grad: let it")
        expect(off < 1e-9, f"the gradient of {name} is off by {off:.1e}",
               "each backward pass begins with the gradient that came for the same micro-batch, and"
               " needs the inputs as they were: each has a tensor of its own, which has arrived",
               "output.backward(gradient). What goes back is the gradient of the stage's input. And"
               " wait() for what irecv has returned")
        worst = max(worst, off)
    return worst


def check_order(events, micro_batches):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    least = min(world_size - rank, micro_batches)
    before = events[: events.index("backward")].count("forward")
    expect(before >= least, f"with {micro_batches} micro-batches, this rank begins to go backward"
           f" after {before} forward pass{'es' * (before > 1)}, not {least}: meanwhile others wait",
           "do not wait for a gradient while there is still a micro-batch to begin",
           "all forward passes first, then all backward passes. That is GPipe")
    for way, passes in (("to the next rank", "forward"), ("to the rank before", "backward")):
        if way in events:
            done = events[: events.index(way)].count(passes)
            expect(done < micro_batches, f"the first message {way} leaves after all {done} {passes}"
                   " passes: until then, that rank waits",
                   "send what a micro-batch gives as soon as it is there")


class Stage(nn.Module):
    """A rank's layers. taken: the rows of each call; events: what happened, in order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
        self.taken, self.events = [], []

    def forward(self, inputs):
        self.taken.append(len(inputs))
        self.events.append("forward")
        outputs = self.layers(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.events.append("backward"))
        return outputs


class Events(Exchanges):
    """Counts the exchanges, and notes in a stage's events when it sends, and to which side."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if call.namespace == "c10d" and call._opname == "send":
            after = args[2] > dist.get_rank()
            self.stage.events.append("to the next rank" if after else "to the rank before")
        return super().__torch_dispatch__(call, types, args, kwargs)
