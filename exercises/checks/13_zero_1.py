"""The check of exercises/13_zero_1.py."""

import time

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, bytes_kept, case, expect, tensors

COUNT, STEPS, LR = 1001, 3, 0.1  # no multiple of the number of ranks


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = torch.linspace(-1, 1, COUNT, dtype=torch.float64)
    # AdamW does not notice that a gradient is twice as large, unless it is very small, too.
    gradients = torch.randn(
        STEPS, world_size, COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    gradients *= torch.logspace(-9, 0, COUNT, dtype=torch.float64)
    mean = gradients.mean(dim=1)
    right = plain(start, mean)
    mistaken = {
        "this rank's own gradient": plain(start, gradients[:, rank]),
        "the sum of the gradients, not the mean": plain(start, mean * world_size),
        "the mean of the gradients, divided once more": plain(start, mean / world_size),
    }
    weights = start.clone().requires_grad_()
    place = weights.data_ptr()
    before, there = bytes_kept(weights), {id(one) for one in tensors()}
    optimizer = answer.ShardedAdamW(weights, LR)
    worst, steps = 0, []
    for step in range(STEPS):
        last = weights.detach().clone()
        weights.grad = gradients[step, rank].clone()
        with Exchanges() as exchanges:
            optimizer.step()
        steps.append(exchanges)
        expect(
            weights.data_ptr() == place,
            "the weights are not where they were: weights.data was replaced",
            "what else looks at the old place? copy_() writes into it",
        )
        same = (weights == last).nonzero().flatten().tolist()
        expect(
            not same,
            f"{len(same)} of {COUNT} weights are the same after step {step + 1} as"
            f" before, the first is number {min(same, default=0)}",
            "does each rank get all parts, does the last part end where the weights end, and are"
            " they written into the tensor that was given?",
            "fill up with zeros to a multiple of N: then all parts are of equal length. And with"
            " async_op=True, a part is there when wait() returns",
        )
        for what, wrong in mistaken.items():
            expect(
                (weights - wrong[step]).abs().max() > 1e-9,
                f"after step {step + 1}, the weights are those that {what} gives",
                "each part needs the mean over all ranks",
                "reduce_scatter adds up: divide what comes out by N, once",
            )
        off = (weights - right[step]).abs()
        expect(
            off.max() < 1e-9,
            f"after step {step + 1}, {int((off >= 1e-9).sum())} of {COUNT}"
            f" weights are off, by {off.max():.1e} at most",
            "step 1 was right: what is kept, lost or added up between two steps?"
            if step
            else "is it the mean over all ranks, of the right part, with AdamW's own settings?"
            " Are the parts put back where they were cut out?",
            "the state of one part must stay with this part, and all parts take each step",
        )
        worst = max(worst, off.max().item())
    last = weights.grad = off = same = None
    share = 8 * -(-COUNT // world_size)
    kept = bytes_kept(weights) - before
    for _ in range(20):  # Gloo's thread lets go of a tensor a little later
        time.sleep(0.01)
        kept = min(kept, bytes_kept(weights) - before)
    expect(
        all(one.grad is None for one in tensors() if one.is_leaf),
        "between two steps, a tensor has a .grad",
        "the part's gradient is needed in a step alone: set it to None",
    )
    expect(
        kept <= 3 * share + 64,
        f"between two steps, this rank keeps {kept} bytes besides the"
        f" weights. AdamW's state of its part is {2 * share}, and a copy of the part {share}",
        "AdamW shall see this rank's part alone, no buffer shall be as long as the weights, and"
        " no .grad of a part shall stay",
        "a slice keeps the whole tensor that it is cut from: clone it",
    )
    place = weights.untyped_storage().data_ptr()  # a view of the weights takes no memory
    long = [
        one
        for one in tensors()
        if id(one) not in there
        and one.numel() >= COUNT
        and one.untyped_storage().data_ptr() != place
    ]
    expect(
        not long,
        f"between two steps, this rank keeps a tensor of {COUNT} numbers or more",
        "nothing shall be as long as all weights: with many ranks, a mask of a byte for each"
        " weight has more bytes than the state",
    )
    sent, least = max(one.bytes_sent() for one in steps), start.nbytes // world_size
    expect(
        sent >= least,
        f"a step sends {sent} bytes, and this rank's part alone has {least}",
        "the other ranks need it",
        "in which thread or process is it sent?",
    )
    most = 2 * (world_size - 1) * share + 64
    kinds = {kind for kind, size in exchanges.calls if size > 64}
    reduced = "allreduce" in kinds and " An all_reduce gives each rank the mean for all parts."
    expect(
        sent <= most,
        f"a step sends {sent} bytes, and one all_reduce of the weights is"
        f" {2 * (world_size - 1) * share}.{reduced or ''}",
        "which rank needs the mean of which part?",
        "reduce_scatter is half of an all_reduce",
    )
    everyone = [None] * world_size
    dist.all_gather_object(everyone, kept)
    part = COUNT * kept / (sum(everyone) or 1)  # as a share of what all keep
    expect(
        part < share / 8 + 0.6,
        f"this rank has a part of {part:.0f} weights, and {COUNT}"
        f" divided by {world_size}, rounded up, are {share // 8}",
        "no part is longer than the"
        " others, but by one: with many ranks, the last one would have twice as much",
    )
    look_at_few()
    return (
        f"weights off by {worst:.0e}, {kept} bytes of state on a rank, not {2 * start.nbytes},"
        f" {sent} bytes sent in a step"
    )


def look_at_few():
    """With 4 weights, rounded up, 2 are an Nth on 3 ranks: nothing is left for the last one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = torch.linspace(-1, 1, world_size + 1, dtype=torch.float64)
    gradients = torch.randn(
        2, world_size, len(start), dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    weights = start.clone().requires_grad_()
    with case(f"{len(start)} weights"):
        optimizer = answer.ShardedAdamW(weights, LR)
        for gradient in gradients[:, rank]:
            weights.grad = gradient.clone()
            optimizer.step()
    off = (weights - plain(start, gradients.mean(dim=1))[-1]).abs().max().item()
    expect(
        off < 1e-9,
        f"of only {len(start)} weights, some are off, by {off:.1e} at most",
        "rounded up, the parts of the first ranks may have all weights: what is left for the"
        " last one?",
    )


def plain(start, gradients):
    """Return the weights after each step of one AdamW."""
    weights, after = start.clone(), []
    optimizer = torch.optim.AdamW([weights], lr=LR)
    for gradient in gradients:
        weights.grad = gradient.clone()
        optimizer.step()
        after.append(weights.clone())
    return after
