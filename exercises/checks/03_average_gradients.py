"""The check of exercises/03_average_gradients.py."""

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect
from torch import nn


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    rows = torch.randn(world_size, 4, 8)
    if world_size > 2:
        rows[-1] = 0  # the last rank's first gradient is zero: it has to take part all the same
    mine, whole = new_model(), new_model()
    mine(rows[rank]).square().mean().backward()
    whole(rows.flatten(0, 1)).square().mean().backward()
    own = {name: p.grad.clone() for name, p in mine.named_parameters() if p.requires_grad}
    weights = [p.detach().clone() for p in mine.parameters()]
    with Exchanges() as exchanges:
        answer.average_gradients(mine)
    worst = 0
    for (name, p), right in zip(mine.named_parameters(), whole.parameters(), strict=True):
        if right.grad is None:
            expect(p.grad is None, f"{name} does not train, and has a gradient now",
                   "leave it None")
            continue
        expect(p.grad is not None, f"{name} has no gradient any more", "write into p.grad")
        times = (p.grad.norm() / right.grad.norm()).item()
        off = ((p.grad - right.grad).norm() / right.grad.norm()).item()
        expect(not torch.equal(p.grad, own[name]),
               f"the gradient of {name} is still the rank's own",
               "all_reduce works in place: give it the gradient itself, not a copy")
        direction = ((p.grad / times - right.grad).norm() / right.grad.norm()).item()
        expect(off < 1e-5 or direction > 1e-5,
               f"the gradient of {name} is {times:.2f} times the mean",
               "all_reduce adds up. What makes a mean of a sum, and how often?")
        expect(off < 1e-5, f"the gradient of {name} is off by {off:.1e} of its length",
               "does each rank get the sum of all ranks, of each parameter, before it goes on?",
               "all_reduce, not reduce; with async_op=True, wait() first; then / get_world_size()")
        worst = max(worst, off)
    expect(all(map(torch.equal, weights, mine.parameters())), "the weights were changed",
           "exchange p.grad: the optimizer's step comes later")
    size = sum(gradient.nbytes for gradient in own.values())
    sent, most = exchanges.bytes_sent(), 2 * size
    expect(sent <= most, f"{sent} bytes were sent for {size} bytes of gradients",
           "one all_reduce for each gradient is enough")
    return f"gradients off by {worst:.0e}, {len(exchanges.calls)} exchanges, {sent} bytes sent"


def new_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    model[0].bias.requires_grad_(False)
    return model
