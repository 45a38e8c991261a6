"""How do I put the experts of a mixture of experts on different ranks?

    model = YourModel().to(device)  # its mixtures: ExpertParallel(width, experts, top, new_expert)
    experts = parameters_of_experts(model)  # what this rank alone has; all functions stand below
    for block in model.blocks:
        fully_shard(block, ignored_params=set(experts))
    fully_shard(model, ignored_params=set(experts))
    optimizer = torch.optim.AdamW([{"params": experts}, {"params": rest_of(model, experts)}])

    outputs, balance = model(inputs)  # this rank's own rows
    (mean_loss(outputs, targets) + 0.01 * balance).backward()
    divide_by_ranks(experts)  # once for each step of the optimizer
    norm = clip_with_experts(model, experts, MAX_NORM)  # in place of clip_grad_norm_

A mixture of experts is a layer with many experts (networks of one shape) and a router, which sends
each token to a few of them. Here each rank (process) has some of the experts. An all-to-all takes
the tokens to their experts. Another one brings the results back. Gradients go back (Exchange).

An expert has tokens of all ranks, so it gets the gradients of all ranks' losses, added up. The loss
of the whole batch is their mean: divide by the number of ranks. FSDP2 (fully_shard) and DDP
(DistributedDataParallel) do so with all else, and leave the experts alone: you move these to the
device. On a GPU, AdamW updates all of a group at once, and fails if tensors are among DTensors:
hence two groups. Start the rest equal on all ranks. For DDP, take wrap_ddp(), partly private.

    torchrun --standalone --nproc-per-node=4 recipes/expert_parallel.py

    [rank 0/4] 8 experts, a token goes to 2 of them, 32 tokens on each of 4 ranks
    [rank 0/4] gradient off by                      experts   router     rest
    [rank 0/4] FSDP2 around the rest               1.8e-16  3.6e-16  4.7e-16
    [rank 0/4] DDP around the rest                 1.8e-16  3.7e-16  4.9e-16
    [rank 0/4] 9 experts, the last 3 idle          1.1e-16  4.2e-16  3.9e-16
    [rank 0/4] DDP around all                      1.1e+00  1.1e+00  1.7e+00
    [rank 0/4] experts not divided by the ranks    3.0e+00  3.0e-16  4.4e-16
    [rank 0/4] clipped by each rank's own norm     6.3e-01  7.7e-01  7.7e-01
    [rank 0/4] idle experts skipped: forward works; in backward(), ranks [0, 1, 2] wait in vain
    [rank 0/4] experts, router and rest have the gradient of one process

With 9 experts, the router never chooses the last three, so rank 3 gets no row. It must still run
its experts, on 0 rows. If it makes an empty tensor instead, autograd skips the exchanges there, and
the others wait until their timeout. All ranks must call the layer as often, also in evaluation.

DDP(model) overwrites the experts of all ranks by those of rank 0. So does
DDP(torch.compile(model)), which changes the names: compile what DDP() returns. If you forget the
division, AdamW without clipping hides it. With DDP, clip_grad_norm_ knows this rank's experts only:
each rank has another norm, and the copies of the rest drift apart, without an error. So does a
GradScaler: take bfloat16 by autocast. (FSDP2's MixedPrecisionPolicy leaves the experts in float32.)

The balance is a loss (Fedus, Zoph, Shazeer, Switch Transformers, 2021). Here no token is dropped.

A rank's state_dict() has its own experts only. To save and load: checkpoint_any_world_size.py.
"""

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

WIDTH, ROWS, SEED, MAX_NORM = 16, 32, 0, 0.01  # ROWS on each rank: all need the same number


class Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group, and receive theirs. The gradients go the other way.

    rows: (sum of send_counts, ...), those for rank 0 first, and so on. send_counts and
    receive_counts: lists with an int for each rank. Returns (sum of receive_counts, ...), those of
    rank 0 first. All ranks must call it, and take part in its backward pass, also without rows.
    """

    @staticmethod
    def forward(ctx, rows, send_counts, receive_counts, group):
        ctx.way_back = receive_counts, send_counts, group
        received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        rows = rows.contiguous()  # others are refused, and many gradients are not contiguous
        dist.all_to_all_single(received, rows, receive_counts, send_counts, group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None, None


class ExpertParallel(nn.Module):
    """A mixture of experts, of which each rank of a group has a part.

    top: to how many experts a token goes. new_expert(number): makes an expert, a module from
    (n, width) to (n, width), where n may be 0. Seed it by its number and layer: else the experts of
    all ranks are copies. ValueError: too few experts. group: None for all ranks. In smaller ones,
    an expert has a copy in each: start these equal, add up their gradients, divide by all ranks.
    """

    def __init__(self, width, experts, top, new_expert, group=None):
        super().__init__()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if experts < ranks:
            raise ValueError(f"{experts} experts for {ranks} ranks: each rank needs one")
        self.top, self.group = top, group
        self.router = nn.Linear(width, experts)  # the same on all ranks
        numbers = torch.arange(experts).tensor_split(ranks)
        self.held = [len(part) for part in numbers]  # how many experts each rank has
        # Named by number, no two experts have the same name, on whichever rank they are.
        self.experts = nn.ModuleDict({str(n): new_expert(n) for n in numbers[rank].tolist()})

    def forward(self, tokens):
        """tokens: (..., width), of this rank. Returns (..., width), and the group's balance."""
        rows = tokens.flatten(0, -2)
        probabilities = self.router(rows).softmax(dim=1)
        weights, chosen = probabilities.topk(self.top, dim=1)  # (n, top) each
        by_expert, order = chosen.flatten().sort(stable=True)  # and so by rank, too
        limits = torch.arange(probabilities.shape[1] + 1, device=rows.device)
        counts = torch.searchsorted(by_expert, limits).diff()  # for each expert

        # A rank must know how much it will receive, so the counts travel first.
        ranks, own = len(self.held), len(self.experts)
        arriving = counts.new_empty(ranks * own)  # from each rank, for each expert here
        dist.all_to_all_single(arriving, counts, [own] * ranks, self.held, self.group)
        arriving = arriving.view(ranks, own)
        send = torch.stack([part.sum() for part in counts.split(self.held)])
        # Here the CPU waits for a GPU, once in each layer.
        sizes = torch.cat([send, arriving.sum(dim=1), arriving.sum(dim=0)]).tolist()
        send, receive, loads = sizes[:ranks], sizes[ranks : 2 * ranks], sizes[2 * ranks :]

        arrived = Exchange.apply(rows[order // self.top], send, receive, self.group)
        arrived.requires_grad_(torch.is_grad_enabled())  # with frozen experts, too
        back = Exchange.apply(self.run_experts(arrived, arriving, loads), receive, send, self.group)
        outputs = back[order.argsort()].unflatten(0, chosen.shape) * weights.unsqueeze(2)
        dist.all_reduce(counts, group=self.group)  # each expert's share of the group's tokens
        shares = (counts.double() / counts.sum()).to(probabilities.dtype)
        balance = len(shares) * (shares * probabilities.mean(dim=0)).sum()  # 1 if all is even
        return outputs.view(*tokens.shape[:-1], self.top, rows.shape[1]).sum(dim=-2), balance

    def run_experts(self, arrived, arriving, loads):
        """arrived: by sender, then by expert. arriving: (ranks, own experts); loads: its sums."""
        numbers = torch.arange(len(loads), device=arrived.device).repeat(len(arriving))
        numbers = numbers.repeat_interleave(arriving.flatten(), output_size=len(arrived))
        by_expert = numbers.argsort(stable=True)
        parts = arrived[by_expert].split(loads)
        # An expert without tokens runs, too: this gives a gradient of 0, and keeps the way back.
        outputs = [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
        return torch.cat(outputs)[by_expert.argsort()]


def names_of_experts(model):
    """Return the names of the parameters and buffers in model that this rank alone has."""
    return [
        name
        for path, mixture in model.named_modules()
        if isinstance(mixture, ExpertParallel)
        for named in (mixture.experts.named_parameters, mixture.experts.named_buffers)
        for name, _ in named(prefix=f"{path}.experts".lstrip("."))
    ]


def parameters_of_experts(model):
    """Return the parameters that this rank alone has. Call it before DDP() or torch.compile()."""
    names = set(names_of_experts(model))
    return [p for name, p in model.named_parameters() if name in names]


def rest_of(model, experts):
    """Return the other parameters. Call it after fully_shard() or DDP()."""
    known = set(experts)
    return [p for p in model.parameters() if p not in known]


def divide_by_ranks(experts):
    """The experts have a sum over all ranks' rows; FSDP2 and DDP have averaged the rest."""
    for p in experts:
        if p.grad is not None:  # None: frozen
            p.grad /= dist.get_world_size()


def clip_with_experts(model, experts, max_norm, group=None):
    """clip_grad_norm_ for a model whose experts are on the ranks of a group. Return the norm.

    experts: parameters that this rank alone has. All ranks must call it.
    """
    rest = rest_of(model, experts)
    norms = [
        get_total_norm([p.grad for p in part if p.grad is not None]).to(
            next(model.parameters()).device
        )
        for part in (experts, rest)
    ]
    others = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
    square = norms[0].to(others) ** 2  # of frozen experts, it is a 0 in float32
    dist.all_reduce(square, group=group)  # each rank has other experts: add up
    norm = (square + others**2).sqrt()  # the rest once
    for part in (experts, rest):  # tensors and DTensors apart
        clip_grads_with_norm_(part, max_norm, norm)
    return norm


def wrap(model):
    """The right way: FSDP2 leaves the experts alone."""
    experts = parameters_of_experts(model)
    for block in model.blocks:
        fully_shard(block, ignored_params=set(experts))
    fully_shard(model, ignored_params=set(experts))
    return model


def wrap_ddp(model):
    """Right, too. The function is private, but torch has no public one. Just before DDP()."""
    DDP._set_params_and_buffers_to_ignore_for_model(model, names_of_experts(model))
    return DDP(model)


def clip_alone(model, experts, max_norm):
    """Wrong on several ranks: each has another norm, so the copies of the rest drift apart."""
    return clip_grad_norm_(model.parameters(), max_norm)


class SkipsIdleExperts(ExpertParallel):
    """Wrong: if no row arrives, this cuts the graph, and backward() leaves out the exchanges."""

    def run_experts(self, arrived, *sizes):
        return super().run_experts(arrived, *sizes) if len(arrived) else torch.empty_like(arrived)


def train(model, inputs, targets, wrapper=wrap, divide=divide_by_ranks, clip=None):
    """The right way, unless you ask for another one."""
    experts = parameters_of_experts(model)
    model = wrapper(model)
    groups = [{"params": experts}, {"params": rest_of(model, experts)}]
    optimizer = torch.optim.AdamW(groups, foreach=True)  # as it is on a GPU by default
    outputs, balance = model(inputs)
    (mse_loss(outputs, targets) + 0.01 * balance).backward()
    divide(experts)
    if clip:
        clip(model, experts, MAX_NORM)
    optimizer.step()


def main():
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        raise SystemExit("start it with: torchrun --standalone --nproc-per-node=4 ...")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    log(f"{2 * ranks} experts, a token goes to 2 of them, {ROWS} tokens on each of {ranks} ranks")
    log("gradient off by                      experts   router     rest")
    right = [
        off_by("FSDP2 around the rest", clip=clip_with_experts),
        off_by("DDP around the rest", clip=clip_with_experts, wrapper=wrap_ddp),
        off_by(f"{2 * ranks + 1} experts, the last 3 idle", experts=2 * ranks + 1, idle=3),
    ]
    copies = off_by("DDP around all", wrapper=DDP)
    sums = off_by("experts not divided by the ranks", divide=lambda experts: None)
    alone = off_by("clipped by each rank's own norm", wrapper=wrap_ddp, clip=clip_alone)
    waiting = wait_in_vain(ranks)
    log(f"idle experts skipped: forward works; in backward(), ranks {waiting} wait in vain")
    right = [x < 1e-12 for row in right for x in row]  # False for a nan, too
    claims = {
        "the right ways have the gradient of one process": all(right),
        "not divided, they are wrong by the ranks": abs(sums[0] - (ranks - 1)) < 1e-9,
        "DDP around all, or own norms, are wrong": copies[0] > 0.1 and min(alone) > 1e-3,
        f"all ranks but the idle one wait, and not {waiting}": waiting == [*range(ranks - 1)],
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")
    log("experts, router and rest have the gradient of one process")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def off_by(name, experts=None, idle=0, **way):
    """Return how far the gradients of experts, router and rest are off. way: what is not right."""
    experts = experts or 2 * dist.get_world_size()
    whole, model = (Model(kind, experts, idle).double() for kind in (OneProcess, ExpertParallel))
    train(
        whole,
        *rows_of(*range(dist.get_world_size())),
        wrapper=lambda model: model,
        divide=lambda experts: None,
        clip=clip_alone if "clip" in way else None,
    )
    train(model, *rows_of(dist.get_rank()), **way)
    expected = {key: p.grad for key, p in whole.named_parameters()}
    squares = torch.zeros(3, 2, dtype=torch.float64)  # of differences, of gradients
    for key, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        part = 0 if ".experts." in key else 1 if "router." in key else 2
        squares[part, 0] += (grad - expected[key]).square().sum()
        squares[part, 1] += expected[key].square().sum()
    dist.all_reduce(squares)
    off = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
    log(f"{name:<34}" + "".join(f"  {part:.1e}" for part in off))
    return off


def wait_in_vain(ranks):
    """Return which ranks fail, if a rank whose experts are idle leaves out the backward pass."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = Model(SkipsIdleExperts, 2 * ranks + 1, idle=3, group=group).double()
    inputs, targets = rows_of(dist.get_rank())
    loss, failed = mse_loss(model(inputs)[0], targets), torch.zeros(ranks)
    try:
        loss.backward()
    except RuntimeError:  # "Timed out waiting ..." or "Connection closed by peer ..."
        failed[dist.get_rank()] = 1
    dist.destroy_process_group(group)  # a timeout has broken it
    dist.all_reduce(failed)
    return failed.nonzero().flatten().tolist()


class OneProcess(nn.Module):
    """The same mixture, for one process that has all experts: to compare with."""

    def __init__(self, width, experts, top, new_expert):
        super().__init__()
        self.top, self.router = top, nn.Linear(width, experts)
        self.experts = nn.ModuleDict({str(n): new_expert(n) for n in range(experts)})

    def forward(self, tokens):
        probabilities = self.router(tokens).softmax(dim=1)
        weights, chosen = probabilities.topk(self.top, dim=1)
        outputs = balance = 0
        for n, expert in enumerate(self.experts.values()):
            its = chosen == n
            outputs = outputs + (weights * its).sum(dim=1, keepdim=True) * expert(tokens)
            balance = balance + its.double().mean() * probabilities[:, n].mean()
        return outputs, len(self.experts) * balance


class Model(nn.Module):  # yours. idle: so many of the last experts get no token
    def __init__(self, mixture, experts, idle, **options):
        super().__init__()
        torch.manual_seed(SEED)
        mixture = mixture(WIDTH, experts, 2, new_expert, **options)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), mixture])
        mixture.router.bias.data[experts - idle :] = -100

    def forward(self, tokens):
        return self.blocks[1](self.blocks[0](tokens))


def new_expert(number):
    """Your expert. Each rank makes others: that must not change what the CPU draws next."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + 1 + number)
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def rows_of(*ranks):
    torch.manual_seed(SEED)  # every rank makes the rows of all
    rows = torch.randn(2, dist.get_world_size(), ROWS, WIDTH, dtype=torch.float64)
    return rows[:, ranks].flatten(1, 2)


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
