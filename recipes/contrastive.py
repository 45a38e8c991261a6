"""How do I use the other ranks' samples as negatives in a contrastive loss?

    all_a, all_b = AllGather.apply(torch.stack([a, b], dim=1)).unbind(dim=1)  # of all ranks
    target = torch.arange(len(a), device=a.device) + dist.get_rank() * len(a)  # where they stand
    loss = cross_entropy(scale * a @ all_b.T, target) + cross_entropy(scale * b @ all_a.T, target)

A contrastive loss compares each sample with its partner and with all others, its negatives. But a
rank (process) has only its own part of the batch. dist.all_gather fetches the other ranks' rows,
but no gradient goes back through it. AllGather below is an autograd function that sends the
gradients back to the ranks of these rows. Copy it. A private one of torch has the same gradient:
torch.distributed._functional_collectives.all_gather_single_autograd(rows, 0, dist.group.WORLD), in
2.11 all_gather_tensor_autograd. (That of torch.distributed.nn.functional is deprecated. With Gloo,
its gradient is wrong, without an error, if the one that it gets is not contiguous: 2.14, 2.15.)
Give DDP both views in one call: with BatchNorm and two calls, torch 2.11 fails in backward().

    torchrun --standalone --nproc-per-node=2 recipes/contrastive.py

    [rank 0/2] 8 pairs on each of 2 ranks, compared with 16 pairs in one process
    [rank 0/2] gradient of                     the encoder      the scale
    [rank 0/2] AllGather                       off by 1.5e-07   off by 0.0e+00
    [rank 0/2] local negatives                 off by 6.8e-01   off by 4.8e-01
    [rank 0/2] all_gather alone                off by 4.9e-01   off by 0.0e+00
    [rank 0/2] own rows put back               off by 3.5e-01   off by 0.0e+00
    [rank 0/2] whole loss on every rank        off by 5.0e-01   off by 0.0e+00
    [rank 0/2] whole loss times ranks          off by 9.9e-08   off by 1.0e+00
    [rank 0/2] AllGather: the gradient of the whole batch, without a factor

The loss needs no factor: it is each rank's mean over its own rows, and DistributedDataParallel
(DDP) averages the ranks' gradients, which gives the mean over the whole batch. The other ways are
common mistakes. If every rank computes the loss of the whole batch, but sends gradients back to its
own rows only, DDP's mean makes them too small: 1/2 on 2 ranks. The number of ranks as a factor on
the loss mends this for the encoder. It makes the gradient of a learned scale (inverse temperature)
too large instead. In accumulation, a row has the negatives of its micro-batch: off by 4.5e-01.

Now write it yourself: exercises/12_gather_with_gradients.py.
"""

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

PAIRS = 8  # on each rank; all ranks need the same number: use drop_last=True


class AllGather(torch.autograd.Function):
    """The rows of all ranks, in rank order, with a gradient that finds its way back."""

    @staticmethod
    def forward(ctx, rows):
        return torch.cat(gather_parts(rows))

    @staticmethod
    @once_differentiable  # a second derivative (a gradient penalty) would be wrong
    def backward(ctx, gradient):
        # gradient: of this rank's loss, for the rows of all ranks. A row needs its gradient of all
        # ranks' losses. reduce_scatter adds up each part over the ranks; part r goes to rank r.
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size())]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


def gather_parts(rows):
    """Return a list of each rank's rows. No gradient goes back through it, even to the own rows."""
    rows = rows.contiguous()  # and so are the parts: NCCL wants both
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return parts


def loss_of_rows(a, b, all_a, all_b, scale, first):
    """The mean loss of some of all pairs: row i of a and of b is row first + i of all rows."""
    target = torch.arange(len(a), device=a.device) + first
    return cross_entropy(scale * a @ all_b.T, target) + cross_entropy(scale * b @ all_a.T, target)


def with_gradient(a, b, scale):
    """The right way, the lines above: each rank compares its own rows with all rows.

    a, b: this rank's embeddings, (rows, width) each, of one size on all ranks. Return its loss.
    """
    all_a, all_b = AllGather.apply(torch.stack([a, b], dim=1)).unbind(dim=1)
    target = torch.arange(len(a), device=a.device) + dist.get_rank() * len(a)  # not from row 0 on
    loss = cross_entropy(scale * a @ all_b.T, target) + cross_entropy(scale * b @ all_a.T, target)
    return loss


def local_negatives(a, b, scale):
    """Wrong: this is what DDP alone does to a loss that was written for one GPU."""
    return loss_of_rows(a, b, a, b, scale, first=0)


def without_gradient(a, b, scale):
    """Wrong: a row learns from its negatives, but not from being a negative of others."""
    all_a, all_b = torch.cat(gather_parts(torch.stack([a, b], dim=1))).unbind(dim=1)
    return loss_of_rows(a, b, all_a, all_b, scale, first=dist.get_rank() * len(a))


def own_rows_put_back(a, b, scale):
    """Wrong: a row learns from being a negative in the loss of its own rank only."""
    return loss_of_rows(a, b, *put_back(a, b), scale, first=dist.get_rank() * len(a))


def whole_loss(a, b, scale):
    """Too small: a row gets its gradient on one rank only, and DDP divides it by all ranks."""
    all_a, all_b = put_back(a, b)
    return loss_of_rows(all_a, all_b, all_a, all_b, scale, first=0)


def whole_loss_times_ranks(a, b, scale):
    """Right for the encoder. The scale has its whole gradient on each rank: too large now."""
    return whole_loss(a, b, scale) * dist.get_world_size()


def put_back(a, b):
    """Return all ranks' rows, this rank's own with a gradient."""
    parts = gather_parts(torch.stack([a, b], dim=1))
    parts[dist.get_rank()] = torch.stack([a, b], dim=1)
    return torch.cat(parts).unbind(dim=1)


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare_losses()
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_losses():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank makes the same pairs, and takes its own ones
    first = torch.randn(PAIRS * world_size, 16)
    second = first + 0.1 * torch.randn_like(first)  # another view of the same thing
    whole, pairs = new_encoder(), torch.stack([first, second])
    a, b, scale = whole(pairs)
    loss_of_rows(a, b, a, b, scale, first=0).backward()  # one process, one batch
    log(
        f"{PAIRS} pairs on each of {world_size} ranks, compared with {len(first)} pairs in one"
        " process"
    )
    log("gradient of                     the encoder      the scale")
    off = {}
    for name, loss in [
        ("AllGather", with_gradient),
        ("local negatives", local_negatives),
        ("all_gather alone", without_gradient),
        ("own rows put back", own_rows_put_back),
        ("whole loss on every rank", whole_loss),
        ("whole loss times ranks", whole_loss_times_ranks),
    ]:
        model = DDP(new_encoder())
        loss(*model(pairs[:, rank * PAIRS : (rank + 1) * PAIRS])).backward()
        off[name] = [
            ((found.grad - expected.grad).norm() / expected.grad.norm()).item()
            for found, expected in zip(model.module.parts(), whole.parts(), strict=True)
        ]
        encoder, scale = off[name]
        log(f"{name:<30}  off by {encoder:.1e}   off by {scale:.1e}")
    encoder, scale = off.pop("AllGather")
    if not (encoder < 1e-6 and scale < 1e-6):
        raise RuntimeError("AllGather does not give the gradient of one process")
    encoder, scale = off.pop("whole loss times ranks")
    if not (encoder < 1e-6 and scale > 0.5 and all(wrong > 0.1 for wrong, _ in off.values())):
        raise RuntimeError("the mistakes do not show what this file says")
    log("AllGather: the gradient of the whole batch, without a factor")


class Encoder(nn.Module):
    """Your model: embeddings of length 1, and a scale that is learned, too."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.6))
        self.layer = nn.Linear(16, 8, bias=False)

    def forward(self, pairs):
        a, b = normalize(self.layer(pairs), dim=-1)
        return a, b, self.log_scale.exp()

    def parts(self):
        return self.layer.weight, self.log_scale


def new_encoder():
    torch.manual_seed(1)
    return Encoder()


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
