"""The check of exercises/17_clip_shards.py."""

import math

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, case, expect

F32, BF16 = torch.float32, torch.bfloat16
MANY = [(number % 7 + 1, F32) for number in range(60)]
# What a rank holds, [(how many numbers, dtype)], or None for no gradient; the length of the whole
# gradient; max_norm; {rank: what one of its numbers is}.
CASES = {
    "parts of several lengths": (lambda rank: [(40 * rank + 9, F32), None, (5, F32)], 30, 2, {}),
    "rank 0 without parameters": (lambda rank: [(301 - rank, F32)] * (rank > 0), 20, 3, {}),
    "rank 0 without gradients": (lambda rank: [(77, F32)] if rank else [None, None], 20, 3, {}),
    "60 parameters on each rank": (lambda rank: MANY, 12, 1.5, {}),
    "bfloat16": (lambda rank: [(3000 + rank, BF16), (90, F32), (1, BF16)], 40, 4, {}),
    "a norm below max_norm": (lambda rank: [(100 + rank, F32), (9, BF16)], 3, 3.5, {}),
    "a very small gradient": (lambda rank: [(50 + rank, F32)], 3e-4, 1e-4, {}),
    "no gradient on any rank": (lambda rank: [None] * rank, 0, 1, {}),
    "max_norm 0": (lambda rank: [(6 + rank, F32)], 5, 0, {}),
    "only zeros": (lambda rank: [(5 + rank, F32)], 0, 0, {}),
    "three lone numbers": (lambda rank: [(4, F32)], 0, 2, {0: 3.7, 1: 9.2, -1: 0.4}),
    "a nan on the last rank": (lambda rank: [(20 + rank, F32)], 5, 1, {-1: math.nan}),
    "an infinity on rank 0": (lambda rank: [(20 + rank, F32)], 5, 1, {0: -math.inf}),
    "both of them": (lambda rank: [(20, BF16)], 5, 1, {0: math.inf, -1: math.nan}),
}


def trial():
    worst, sent = 0, 0
    for name, given in CASES.items():
        with case(name) as told:
            off, its_bytes = look_at(told, *given)
        worst, sent = max(worst, off), max(sent, its_bytes)
    return f"gradients off by {worst:.0e}, {sent} bytes sent for a gradient of any length"


def look_at(name, held, length, max_norm, broken):
    """Check one call. Return by how much the gradients are off, and the bytes sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everyone = make_gradients(held, length, world_size)
    for its_rank, number in broken.items():
        everyone[its_rank][0][3] = number
    everyone = [[one if one is None else shaped(one) for one in its] for its in everyone]
    parameters = [
        torch.nn.Parameter(torch.zeros(3) if one is None else torch.zeros_like(one))
        for one in everyone[rank]
    ]
    gradients = [None if one is None else one.clone() for one in everyone[rank]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    places = [one if one is None else one.data_ptr() for one in gradients]
    with Exchanges() as exchanges:
        found = answer.clip_by_norm(list(parameters), max_norm)
    expect(type(found) is float, f"{name} {found!r} came back", "return a float: tensor.item()")
    look_at_norm(name, found, everyone)
    told = [None] * world_size
    dist.all_gather_object(told, (found, exchanges.bytes_sent()))
    norms = [norm.hex() if math.isfinite(norm) else str(norm) for norm, _ in told]
    expect(
        len(set(norms)) == 1,
        f"{name} the ranks return different norms, {norms}",
        "numbers added up in another order end with another sum: take one order on all ranks",
        "and the same numbers: its own, too, as the others get it",
    )
    worst = 0
    for own, parameter, gradient, place in zip(
        everyone[rank], parameters, gradients, places, strict=True
    ):
        if own is None:
            expect(
                parameter.grad is None,
                f"{name} a .grad was None, and is a tensor now",
                "leave out what has no gradient",
            )
        else:
            expect(
                parameter.grad is gradient and gradient.data_ptr() == place,
                f"{name} .grad is another tensor than before, or has other memory",
                "grad *= factor works in place; grad = grad * factor makes a new one",
            )
            worst = max(worst, look_at_gradient(name, gradient, own, found, max_norm))
    sent = max(sent for _, sent in told)
    expect(
        sent <= 64 * (world_size - 1),
        f"{name} a rank sent {sent} bytes, for {world_size - 1} other(s)",
        "which number of each rank makes the norm of all?",
    )
    return worst, sent


def look_at_norm(name, found, everyone):
    """everyone: the gradients of each rank."""
    whole, own = square_of(everyone) ** 0.5, square_of([everyone[dist.get_rank()]]) ** 0.5
    told, world_size = f"{name} the norm is {whole:.6g}, and this rank returns", len(everyone)
    if not math.isfinite(whole):
        expect(
            not math.isfinite(found),
            f"{told} {found:.6g}",
            "a nan or an infinite number has to come through to all ranks",
            "a sum keeps both; a maximum, a comparison or nan_to_num loses them",
        )
        return
    expect(math.isfinite(found), f"{told} {found}", "which sum is it, when there is no gradient?")
    parts = [square_of([its]) ** 0.5 for its in everyone]
    causes = {
        "the norm of its own gradients": own,
        "the sum of all ranks' norms": sum(parts),
        "the square of the norm": whole**2,
        "the largest of the ranks' norms": max(parts),
        "the norm, divided by the root of the ranks' number": whole / world_size**0.5,
    }
    if abs(found - whole) > 1e-5 * whole:
        for what, wrong in causes.items():
            expect(
                abs(found - wrong) > 1e-5 * wrong,
                f"{told} {what}, {found:.6g}",
                "the square of the whole norm is a sum over all numbers on all ranks"
                if found
                else "a rank without gradients takes part, too: the others wait for it",
                "add up the squares over the ranks, then take the root, once",
            )
        low = any(one is not None and one.dtype == BF16 for its in everyone for one in its)
        expect(
            not low or abs(found - whole) > 0.03 * whole,
            f"{told} {found:.6g}, off by"
            f" {abs(found - whole) / whole:.0e} of it: this is the precision of bfloat16",
            "square and add in float32",
            "torch.linalg.vector_norm has an argument dtype",
        )
        expect(
            False,
            f"{told} {found:.6g}",
            "each number of each rank counts once, and the norm is that from before the clipping",
        )


def look_at_gradient(name, found, before, norm, max_norm):
    """Return by how much what is found is off, as a share of its length."""
    if not math.isfinite(norm):
        expect(
            torch.equal(found.nan_to_num(7), before.nan_to_num(7)),
            f"{name} the norm is {norm}, and a gradient was changed",
            "on each rank: look at the norm before you scale",
            "all ranks have the same norm, so all can decide by it",
        )
        return 0
    factor = min(1, max_norm / (norm + 1e-6))
    right, length = before.double() * factor, before.double().norm().item() or 1
    off = (found.double() - right).norm().item() / (length * factor or 1)
    by = f"{name} a gradient was scaled by {found.double().norm().item() / length:.6g}"
    expect(
        factor < 1 or torch.equal(found, before),
        f"{by}, and the norm, {norm:.6g}, is not above max_norm, {max_norm}",
        "a factor above 1 makes a gradient longer: leave it",
    )
    expect(
        off < (1e-2 if before.dtype == BF16 else 1e-5),
        f"{by}, not by {factor:.6g}",
        "is the factor that of the norm over all ranks, with the 1e-6, and is it used once?",
    )
    return off if before.dtype == F32 else 0


def square_of(everyone):
    return sum(
        one.double().square().sum().item() for its in everyone for one in its if one is not None
    )


def shaped(flat):
    """Make a number of 1, a matrix that is not contiguous of some, and of others a vector."""
    if len(flat) == 1:
        return flat[0].clone()
    return flat if len(flat) % 2 else flat.view(-1, 2).mT


def make_gradients(held, length, world_size):
    """Return what each rank holds. All of it together has about that length."""
    torch.manual_seed(world_size)
    made = [[one and torch.rand(one[0]) + rank for one in held(rank)] for rank in range(world_size)]
    factor = length / (square_of(made) ** 0.5 or 1)
    return [
        [
            None if one is None else (one * factor).to(kind[1])
            for one, kind in zip(its, held(rank), strict=True)
        ]
        for rank, its in enumerate(made)
    ]
