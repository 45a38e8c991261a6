"""The check of exercises/12_gather_with_gradients.py."""

import answer
import torch
import torch.distributed as dist
from checker import FLOAT32, Waiting, expect
from torch.nn.functional import cross_entropy, normalize

N, D = 5, 6


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks make everybody's rows
    everyone = torch.randn(world_size, D, N, dtype=torch.float64).mT  # not contiguous
    factors = torch.randn(world_size, world_size * N, D, dtype=torch.float64)  # of each rank's loss
    own = slice(rank * N, (rank + 1) * N)
    for contiguous in (True, False):
        mine = everyone[rank].detach().requires_grad_()
        with Waiting() as forward:
            result = answer.gather(mine)
        forward.look_for_waits("in gather(),")
        look_at_result(result, everyone.reshape(-1, D))
        theirs = factors[rank].clone() if contiguous else factors[rank].mT.contiguous().mT
        with Waiting() as backward:
            result.backward(theirs)
        backward.look_for_waits("in backward(),")
        expect(
            mine.grad is not None, "no gradient has reached the rows", "what does backward return?"
        )
        look_at_gradient(mine.grad, factors.sum(0)[own], factors[rank, own], contiguous)
        expect(
            torch.equal(mine, everyone[rank]), "the rows were changed", "gather into a new tensor"
        )
        expect(
            torch.equal(theirs, factors[rank]),
            "the gradient of the result was changed",
            "all_reduce works in place, and x.contiguous() may be x itself: give it a copy",
        )
        sent, most = backward.bytes_sent(), round(2 * (world_size - 1) / world_size * result.nbytes)
        expect(
            min(sent, forward.bytes_sent()) > 0,
            "nothing was sent to another rank",
            "each way, a rank sends: its rows forward, and gradients backward",
        )
        expect(
            sent <= most,
            f"backward() sent {sent} bytes; an all_reduce of the result's shape sends {most}",
            "a rank needs the gradients of its own rows only",
        )
    off = contrast(rank, world_size)
    return (
        f"gradients off by {off:.0e}; {forward.bytes_sent()} bytes sent forward, {sent}"
        f" backward, for {mine.nbytes} bytes of rows"
    )


def look_at_result(found, right):
    expect(torch.is_tensor(found), f"a {type(found).__name__} came back", "return a tensor")
    shape, wanted = tuple(found.shape), tuple(right.shape)
    expect(
        shape == wanted,
        f"the result has shape {shape}, not {wanted}",
        "torch.cat makes one tensor of many; how many ranks are there?",
    )
    expect(
        torch.equal(found, right),
        "the result does not have the rows of all ranks in their order",
        "rank 0's come first, on every rank alike",
    )
    expect(
        found.requires_grad,
        "no gradient can go back: the result does not require one",
        "autograd does not see through a collective: a torch.autograd.Function tells it the way",
    )


def look_at_gradient(found, right, alone, contiguous):
    """right: the gradient of the sum of all ranks' losses; alone: of this rank's loss."""

    def close(other):
        return found.shape == other.shape and (found - other).norm() < 1e-12 * other.norm()

    if close(right):
        return
    world_size = dist.get_world_size()
    what = "the gradient of the rows is"
    expect(
        not close(alone),
        f"{what} that of this rank's loss alone",
        "the other ranks' losses depend on these rows, too. Who knows how?",
        "in backward, each rank has a gradient for all rows: it keeps one part, and sends the"
        " others to the ranks whose rows they are",
    )
    expect(
        not close(alone * world_size),
        f"{what} {world_size} times that of this rank's loss",
        "a factor does not stand for what the other ranks' losses say",
        "exchange in backward",
    )
    times = (found.norm() / right.norm()).item()
    expect(
        found.shape != right.shape or not close(right * times),
        f"{what} {times:.2f} times that of the sum of all losses",
        "DDP takes the mean later: here, the gradients are added up, once",
    )
    off = (found - right).norm() / right.norm()
    expect(
        contiguous,
        f"where the gradient that comes from the loss is not contiguous, {what} off"
        f" by {off:.1e} of its length",
        "its memory is not in the order of its rows",
        "tensor.contiguous() has it in that order",
    )
    expect(off > 1e-6, f"{what} off by {off:.1e} of its length", FLOAT32)
    expect(
        False,
        f"{what} off by {off:.1e} of its length",
        "which part of the gradient is that of this rank's rows?",
        "add up the ranks' gradients, then take part number rank of the sum",
    )


def contrast(rank, world_size):
    """Compare the gradients of a contrastive loss with those in one process; return how far off."""
    torch.manual_seed(1)
    everyone = torch.randn(2, world_size * N, D, dtype=torch.float64)
    own = slice(rank * N, (rank + 1) * N)
    mine, whole = everyone[:, own].clone().requires_grad_(), everyone.clone().requires_grad_()
    a, b = normalize(mine, dim=-1)
    loss(a, b, answer.gather(a), answer.gather(b), rank * N).backward()
    all_a, all_b = normalize(whole, dim=-1)
    (world_size * loss(all_a, all_b, all_a, all_b, 0)).backward()  # the sum of the ranks' means
    off = ((mine.grad - whole.grad[:, own]).norm() / whole.grad.norm()).item()
    expect(
        off < 1e-12,
        f"the gradient of a contrastive loss is off by {off:.1e} of its length",
        "here gather is called twice for one loss: does a call keep anything for itself?",
    )
    return off


def loss(a, b, all_a, all_b, first):
    """The mean over rows: the partner of row i of a or b is row first + i of all_b or all_a."""
    target = first + torch.arange(len(a))
    return cross_entropy(4 * a @ all_b.T, target) + cross_entropy(4 * b @ all_a.T, target)
