"""How do I weigh the loss when micro-batches have different numbers of tokens (or rows)?

    tokens = sum((targets != -100).sum() for _, targets in micro_batches)  # -100: padding
    dist.all_reduce(tokens)  # now those of all ranks in this step
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            (loss * dist.get_world_size() / tokens).backward()

Gradient accumulation cuts the batch of a step into micro-batches (recipes/accumulate.py, also for
static_graph=True). Every token of the step should count the same, on whichever rank (process) and
in whichever micro-batch it is. So add up the losses, and divide by the number of all tokens.
Multiply by the world size (the number of ranks), because DistributedDataParallel (DDP) divides the
sum of the ranks' gradients by it.

    torchrun --standalone --nproc-per-node=2 recipes/unequal_micro_batches.py

    [rank 0/2] 3 micro-batches on each of 2 ranks, of 4 to 96 tokens; compared with one batch of 247
    [rank 0/2] sum over all tokens  gradient off by 2.8e-07
    [rank 0/2] mean of means        gradient off by 5.4e-01
    [rank 0/2] sum over own tokens  gradient off by 1.1e-01
    [rank 0/2] factor forgotten     gradient off by 5.0e-01
    [rank 0/2] sum over all tokens: the gradient of one batch, however the tokens are shared out

The last three are common mistakes, and nothing fails. A mean of means gives a token in a short
micro-batch more weight than one in a long micro-batch. Dividing by the rank's own tokens does the
same between ranks. How much that changes depends on the lengths. Without the factor world size,
the gradient is too small by that factor. To weigh rows, count len(inputs) instead of tokens. The
loss to report is weighed alike: its sum over all micro-batches and ranks, divided by all tokens.

Now write it yourself: exercises/02_mean_of_unequal_shares.py, then 08_accumulate.py.
"""

import contextlib
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO_BATCHES = 3  # on each rank
VOCABULARY, LONGEST = 50, 64
PADDING = -100  # cross_entropy leaves out targets of this value: its ignore_index


def sum_over_all_tokens(model, micro_batches):
    """The right way: the lines above.

    micro_batches: [(inputs, targets), ...], at least one on each rank; each (rows, length).
    """
    tokens = sum((targets != -100).sum() for _, targets in micro_batches)
    dist.all_reduce(tokens)  # of all ranks, before the first backward()
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            (loss * dist.get_world_size() / tokens).backward()  # DDP will divide by world_size


def mean_of_means(model, micro_batches):
    """Wrong: right only where all micro-batches have the same number of tokens."""
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = token_loss(model, inputs, targets, "mean")
            (loss / len(micro_batches)).backward()


def sum_over_own_tokens(model, micro_batches):
    """Wrong: right within a rank, but a token counts less on a rank that has more of them."""
    tokens = sum((targets != PADDING).sum() for _, targets in micro_batches)
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            (token_loss(model, inputs, targets, "sum") / tokens).backward()


def without_factor(model, micro_batches):
    """Wrong: the gradient points the right way, and is too small by the number of ranks."""
    tokens = sum((targets != PADDING).sum() for _, targets in micro_batches)
    dist.all_reduce(tokens)
    for i, (inputs, targets) in enumerate(micro_batches):
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            (token_loss(model, inputs, targets, "sum") / tokens).backward()


def token_loss(model, inputs, targets, reduction):
    scores = model(inputs)  # (rows, length, VOCABULARY)
    return cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction=reduction)


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare_weighings()
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_weighings():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    every_batch = make_micro_batches(MICRO_BATCHES * world_size)
    counts = [(targets != PADDING).sum().item() for _, targets in every_batch]
    log(
        f"{MICRO_BATCHES} micro-batches on each of {world_size} ranks, of {min(counts)} to"
        f" {max(counts)} tokens; compared with one batch of {sum(counts)}"
    )
    whole = new_language_model()  # one process, one batch
    token_loss(whole, *map(torch.cat, zip(*every_batch, strict=True)), "mean").backward()
    expected = flat_gradient(whole)
    off = {}
    for name, way in [
        ("sum over all tokens", sum_over_all_tokens),
        ("mean of means", mean_of_means),
        ("sum over own tokens", sum_over_own_tokens),
        ("factor forgotten", without_factor),
    ]:
        model = DDP(new_language_model())
        way(model, every_batch[rank::world_size])
        off[name] = ((flat_gradient(model) - expected).norm() / expected.norm()).item()
        log(f"{name:<19}  gradient off by {off[name]:.1e}")
    if not off.pop("sum over all tokens") < 1e-5:
        raise RuntimeError("the sum over all tokens does not give the gradient of one batch")
    if not all(value > 0.01 for value in off.values()):
        raise RuntimeError("the mistakes do not show what this file says")
    log("sum over all tokens: the gradient of one batch, however the tokens are shared out")


def make_micro_batches(count):
    """Your text as tokens: rows of different lengths, padded. Here the same list on every rank."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(1, count + 1):
        longest = 2 + int((LONGEST - 2) * (number / count) ** 2)
        inputs = torch.randint(VOCABULARY, (2, LONGEST), generator=generator)
        targets = (inputs + 1) % VOCABULARY  # what the model has to learn
        targets[0, longest:] = PADDING
        targets[1, longest // 2 :] = PADDING  # a shorter row
        batches.append((inputs, targets.to()))
    return batches


def new_language_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
