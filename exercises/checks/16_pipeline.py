"""The check of exercises/16_pipeline.py."""

import collections
import copy
import json
import math
import time
from pathlib import Path

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect, limit
from torch import nn
from torch.nn.functional import mse_loss

ROWS, WIDTH = 12, 5


def trial(folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    last, worst, drawn = world_size - 1, 0, ""
    for micro_batches in (4, 6, 2, 12):
        torch.manual_seed(micro_batches)
        inputs, targets = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
        stages, outputs = [Stage() for _ in range(world_size)], inputs
        for one in stages:
            one.chunks = outputs.detach().chunk(micro_batches)
            outputs = one.layers(outputs)
        stage, weights = copy.deepcopy(stages[rank]), copy.deepcopy(stages[rank].state_dict())
        right = mse_loss(outputs, targets)
        right.backward()
        nothing = torch.full_like(inputs, math.nan)
        given = (
            inputs.clone() if rank == 0 else nothing.clone(),
            targets.clone() if rank == last else nothing.clone(),
        )
        with Events(stage) as events:
            loss = answer.train_step(stage, *given, micro_batches)

        passes = [event for event in stage.events if event[0] in "FB"]
        told = told_by_all(f"{folder}/{micro_batches}", [passes, events.not_waited_for()])
        for r, (_, left) in told.items():
            expect(
                not left,
                f"of the messages that rank {r} began, {left} had no wait()",
                "irecv returns at once: nothing has arrived before wait() returns. And what"
                " isend shall send may never leave",
                "work = dist.irecv(...); work.wait()",
            )
        check_micro_batches(stage.taken, micro_batches)
        check_loss(loss, right.item(), micro_batches)
        worst = max(worst, gradients_off(stage, stages, rank, micro_batches, inputs, targets))
        expect(
            all(torch.equal(weights[name], p) for name, p in stage.state_dict().items()),
            "the weights were changed",
            "compute gradients: the optimizer's step comes later",
        )
        check_order(stage.events, micro_batches)
        most = ((rank < last) + (rank > 0)) * ROWS * WIDTH * 8
        sent = events.bytes_sent()
        expect(
            most <= sent <= most + 64 * micro_batches,
            f"this rank sends {sent} bytes, and its"
            f" {'outputs' if rank < last else ''}{' and ' if 0 < rank < last else ''}"
            f"{'gradients' if rank else ''} have {most}",
            "each output goes to the next rank alone, and each gradient to the one before",
        )
        others = sorted({kind for kind, _ in events.calls} - {"send"})
        expect(
            not others,
            f"this rank also calls {' and '.join(others)}, for which all ranks meet",
            "rank r talks to ranks r - 1 and r + 1 alone: who needs to know the loss?",
        )
        late = set(range(world_size)) - set(told)
        expect(
            not late,
            f"rank {min(late, default=0)} does not come back from train_step()",
            "what does it wait for, and who sends that?",
        )
        length, picture = schedule([told[r][0] for r in range(world_size)])
        least = 2 * (micro_batches + world_size - 1)
        expect(
            length <= least,
            f"with {micro_batches} micro-batches, your order takes {length}"
            f" passes' time, and {least} are enough:\n{picture}",
            "a rank that waits: which pass could come earlier, here or where it waits for?",
            "all forward passes first, then all backward passes. That is GPipe",
        )
        drawn = drawn or f"{length} passes' time:\n{picture}"
    return f"gradients off by {worst:.0e}, {sent} bytes sent, {drawn}"


def told_by_all(name, mine):
    """Return {rank: what it tells here}, of those that come here soon."""
    paths = [Path(f"{name}-{r}") for r in range(dist.get_world_size())]
    new, deadline = Path(f"{paths[dist.get_rank()]}.new"), time.monotonic() + limit() / 4
    new.write_text(json.dumps(mine))
    new.rename(paths[dist.get_rank()])
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.005)
    return {r: json.loads(path.read_text()) for r, path in enumerate(paths) if path.exists()}


def schedule(orders):
    """Return how long all passes take, in passes, and a picture of when each one runs.

    orders: for each rank, the names of its passes. A pass begins when the rank is free, and the
    rank before (F) or behind (B) has done the same one. Sending takes no time.
    """
    begins, free, left = {}, [0] * len(orders), [list(order) for order in orders]
    for _ in range(sum(map(len, orders))):  # rounds, in each of which some rank goes on
        for rank, order in enumerate(left):
            while order:
                other = rank - 1 if order[0][0] == "F" else rank + 1
                if 0 <= other < len(orders) and (other, order[0]) not in begins:
                    break
                begins[rank, order[0]] = max(free[rank], begins.get((other, order[0]), -1) + 1)
                free[rank] = begins[rank, order.pop(0)] + 1
    rows = []
    for rank in range(len(orders)):
        names = {begin: name for (r, name), begin in begins.items() if r == rank}
        row = " ".join(names.get(slot, "").ljust(2) for slot in range(max(free)))
        rows.append(f"    rank {rank}   {row}"[:100].rstrip())
    return max(free), "\n".join(rows)


def check_micro_batches(taken, micro_batches):
    rows = ROWS // micro_batches
    expect(
        taken == [rows] * micro_batches,
        f"with {micro_batches} micro-batches, the stage was called with {taken} rows",
        f"call it {micro_batches} times, with {rows} rows each",
        "inputs.chunk(micro_batches)",
    )


def check_loss(loss, right, micro_batches):
    if dist.get_rank() < dist.get_world_size() - 1:
        expect(
            loss is None,
            f"{loss!r} came back, and this is not the last rank",
            "only the last rank knows the loss. Who is last, of N ranks?",
        )
        return
    expect(isinstance(loss, float), f"{loss!r} came back", "the last rank returns a float")
    told = f"the loss of the batch is {right:.6f}, and this rank returns {loss:.6f}"
    expect(
        abs(loss - right * micro_batches) > 1e-5,
        f"{told}: {micro_batches} times as much",
        "the micro-batches' losses are means. What is the mean over the batch?",
    )
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
    for (name, p), right, wrong in zip(
        stage.named_parameters(), stages[rank].parameters(), of_last[rank].parameters(), strict=True
    ):
        expect(
            p.grad is not None,
            f"{name} has no gradient",
            "what each stage needs for its backward pass comes from the rank behind it",
        )
        expect(
            p.grad.isfinite().all(),
            f"the gradient of {name} is not a number (NaN)",
            "only rank 0 has the inputs, and only the last of the N ranks has the targets",
        )
        off, times = (p.grad - right.grad).abs().max().item(), p.grad.norm() / right.grad.norm()
        expect(
            off < 1e-9 or (p.grad / times - right.grad).norm() / right.grad.norm() > 1e-6,
            f"the gradient of {name} is {times:.2f} times that of the whole batch",
            "the loss is a mean over the batch, and a micro-batch's is a mean over fewer rows",
            "divide each loss by the number of micro-batches, before its backward()",
        )
        for factor in (1, micro_batches):
            expect(
                not torch.allclose(p.grad, factor * wrong.grad, rtol=1e-9),
                f"the gradient of {name} is that of the last micro-batch alone",
                "backward() adds to .grad: let it",
            )
        expect(
            off < 1e-9,
            f"the gradient of {name} is off by {off:.1e}",
            "each backward pass begins with the gradient that came for the same micro-batch, and"
            " needs the inputs as they were: each has a tensor of its own, which has arrived",
            "output.backward(gradient). What goes back is the gradient of the stage's input. And"
            " wait() for what irecv has returned",
        )
        worst = max(worst, off)
    return worst


def check_order(events, micro_batches):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    begun, least = collections.Counter(), min(world_size - rank, micro_batches)
    for event in events:
        before = begun["F"]
        expect(
            event[0] != "B" or before >= least,
            f"with {micro_batches} micro-batches, this rank"
            f" begins to go backward after {before} forward pass{'es' * (before > 1)}, and at"
            f" least {least} must come first: meanwhile others wait",
            "do not wait for a gradient while there is still a micro-batch to begin",
            "all forward passes first, then all backward passes. That is GPipe",
        )
        left = {
            "outputs": (rank < world_size - 1) * (begun["F"] - begun["to the next rank"]),
            "gradients": (rank > 0) * (begun["B"] - begun["to the rank before"]),
        }
        for what, number in left.items():
            expect(
                event[0] == "t" or number < 2,
                f"when {event} begins, {number} {what} are still"
                " to be sent, and a rank waits for them",
                "send what a micro-batch gives as soon as it is there",
            )
        begun[event[0] if event[0] in "FB" else event] += 1


class Stage(nn.Module):
    """A rank's layers. chunks: the right inputs of each micro-batch, by which a call tells which
    one it is; taken: the rows of each call; events: what happened, in order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
        self.taken, self.events, self.chunks = [], [], []

    def forward(self, inputs):
        self.taken.append(len(inputs))
        near = [len(inputs) != len(one) or (inputs - one).abs().max().item() for one in self.chunks]
        number = near.index(min(near))
        self.events.append(f"F{number}")
        outputs = self.layers(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.events.append(f"B{number}"))
        return outputs


class Events(Exchanges):
    """Counts the exchanges, and notes in a stage's events when it sends, and to which side."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.work = stage, []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        name = call._opname if call.namespace == "c10d" else ""
        if name in ("send", "recv_"):
            expect(
                abs(args[2] - dist.get_rank()) == 1,
                f"this rank talks to rank {args[2]}",
                "rank r talks to ranks r - 1 and r + 1 alone: who needs to know the loss?",
            )
        if name == "send":
            after = args[2] > dist.get_rank()
            self.stage.events.append("to the next rank" if after else "to the rank before")
        result = super().__torch_dispatch__(call, types, args, kwargs)
        if name == "send" or name.startswith("recv"):
            self.work.append(dist.Work.unbox(result))  # completed, with Gloo, by its wait()
        return result

    def not_waited_for(self):
        return sum(not work.is_completed() for work in self.work)
