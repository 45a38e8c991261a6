"""The check of exercises/07_overlap.py."""

import gc
import time
import weakref

import answer
import torch
import torch.distributed as dist
from checker import Waiting, bytes_kept, bytes_of, expect, kind_of, limit
from torch import nn


def trial(folder):
    mine, worst, kept, old = Model(), 0, 0, []
    for p in mine.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: old.append(weakref.ref(p.grad)))
    with Begun() as mine.begun:
        finish = answer.overlap(mine)
        expect(callable(finish), f"overlap() returned {finish!r}", "return a function: finish")
        for step in range(3):
            worst = max(worst, check_step(step, mine, finish, folder))
            mine.begun.works, mine.begun.waited = 0, {}  # they hold their tensors
            kept = kept if step == 2 else bytes_kept()
    comes_true(lambda: bytes_kept() <= kept, limit() / 8)  # Gloo's thread lets go a little later
    more = bytes_kept() - kept
    expect(
        more <= 0,
        f"after step 2, {more} bytes more are in memory than after step 1",
        "finish() empties the list: else all gradients of all steps stay in it",
    )
    mine.zero_grad()
    gc.collect()
    comes_true(lambda: not any(one() is not None for one in old), limit() / 8)
    left = sum(one() is not None for one in old)
    expect(
        not left,
        f"after zero_grad(), {left} gradients of old steps are still in memory",
        "what has finish() not emptied? A work keeps its tensor, too",
    )
    calls = len(mine.begun.calls) // 3
    return f"gradients off by {worst:.0e}, {calls} exchanges in a step, begun in backward"


def check_step(step, mine, finish, folder):
    rank, world_size, told = dist.get_rank(), dist.get_world_size(), f"in step {step}"
    rows = torch.randn(world_size, 4, 8, generator=torch.Generator().manual_seed(step))
    alone, whole = Model(), Model()
    alone(rows[rank]).square().mean().backward()
    whole(rows.flatten(0, 1)).square().mean().backward()
    mine.zero_grad()
    if step < 2 and rank != step:  # in steps 0 and 1, one goes through its backward() alone
        expect(
            comes_true((folder / f"{step}").exists, limit() / 2),
            f"rank {step} waits in backward() for this rank, which has not begun",
            "nothing that runs in backward() may wait: async_op=True, and no wait() in the hook",
        )
        time.sleep(0.1)  # a finish() that does not wait is back by now
        (folder / f"{step}-{rank}").touch()
    mine.look_at = (2, 1, 0) if step == 2 else (1,)
    mine.seen, calls, mine.before = [], len(mine.begun.calls), mine.begun.bytes
    mine(rows[rank]).square().mean().backward()
    mine.at_layer(0)
    (folder / f"{step}").touch()
    finish()
    late = [
        r
        for r in range(world_size)
        if rank == step < 2 and r != step and not (folder / f"{step}-{r}").exists()
    ]
    expect(len(mine.begun.calls) > calls, f"{told}, nothing was exchanged", "is there a hook?")
    expect(
        any(begun for layer, begun, _ in mine.seen if layer),
        f"{told}, when backward() came to the first layer, no exchange had begun",
        "begin in a hook, which backward() calls: all_reduce(p.grad, async_op=True)",
    )
    expect(
        not late,
        f"{told}, finish() came back before rank {sum(late[:1])} had begun: it has not waited",
        "async_op=True returns an object with wait(). Keep it",
    )
    left = mine.begun.works - len(mine.begun.waited)
    expect(
        left <= 0,
        f"{told}, finish() has not waited for {left} exchanges",
        "they need not end in the order in which they begin: wait() for each",
    )
    off = check_gradients(told, mine, alone, whole)
    for layer, begun, least in mine.seen:
        expect(
            begun >= least,
            f"when backward() had come through layer {layer}, {begun} bytes were"
            f" on their way, and the gradients from there to the end have {least}",
            "begin with each gradient as soon as it is complete, in a hook of each parameter",
        )
    return off


def comes_true(what, seconds):
    until = time.monotonic() + seconds
    while not (done := what()) and time.monotonic() < until:
        time.sleep(0.005)
    return done


def check_gradients(told, mine, alone, whole):
    worst, later = (
        0,
        (told != "in step 0")
        * ["step 0 was right. Is something left over from it, or used before its wait()?"],
    )
    for (name, p), own, right in zip(
        mine.named_parameters(), alone.parameters(), whole.parameters(), strict=True
    ):
        named = f"{told}, the gradient of {name}"
        expect((p.grad is None) == (right.grad is None), f"{named} is {p.grad}", "leave it")
        if right.grad is None:
            continue
        size, times = right.grad.norm(), (p.grad.norm() / right.grad.norm()).item()
        off, direction = ((one - right.grad).norm() / size for one in (p.grad, p.grad / times))
        expect(
            not torch.equal(p.grad, own.grad),
            f"{named} is still the rank's own",
            "is it exchanged? And in place, or is the mean copied back?",
        )
        expect(
            off < 1e-5 or not direction < 1e-5,
            f"{named} is {times:.2f} times the mean",
            *later,
            "all_reduce adds up. What turns a sum into a mean? Do it once.",
        )
        expect(
            off < 1e-5,
            f"{named} is off by {off:.1e} of its length",
            *later,
            "before wait(), a tensor may hold anything: do not use it until then",
        )
        worst = max(worst, off.item())
    return worst


class Begun(Waiting):
    """Keeps how many bytes this rank puts into exchanges."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if kind_of(call) not in (None, "recv"):  # (outputs, inputs, ...), or (inputs, ...)
            self.bytes += bytes_of(args[1:2]) or bytes_of(args[:1])
        return super().__torch_dispatch__(call, types, args, kwargs)


class Model(nn.Module):
    """Looks how much is exchanged when backward() comes through some layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 2)])
        self.layers[1].bias.requires_grad_(False)
        self.look_at = ()

    def forward(self, rows):
        for number, layer in enumerate(self.layers):
            if number:
                rows = rows.tanh()
                rows.register_hook(lambda _, number=number: self.at_layer(number))
            rows = layer(rows)
        return rows

    def at_layer(self, number):
        if number in self.look_at:
            trained = [p for p in self.layers[number:].parameters() if p.requires_grad]
            least = len(self.look_at) < 2 or bytes_of(trained)
            comes_true(lambda: self.begun.bytes >= self.before + least, limit() / 8)  # in a thread
            self.seen.append((number, self.begun.bytes - self.before, least))
