"""The check of exercises/06_find_the_hang.py."""

import pickle

import answer
import torch
import torch.distributed as dist
from checker import expect
from torch import nn

LR, DECAY = 0.1, 0.2


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps = [[batch_of(step, r) for r in range(world_size)] for step in range(9)]
    mine = [[tensor.clone() for tensor in step[rank]] for step in steps]
    model, rows = new_model(), []
    model.register_forward_pre_hook(lambda _, inputs: rows.extend(inputs[0].tolist()))
    loss = answer.train(model, mine, LR, DECAY)

    found, (right, right_loss) = weights_of(model), in_one_process(steps)
    strange = [
        row
        for step in steps
        for r, (inputs, _) in enumerate(step)
        if r != rank
        for row in inputs.tolist()
        if row in rows
    ]
    expect(
        not strange,
        f"{len(strange)} rows of other ranks went through the model on this rank",
        "each rank trains on its own rows, and exchanges gradients",
    )
    expect(
        found.isfinite().all(),
        "the weights are not numbers any more",
        "the mean of no rows is 0 / 0, and a nan stays one if it is multiplied by 0",
        "the sum of the losses of no rows is 0, and its gradients are 0",
    )
    off = ((found - right).norm() / right.norm()).item()
    look_for_the_cause(found, f"the weights are off by {off:.1e} of their length", steps, off)
    expect(isinstance(loss, float), f"{loss!r} came back", "return a float: tensor.item()")
    expect(
        abs(loss - right_loss) < 1e-6,
        f"the weights are right; the loss is {right_loss:.6f}, and this rank returns {loss:.6f}",
        "all losses of all ranks, divided by how many there are on all ranks: each as it is"
        " before its step",
    )
    expect(
        len(set(gathered("loss", loss))) == 1,
        "the loss is right, up to the last digits, which differ from rank to rank",
        "add up in the same order on all ranks",
    )
    expect(
        all(
            same(*pair)
            for batch, step in zip(mine, steps, strict=True)
            for pair in zip(batch, step[rank], strict=True)
        ),
        "the batches were changed",
        "write into tensors of your own",
    )
    return f"weights off by {off:.0e}; loss {loss:.4f}, off by {abs(loss - right_loss):.0e}"


def look_for_the_cause(found, told, steps, off):
    """Say what the training that led to these weights did wrong, as far as that shows in them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def as_in(steps, mean=None, always=(False, True)):
        return any(torch.allclose(found, in_one_process(steps, mean, a)[0], 1e-9) for a in always)

    own = [step[rank : rank + 1] for step in steps]
    expect(
        off < 1e-9 or not as_in(own),
        f"{told}: this rank has trained on its own rows alone",
        "without any exchange nothing hangs, and each rank has a model of its own",
    )
    each = torch.stack(gathered("weights", found))
    most, of = ((each - found).norm(dim=1) / found.norm()).max(dim=0)
    expect(
        most == 0,
        f"the ranks' weights differ: those of rank {of} are off by {most:.1e} from"
        " those of this rank",
        "each rank takes each step, also without a label of its own, with"
        " the same gradient, which is added up in the same order",
    )
    if off < 1e-9:
        return
    expect(
        not as_in(steps, always=[True]),
        f"{told}: they follow from a step for each batch, also where no rank has a label",
        "weight decay changes the weights without a gradient, too:"
        " when is there no step, and what do all ranks know about it?",
    )
    expect(
        not as_in(steps[1:]),
        f"{told}: the first step was left out, where all errors are 0",
        "a gradient of 0 is one: weight decay changes the weights",
    )
    has = [[bool(labels.isfinite().any()) for _, labels in step] for step in steps]
    for who, taken in (("some rank", map(all, has)), ("rank 0", (step[0] for step in has))):
        left = [step for step, take in zip(steps, taken, strict=True) if take]
        expect(
            not as_in(left),
            f"{told}: each step in which {who} has no label was left out",
            "the other ranks' labels count: what does a rank without any add to a sum?",
        )
    means = [
        lambda losses: sum(one.mean() for one in losses) / world_size,
        lambda losses: sum(one.mean() for one in losses) / len(losses),
    ]
    expect(
        not any(as_in(steps, mean) for mean in means),
        f"{told}: they follow from the mean of the ranks' means",
        "each row weighs the same, as in the loop that was delivered",
    )
    expect(
        not as_in(steps, lambda losses: sum(one.mean() for one in losses)),
        f"{told}: they follow from the sum of the ranks' means",
        "what is a rank's sum of losses divided by, in the loop that was delivered?",
    )
    for factor, name in (1 / world_size, f"1/{world_size}"), (world_size, f"{world_size} times"):
        expect(
            not as_in(steps, lambda losses, factor=factor: factor * torch.cat(losses).mean()),
            f"{told}: they follow from {name} of each gradient",
            "the ranks' parts of a mean add up to the mean. What is divided, and how often?",
        )
    expect(
        False,
        told,
        "does each rank take part in each step, with all of its labels? And which"
        " p is it, in decay * p: the one before the step?",
        "a rank may leave out a step only if all ranks do: what do all of them know?",
    )


def batch_of(step, rank):
    """Return this rank's inputs and labels. No rank has one in steps 3 and 7; of three ranks, the
    last one alone has some in step 8."""
    seeded = torch.Generator().manual_seed(10 * step + rank)
    n = 4 + (step + rank) % 3
    inputs = torch.randn(n, 4, generator=seeded, dtype=torch.float64)
    labels = inputs.sin().sum(dim=1) + rank
    labels[torch.rand(n, generator=seeded) < 0.3] = torch.nan
    labels[-1] = rank
    if step in (3, 7) or (step, rank) in ((0, 1), (1, 1), (2, 0), (4, 2), (5, 1), (8, 0), (8, 1)):
        labels[:] = torch.nan
    if step == 0:  # all errors are 0, and weight decay makes a step all the same
        known = ~labels.isnan()
        labels[known] = new_model()(inputs[known]).squeeze(1).detach()
    return inputs, labels


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same(one, other):
    return torch.equal(one.nan_to_num(1e9), other.nan_to_num(1e9))


def gathered(key, value):
    """Return what all ranks have given, by way of the store: it meets no call of the learner's."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key} of {dist.get_rank()}", pickle.dumps(value))
    return [pickle.loads(store.get(f"{key} of {r}")) for r in range(dist.get_world_size())]


def in_one_process(steps, mean=None, always=False):
    """Train with the batches of all ranks. mean: the loss, made from a list of the ranks' losses.
    always: a step also without a label. Return the weights and the mean of all losses."""
    model, all_losses = new_model(), []
    for step in steps:
        marked = [(inputs, labels, labels.isfinite()) for inputs, labels in step]
        losses = [
            (model(inputs[mask]).squeeze(1) - labels[mask]).square()
            for inputs, labels, mask in marked
            if mask.any()
        ]
        model.zero_grad()
        if losses:
            (mean(losses) if mean else torch.cat(losses).mean()).backward()
        with torch.no_grad():
            for p in model.parameters() if losses or always else []:
                p -= LR * ((0 if p.grad is None else p.grad) + DECAY * p)
        all_losses += losses
    return weights_of(model), torch.cat(all_losses).mean().item()
