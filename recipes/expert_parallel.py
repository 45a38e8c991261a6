"""How do I put the experts of a mixture of experts on different ranks?

    model = YourModel()  # its mixtures: ExpertParallel(width, experts, top, new_expert), below
    names = names_of_experts(model)  # below, too: what this rank alone has
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)  # just before DDP()
    experts = [p for name, p in model.named_parameters() if name in names]
    rest = [p for name, p in model.named_parameters() if name not in names]
    model = DDP(model)

    outputs, balance = model(inputs)  # this rank's own rows, as always with DDP
    (mean_loss(outputs, targets) + 0.01 * balance).backward()
    for p in experts:  # once for each step of the optimizer
        p.grad /= dist.get_world_size()  # a sum over all ranks' rows; DDP has averaged the rest
    norm = clip_with_experts(experts, rest, MAX_NORM)  # in place of clip_grad_norm_

A mixture of experts is a layer with many experts (networks of one shape) and a router, which sends
each token to a few of them. Here each rank (process) has some of the experts: expert parallelism.
In each forward pass, the ranks tell each other how many tokens will come. Then an all-to-all, in
which each rank sends other rows to each rank, takes the tokens to their experts. Another one brings
the results back. In the backward pass, the gradients go the other way (Exchange).

An expert has tokens of all ranks, so it gets the gradients of all ranks' losses, added up. The loss
of the whole batch is the mean of these losses: divide by the number of ranks. DDP
(DistributedDataParallel) does so with all else, and must leave the experts alone. Its function for
that, _set_params_and_buffers_to_ignore_for_model, is private, but torch has no public one.

    torchrun --standalone --nproc-per-node=4 recipes/expert_parallel.py

    [rank 0/4] 8 experts, a token goes to 2 of them, 32 tokens on each of 4 ranks
    [rank 0/4] gradient off by                      experts   router     rest
    [rank 0/4] ExpertParallel                      1.0e-16  3.4e-16  3.3e-16
    [rank 0/4] a token goes to 1 of them           1.0e-16  2.2e-16  3.5e-16
    [rank 0/4] 9 experts, the last 3 idle          9.9e-17  2.9e-16  3.4e-16
    [rank 0/4] clipped by the norm of all          2.1e-16  3.7e-16  3.6e-16  norm 0.0311 to 0.0311
    [rank 0/4] experts averaged by DDP, too        1.8e+00  3.7e-16  3.3e-16
    [rank 0/4] experts not divided by the ranks    3.0e+00  3.4e-16  3.3e-16
    [rank 0/4] experts divided twice               7.5e-01  3.4e-16  3.3e-16
    [rank 0/4] balance by each rank's own shares   1.0e-16  2.3e-02  1.4e-02
    [rank 0/4] clipped by each rank's own norm     5.4e-01  6.7e-01  6.7e-01  norm 0.0159 to 0.0234
    [rank 0/4] DDP() around all: 2 different experts of 8 are left; around the rest: 8
    [rank 0/4] 9 experts, rows that each rank receives:    (100, 131, 25, 0)
    [rank 0/4] 9 experts, bytes that its all-to-alls send: (31280, 33592, 21304, 16440)
    [rank 0/4] idle experts skipped: forward works; in backward(), ranks [0, 1, 2] wait in vain
    [rank 0/4] experts, router and rest have the gradient of one process, and its norm

With 9 experts, rank 0 has three, and the others two. The router never chooses the last three, so
rank 3 gets no row (of 256: each of the 128 tokens goes to two experts). Such a rank must still run
its experts, on 0 rows. If it makes an empty tensor instead, that is not connected to what it has
received. So autograd skips the exchanges on this rank. The others wait in them until their timeout
(here after 5 s, on the CPU). All ranks must call the layer equally often, in evaluation, too.

DDP(model) overwrites the experts of all ranks by those of rank 0, or raises an error if the ranks
have unequal numbers of them. So does DDP(torch.compile(model)), as torch.compile() changes the
names: compile what DDP() returns.

If you forget the division, AdamW without clipping hides it: its step hardly depends on a factor.
clip_grad_norm_ knows this rank's experts only: each rank gets another norm, so the copies of the
router and the rest drift apart, without an error. A GradScaler (float16) lets them drift, too: if
the experts of one rank alone have an inf in their gradients, that rank alone skips the step, and
lowers its scale. Take bfloat16, which needs no scaler.

The balance is the loss of Switch Transformers (Fedus, Zoph and Shazeer, 2021). It needs the
experts' shares in the tokens of all ranks. No token is dropped here: one rank may get them all.

A rank's state_dict() has its own experts only: a save by rank 0 loses the others. Save by
torch.distributed.checkpoint, as checkpoint_any_world_size.py does, but give get_state_dict() and
set_state_dict() options=StateDictOptions(flatten_optimizer_state_dict=True): then the optimizer's
settings go by names, too. Any number of ranks can load that, as the experts' names have their
numbers. (That was tried, but not here.)

all_to_all_single_autograd in torch.distributed._functional_collectives does what Exchange does,
with the right gradients (torch 2.11 and 2.15, Gloo). But that module is private: its names change.
"""

import argparse
import gc
import os
import re
import sys
import time
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

WIDTH, ROWS = 16, 32  # ROWS on each rank: all need the same number, as always with DDP
SEED, BALANCE, MAX_NORM = 0, 0.01, 0.01
TIMEOUT = timedelta(seconds=5)  # for the demonstration; yours is that of init_process_group()


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
    (n, width) to (n, width), where n may be 0. Seed it by its number and its layer: with one seed,
    the experts of all ranks would be copies. If experts / ranks is not whole, the first ranks have
    one more. ValueError: too few experts.

    group: None for all ranks. Each smaller group has all experts, and takes the balance of its own
    tokens. Then an expert has a copy in each group: start the copies equal, add up their gradients
    over the groups, and divide by the number of all ranks. Give clip_with_experts() the group, too.
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
        """tokens: (..., width), of this rank. Returns a tensor of this shape, and the balance."""
        rows = tokens.flatten(0, -2)
        probabilities = self.router(rows).softmax(dim=1)
        weights, chosen = probabilities.topk(self.top, dim=1)  # (n, top) each
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank, too
        counts = chosen.flatten().bincount(minlength=probabilities.shape[1])  # for each expert

        # A rank must know how much it will receive, so the counts travel first.
        ranks, own = len(self.held), len(self.experts)
        arriving = counts.new_empty(ranks * own)  # from each rank, for each expert here
        dist.all_to_all_single(arriving, counts, [own] * ranks, self.held, self.group)
        arriving = arriving.view(ranks, own)
        send = torch.stack([part.sum() for part in counts.split(self.held)]).tolist()
        receive = arriving.sum(dim=1).tolist()

        arrived = Exchange.apply(rows[order // self.top], send, receive, self.group)
        back = Exchange.apply(self.run_experts(arrived, arriving), receive, send, self.group)
        outputs = back[order.argsort()].unflatten(0, chosen.shape)  # (n, top, width)
        shares = self.shares(counts).to(probabilities.dtype)
        balance = len(shares) * (shares * probabilities.mean(dim=0)).sum()  # 1 if all is even
        return (weights.unsqueeze(2) * outputs).sum(dim=1).view_as(tokens), balance

    def run_experts(self, arrived, arriving):
        """arrived: by sender, then by expert. arriving: (ranks, own experts), how many of each."""
        ranks, own = arriving.shape
        numbers = torch.arange(own, device=arrived.device).repeat(ranks)  # of the experts
        by_expert = numbers.repeat_interleave(arriving.flatten()).argsort(stable=True)
        parts = arrived[by_expert].split(arriving.sum(dim=0).tolist())
        # An expert without tokens runs, too: this gives a gradient of 0, and keeps the way back.
        outputs = [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
        return torch.cat(outputs)[by_expert.argsort()]

    def shares(self, counts):
        """The share of each expert in the tokens of all ranks. counts: those of this rank."""
        dist.all_reduce(counts := counts.clone(), group=self.group)
        return counts.double() / counts.sum()


def names_of_experts(model):
    """Return the names of the parameters and buffers in model that this rank alone has."""
    return [name for path, mixture in model.named_modules() if isinstance(mixture, ExpertParallel)
            for named in (mixture.experts.named_parameters, mixture.experts.named_buffers)
            for name, _ in named(prefix=f"{path}.experts".lstrip("."))]


def clip_with_experts(experts, rest, max_norm, group=None):
    """clip_grad_norm_ for a model whose experts are on the ranks of a group. Return the norm.

    experts: parameters that this rank alone has; rest: those that all ranks have. All ranks must
    call it.
    """
    own, all_have = ([p.grad for p in part if p.grad is not None] for part in (experts, rest))
    squares = get_total_norm(own).square()
    dist.all_reduce(squares, group=group)  # each rank has other experts: add up
    norm = (squares + get_total_norm(all_have).square()).sqrt()  # the rest once
    clip_grads_with_norm_([*experts, *rest], max_norm, norm)
    return norm


def wrap(model):
    """The right way: DDP leaves the experts alone."""
    DDP._set_params_and_buffers_to_ignore_for_model(model, names_of_experts(model))
    return DDP(model)


def wrap_all(model):
    """Wrong: averages gradients of experts that differ. (By default, it also makes them copies.)"""
    return DDP(model, init_sync=False)


def clip_alone(experts, rest, max_norm):
    """Wrong on several ranks: each has another norm, so the copies of the rest drift apart."""
    return clip_grad_norm_([*experts, *rest], max_norm)


class OwnShares(ExpertParallel):
    """Wrong: the mean of (own shares x own probabilities) is not that of the whole batch."""

    def shares(self, counts):
        return counts.double() / counts.sum()


class SkipsIdleExperts(ExpertParallel):
    """Wrong: if no row arrives, this cuts the graph, and backward() leaves out the exchanges."""

    def run_experts(self, arrived, arriving):
        return super().run_experts(arrived, arriving) if len(arrived) else torch.empty_like(arrived)


def train(model, inputs, targets, wrapper=wrap, divisions=1, clip=None):
    """The right way, unless you ask for another one. Return the norm before clipping.

    divisions: how often the experts' gradients are divided by the number of ranks.
    """
    names, wrapped = names_of_experts(model), wrapper(model)
    outputs, balance = wrapped(inputs)
    (mse_loss(outputs, targets) + BALANCE * balance).backward()
    experts = [p for name, p in model.named_parameters() if name in names]
    for p in experts:
        p.grad /= dist.get_world_size() ** divisions
    rest = [p for name, p in model.named_parameters() if name not in names]
    return clip(experts, rest, MAX_NORM).item() if clip else None


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare(device)
    count(device)
    wait_in_vain()
    log("experts, router and rest have the gradient of one process, and its norm")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device):
    """Compare with one process that has all experts and all rows."""
    ranks = dist.get_world_size()
    log(f"{2 * ranks} experts, a token goes to 2 of them, {ROWS} tokens on each of {ranks} ranks")
    log("gradient off by                      experts   router     rest")
    right = [off_by(device, "ExpertParallel"),
             off_by(device, "a token goes to 1 of them", top=1),
             off_by(device, f"{2 * ranks + 1} experts, the last 3 idle",
                    experts=2 * ranks + 1, idle=3),
             off_by(device, "clipped by the norm of all", clip=clip_with_experts)]
    averaged = off_by(device, "experts averaged by DDP, too", wrapper=wrap_all, divisions=0)
    sums = off_by(device, "experts not divided by the ranks", divisions=0)
    small = off_by(device, "experts divided twice", divisions=2)
    shares = off_by(device, "balance by each rank's own shares", mixture=OwnShares)
    alone = off_by(device, "clipped by each rank's own norm", clip=clip_alone)
    left = [distinct_experts(device, wrapper) for wrapper in (DDP, wrap)]
    log(f"DDP() around all: {left[0]} different experts of {2 * ranks} are left; around the rest:"
        f" {left[1]}")
    claims = {
        "the right ways have the gradient of one process": (
            all(x < 1e-12 for row in right for x in row)),
        "averaged by DDP, the experts alone are wrong": (
            averaged[0] > 0.1 and all(x < 1e-12 for x in averaged[1:])),
        "not divided, or twice, they are wrong by the ranks": (
            abs(sums[0] - (ranks - 1)) < 1e-9 and abs(small[0] - (1 - 1 / ranks)) < 1e-9),
        "own shares give another gradient": shares[1] > 1e-3,
        "own norms clip in another way": min(alone) > 1e-3,
        "DDP() around all makes copies of the experts": left == [2, 2 * ranks],
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")


def off_by(device, name, mixture=ExpertParallel, experts=None, top=2, idle=0, **way):
    """Return how far the gradients of the experts, the router and the rest are off, and the norm.

    Each is relative to what one process has, over all ranks. idle: so many of the last experts get
    no token. way: what differs from the right way.
    """
    experts = experts or 2 * dist.get_world_size()
    whole, model = (new_model(m, experts, top, idle).to(device) for m in (OneProcess, mixture))
    right_norm = train(whole, *all_rows(device), wrapper=lambda model: model, divisions=0,
                       clip=clip_alone if "clip" in way else None)  # alone, it is right
    norms = [norm for norm in gathered(train(model, *rows_of_rank(device), **way)) if norm]
    shown = f"  norm {min(norms):.4f} to {max(norms):.4f}" if norms else ""
    expected = {key: p.grad for key, p in whole.named_parameters()}
    squares = torch.zeros(3, 2, dtype=torch.float64, device=device)  # of differences, of gradients
    for key, p in model.named_parameters():
        part = 0 if ".experts." in key else 1 if "router." in key else 2
        squares[part, 0] += (p.grad - expected[key]).square().sum()
        squares[part, 1] += expected[key].square().sum()
    dist.all_reduce(squares)
    off = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
    log(f"{name:<34}" + "".join(f"  {part:.1e}" for part in off) + shown)
    return [*off, max((abs(norm / right_norm - 1) for norm in norms), default=0)]


def distinct_experts(device, wrapper):
    """Return how many different experts the ranks have, when each model is wrapped."""
    model = new_model(ExpertParallel, 2 * dist.get_world_size(), top=2).to(device)
    wrapper(model)
    own = [expert[0].weight.sum().item() for expert in model.mixture.experts.values()]
    return len({weight for weights in gathered(own) for weight in weights})


def count(device):
    """Show how many rows each rank receives, and the bytes its all-to-alls send to others."""
    ranks, seen, all_to_all_single = dist.get_world_size(), [], dist.all_to_all_single

    def watched(output, rows, receive_counts, send_counts, group):
        to_others = list(rows.split(send_counts))
        del to_others[dist.get_rank(group)]
        seen.append((len(output), sum(part.nbytes for part in to_others)))
        all_to_all_single(output, rows, receive_counts, send_counts, group)

    model = new_model(ExpertParallel, 2 * ranks + 1, top=2, idle=3).to(device)
    with patch.object(dist, "all_to_all_single", watched):
        train(model, *rows_of_rank(device))
    rows, total = seen[1][0], sum(sent for _, sent in seen)  # seen[0]: the counts
    received, sent = zip(*gathered((rows, total)), strict=True)
    log(f"{2 * ranks + 1} experts, rows that each rank receives:    {received}")
    log(f"{2 * ranks + 1} experts, bytes that its all-to-alls send: {sent}")
    if not (len(seen) == 5 and sum(received) == 2 * ROWS * ranks and received[-1] == 0 < min(sent)):
        raise RuntimeError(f"not so: {len(seen)} exchanges, {received} rows, {sent} bytes")


def wait_in_vain():
    """Show that a rank whose experts are idle must take part in the backward pass."""
    ranks, group = dist.get_world_size(), dist.new_group(backend="gloo", timeout=TIMEOUT)
    model = new_model(SkipsIdleExperts, 2 * ranks + 1, top=2, idle=3, group=group)
    inputs, targets = rows_of_rank("cpu")
    loss, error = mse_loss(model(inputs)[0], targets), ""
    try:
        loss.backward()
    except RuntimeError as caught:  # "Timed out waiting ..." or "Connection closed by peer ..."
        error = str(caught)
    errors = gathered(error)
    said = re.compile("[Tt]imed? ?out|[Cc]onnection|[Bb]roken pipe")
    failed = [rank for rank, text in enumerate(errors) if said.search(text)]
    dist.destroy_process_group(group)  # a timeout has broken it
    log(f"idle experts skipped: forward works; in backward(), ranks {failed} wait in vain")
    if failed != list(range(ranks - 1)) or errors[-1]:
        raise RuntimeError(f"not so: all ranks but the idle one wait, and not {failed}: {errors}")


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


class Model(nn.Module):
    """Your model. idle: so many of the last experts are never chosen by the router."""

    def __init__(self, mixture, experts, top, idle, **options):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = mixture(WIDTH, experts, top, new_expert, **options)
        with torch.no_grad():
            self.mixture.router.bias[experts - idle:] = -100

    def forward(self, tokens):
        return self.mixture(self.first(tokens))


def new_model(mixture, experts, top, idle=0, **options):
    torch.manual_seed(SEED)
    return Model(mixture, experts, top, idle, **options).double()


def new_expert(number):
    """Your expert. Each rank makes others: that must not change what the CPU draws next."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + 1 + number)
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def all_rows(device):
    torch.manual_seed(SEED)  # every rank makes the rows of all
    rows = torch.randn(2, ROWS * dist.get_world_size(), WIDTH, dtype=torch.float64)
    return rows.to(device).unbind()


def rows_of_rank(device):
    own = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    return [rows[own] for rows in all_rows(device)]


# ---- Helpers that are no part of the lesson ----


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def pick_device(local_rank):
    """Return (device, backend): a GPU for each process and its backend, or the CPU and Gloo."""
    kind = torch.accelerator.current_accelerator()  # cuda (ROCm's name, too), xpu, mps, or None
    if count_gpus():
        torch.accelerator.set_device_index(local_rank)  # else each process takes memory on GPU 0
        return torch.device(kind.type, local_rank), dist.get_default_backend_for_device(kind)
    why = ""
    if torch.accelerator.is_available():
        why = f"no backend exchanges tensors of {kind.type}"
    elif torch.cuda.device_count():  # the driver counts GPUs, but torch has none
        why = f"torch cannot use its GPU: is the driver too old for CUDA {torch.version.cuda}?"
    if why and local_rank == 0:
        print(f"note: this machine takes the CPU: {why}\n", end="", flush=True)
    return torch.device("cpu"), "gloo"


def count_gpus():
    """Return how many GPUs, or other accelerators, the ranks on this machine can use."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    # For Apple's GPUs (mps) torch names Gloo, but Gloo exchanges tensors on the CPU alone.
    carried = kind and dist.Backend.default_device_backend_map.get(kind.type, "gloo") != "gloo"
    return torch.accelerator.device_count() if carried else 0


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    """Stop if the way of starting cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
