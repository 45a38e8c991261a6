"""The check of exercises/05_buckets.py."""

import answer
import torch
import torch.distributed as dist
from checker import Waiting, expect
from torch import nn

FLOAT, DOUBLE = torch.float32, torch.float64
GRADIENTS = [  # (dtype, shape): 240 to 480 bytes most of them, one of 1600
    (FLOAT, (6, 10)),
    (FLOAT, (90,)),
    (DOUBLE, (8, 5)),
    (FLOAT, (7, 10)),
    (DOUBLE, (50,)),
    (FLOAT, (20, 20)),
    (DOUBLE, (30,)),
    (FLOAT, (4, 25)),
    (DOUBLE, (60,)),
    (FLOAT, (30,)),
    (DOUBLE, (2, 5)),
]
FROZEN = 3  # this one has no gradient
HALVES = "reducescatter", "reduce", "alltoall", "gather"  # a second call completes what these do


def trial():
    rank, told, models = dist.get_rank(), [], {}
    # 600: some fill a bucket to the last byte. 1000 again: other tensors than before.
    # The last model has 300 gradients.
    for limit, copies in (1000, 1), (600, 1), (10**6, 1), (1, 1), (1000, 1), (1000, 30):
        each = [gradients(r, copies) for r in range(dist.get_world_size())]  # of each rank
        trained = [one for one in each[rank] if one is not None]
        model = models.setdefault(
            copies,
            nn.ParameterList(torch.zeros(shape, dtype=dtype) for dtype, shape in kinds(copies)),
        )
        for p, gradient in zip(model, each[rank], strict=True):
            p.requires_grad_(gradient is not None)
            p.grad = None if gradient is None else gradient.clone()
        with Waiting() as exchanges:
            answer.average_gradients(model, limit)
        exchanges.look_for_waits(f"with buckets of {limit} bytes,")
        worst = max(
            check(number, p, [one[number] for one in each]) for number, p in enumerate(model)
        )
        sizes = check_exchanges(exchanges.calls, trained, limit)
        told += [f"{len(sizes)} in buckets of {limit}"] * (copies == 1)
    return f"gradients off by {worst:.0e}; exchanges: {', '.join(told)} bytes"


def kinds(copies):
    """The last model has some of a third dtype."""
    return copies * GRADIENTS + [(torch.bfloat16, (25,))] * (copies - 1)


def gradients(rank, copies):
    torch.manual_seed(rank)
    values = [torch.randn(shape, dtype=dtype) for dtype, shape in kinds(copies)]
    if rank == 1:
        values[6] *= 0  # a gradient of zero is one, too
    return [None if number % len(GRADIENTS) == FROZEN else one for number, one in enumerate(values)]


def check(number, p, each):
    """Check one gradient; return by how much it is off. each: what all ranks had."""
    name, own = f"gradient {number}", each[dist.get_rank()]
    if own is None:
        expect(p.grad is None, f"parameter {number} does not train, and has a gradient now", "")
        return 0
    expect(
        p.grad is not None and p.grad.dtype == own.dtype and p.grad.shape == own.shape,
        f"{name} is {None if p.grad is None else (p.grad.dtype, tuple(p.grad.shape))} now,"
        f" and was {own.dtype, tuple(own.shape)}",
        "cut the flat tensor up again: view_as",
    )
    right = torch.stack(each).double().mean(0)
    expect(
        not torch.equal(p.grad, own),
        f"{name} is still the rank's own",
        "is every bucket exchanged, also the last, which is not full? And copied back?",
        "is something kept from an earlier call? In each step, p.grad is another tensor",
    )
    times = (p.grad.double().norm() / right.norm()).item()
    direction = ((p.grad / times - right).norm() / right.norm()).item()
    off = ((p.grad - right).norm() / right.norm()).item()
    if own.dtype == torch.bfloat16 and off < 1e-2:
        return 0
    expect(
        off < 1e-5 or not direction < 1e-5,
        f"{name} is {times:.2f} times the mean",
        "all_reduce adds up. What turns a sum into a mean? Do it once.",
    )
    expect(
        off < 1e-5,
        f"{name} is off by {off:.1e} of its length",
        "does each gradient come back from its own place in the flat tensor?",
        "flat.split([p.numel() for p in bucket]) has the pieces, in the order of the bucket",
    )
    expect(
        own.dtype == FLOAT or off < 1e-12,
        f"{name} is float64, and off by {off:.1e}",
        "it went through float32, which has 7 digits: a bucket for each dtype",
    )
    return off


def check_exchanges(calls, trained, limit):
    """Return the sizes of the buckets."""
    n = dist.get_world_size()
    parts = {
        "allreduce": 2 * (n - 1) / n,
        "allgather": n - 1,
        "reducescatter": (n - 1) / n,
        "alltoall": (n - 1) / n,
    }  # are sent of a bucket
    halves = any(kind in HALVES and sent for kind, sent in calls)
    whole = (*HALVES, "allreduce", *("allgather", "broadcast", "send") * (not halves))
    sizes = sorted(
        round(sent / parts.get(kind, 1)) for kind, sent in calls if sent and kind in whole
    )
    padding = 8 * (n - 1) * halves  # for parts of equal length
    told, total = f"with buckets of {limit} bytes", sum(one.nbytes for one in trained)
    right = [
        buckets(order, limit, alone)
        for order in (trained, trained[::-1])
        for alone in (True, False)
    ]
    most = max(map(len, right))
    expect(
        len(sizes) <= most,
        f"{told}, there were {len(sizes)} exchanges, and {most} are enough",
        "each message is an exchange: use collectives"
        if "send" in dict(calls)
        else "keep a bucket open for each dtype; it is full when the next gradient does not fit",
        "group the gradients by dtype first",
    )
    expect(
        sum(sizes) >= total,
        f"{told}, {sum(sizes)} bytes were exchanged for {total} bytes of gradients",
        "each gradient goes into a bucket, and each bucket is exchanged",
    )
    expect(
        sum(sizes) <= total + padding * most,
        f"{told}, {sum(sizes)} bytes were exchanged for {total} bytes of gradients",
        "are only gradients in it? And torch.cat of"
        " float32 and float64 makes float64 of both, without a word",
    )
    found = {size - gap for size in sizes for gap in range(padding + 1)}
    large = {one.nbytes for one in trained if one.nbytes > limit}
    wrong = [
        size
        for size in sizes
        if size > limit + padding and large.isdisjoint(range(size - padding, size + 1))
    ]
    expect(
        not wrong,
        f"{told}, one of {sum(wrong[:1])} bytes was exchanged",
        "look whether a gradient still fits before you put it in",
        "a larger one goes alone",
    )
    expect(
        large <= found,
        f"{told}, a gradient of {max(large - found, default=0)} bytes was not exchanged alone",
        "do not cut it",
    )
    expect(
        any(len(one) == len(sizes) and set(one) <= found for one in right),
        f"{told}, those that were exchanged have {sizes} bytes, and in the order of the"
        f" parameters they would have {right[0]}",
        "take the gradients in their order; a large one ends no bucket of another dtype",
    )
    return sizes


def buckets(trained, limit, alone):
    """Return the sizes. alone: a gradient that is too large does not end the open bucket."""
    sizes, last = [], {}  # the number of the open bucket of each dtype
    for one in trained:
        number = last.get(one.dtype)
        if number is not None and sizes[number] + one.nbytes <= limit:
            sizes[number] += one.nbytes
            continue
        sizes.append(one.nbytes)
        if one.nbytes <= limit or not alone:
            last[one.dtype] = len(sizes) - 1
    return sorted(sizes)
