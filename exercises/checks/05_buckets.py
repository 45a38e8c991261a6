"""The check of exercises/05_buckets.py."""

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect
from torch import nn

FLOAT, DOUBLE = torch.float32, torch.float64
GRADIENTS = [  # (dtype, shape): 240 to 480 bytes most of them, one of 1600
    (FLOAT, (6, 10)), (FLOAT, (90,)), (DOUBLE, (8, 5)), (FLOAT, (7, 10)), (DOUBLE, (50,)),
    (FLOAT, (20, 20)), (DOUBLE, (30,)), (FLOAT, (4, 25)), (DOUBLE, (60,)), (FLOAT, (30,)),
    (DOUBLE, (2, 5))]  # fmt: skip
FROZEN = 3  # this one has no gradient


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    each = [gradients(r) for r in range(world_size)]  # of each rank
    trained = [one for one in each[rank] if one is not None]
    told = []
    for limit in (1000, 600, 10**6, 1):  # 600: some fill a bucket to the last byte
        model = nn.ParameterList(torch.zeros(shape, dtype=dtype) for dtype, shape in GRADIENTS)
        for p, gradient in zip(model, each[rank], strict=True):
            p.requires_grad_(gradient is not None)
            p.grad = None if gradient is None else gradient.clone()
        with Exchanges() as exchanges:
            answer.average_gradients(model, limit)
        worst = max(check(number, p, [one[number] for one in each])
                    for number, p in enumerate(model))  # fmt: skip
        check_exchanges(exchanges.calls, trained, limit)
        told.append(f"{len(exchanges.calls)} in buckets of {limit}")
    return f"gradients off by {worst:.0e}; exchanges: {', '.join(told)} bytes"


def gradients(rank):
    torch.manual_seed(rank)
    values = [torch.randn(shape, dtype=dtype) for dtype, shape in GRADIENTS]
    return values[:FROZEN] + [None] + values[FROZEN + 1 :]


def check(number, p, each):
    """Check one gradient; return by how much it is off. each: what all ranks had."""
    name, own = f"gradient {number} (of {len(GRADIENTS)})", each[dist.get_rank()]
    if own is None:
        expect(p.grad is None, f"parameter {number} does not train, and has a gradient now",
               "leave it None")
        return 0
    expect(p.grad is not None and p.grad.dtype == own.dtype and p.grad.shape == own.shape,
           f"{name} is {None if p.grad is None else (p.grad.dtype, tuple(p.grad.shape))} now,"
           f" and was {own.dtype, tuple(own.shape)}", "cut the flat tensor up again: view_as")
    right = torch.stack(each).double().mean(0)
    expect(not torch.equal(p.grad, own), f"{name} is still the rank's own",
           "is every bucket exchanged, also the last, which is not full? And copied back?")
    times = (p.grad.double().norm() / right.norm()).item()
    direction = ((p.grad / times - right).norm() / right.norm()).item()
    off = ((p.grad - right).norm() / right.norm()).item()
    expect(off < 1e-5 or direction > 1e-5, f"{name} is {times:.2f} times the mean",
           "all_reduce adds up. What makes a mean of a sum, and how often?")
    expect(off < 1e-5, f"{name} is off by {off:.1e} of its length",
           "does each gradient come back from its own place in the flat tensor?",
           "flat.split([p.numel() for p in bucket]) has the pieces, in the order of the bucket")
    expect(own.dtype == FLOAT or off < 1e-12, f"{name} is float64, and off by {off:.1e}",
           "it went through float32, which has 7 digits: a bucket for each dtype")
    return off


def check_exchanges(calls, trained, limit):
    world_size = dist.get_world_size()
    factor = 2 * (world_size - 1) / world_size  # of what an all_reduce sends
    sizes = [round(sent / factor) for _, sent in calls]  # of the buckets
    told, total = f"with buckets of {limit} bytes", sum(one.nbytes for one in trained)
    most = max(count_buckets(trained, limit), count_buckets(trained[::-1], limit))
    expect(len(sizes) <= most, f"{told}, there were {len(sizes)} exchanges, and {most} are enough",
           "keep a bucket open for each dtype; it is full when the next gradient does not fit",
           "group the gradients by dtype first")
    expect(sum(sizes) <= total, f"{told}, {sum(sizes)} bytes were exchanged for {total} bytes of"
           " gradients", "torch.cat of float32 and float64 makes float64 of both, without a word")
    large = [one.nbytes for one in trained if one.nbytes > limit]
    expect(all(size <= limit or size in large for size in sizes),
           f"{told}, one of {max(sizes, default=0)} bytes was exchanged",
           "look whether a gradient still fits before you put it in",
           "one that is larger than a bucket goes alone")
    cut = [size for size in large if size not in sizes]
    expect(not cut, f"{told}, a gradient of {max(cut, default=0)} bytes was not exchanged alone",
           "do not cut it")


def count_buckets(trained, limit):
    count, room = 0, {}
    for one in trained:
        if one.nbytes > room.get(one.dtype, 0):
            count += 1
            room[one.dtype] = limit
        room[one.dtype] -= one.nbytes
    return count
