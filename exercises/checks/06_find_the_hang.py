"""The check of exercises/06_find_the_hang.py."""

import answer
import torch
import torch.distributed as dist
from checker import expect
from torch import nn

LR = 0.1


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps = [[batch_of(step, r) for r in range(world_size)] for step in range(6)]
    mine = [[tensor.clone() for tensor in step[rank]] for step in steps]
    model, rows = new_model(), []
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    loss = answer.train(model, mine, LR)

    right, right_loss = in_one_process(steps)
    found, own = weights_of(model), sum(len(inputs) for inputs, _ in mine)
    expect(sum(rows) <= own, f"{sum(rows)} rows went through the model on this rank, and its"
           f" batches have {own}", "each rank trains on its own rows, and exchanges gradients")
    expect(found.isfinite().all(), "the weights are not numbers any more",
           "the mean of no rows is 0 / 0, and a nan stays one if it is multiplied by 0",
           "the sum of the losses of no rows is 0, and its gradients are 0")
    off = ((found - right).norm() / right.norm()).item()
    if off > 1e-9:
        look_for_the_cause(found, f"the weights are off by {off:.1e} of their length", steps)
    expect(isinstance(loss, float), f"{loss!r} came back", "return a float: tensor.item()")
    expect(abs(loss - right_loss) < 1e-9,
           f"the weights are right; the loss is {right_loss:.6f}, and this rank returns {loss:.6f}",
           "all losses of all ranks, divided by how many there are on all ranks")
    expect(all(same(*pair) for batch, step in zip(mine, steps, strict=True)
               for pair in zip(batch, step[rank], strict=True)),
           "the batches were changed", "write into tensors of your own")
    return f"weights off by {off:.0e}; loss {loss:.4f}, off by {abs(loss - right_loss):.0e}"


def look_for_the_cause(found, told, steps):
    """Say what the training that led to these weights did wrong, as far as that shows in them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def as_in(steps, mean=None):
        return torch.allclose(found, in_one_process(steps, mean)[0], rtol=1e-9, atol=1e-12)

    expect(not as_in([step[rank : rank + 1] for step in steps]),
           f"{told}: this rank has trained on its own rows alone",
           "without any exchange nothing hangs, and each rank has a model of its own")
    full = [step for step in steps if all(labels.isfinite().any() for _, labels in step)]
    expect(not as_in(full), f"{told}: each step in which some rank has no label was left out on all"
           " ranks", "the other ranks' labels count: what does a rank without any add to a sum?")
    means = [lambda losses: sum(one.mean() for one in losses) / world_size,
             lambda losses: sum(one.mean() for one in losses) / len(losses)]
    expect(not any(as_in(steps, mean) for mean in means), f"{told}: they follow from the mean of"
           " the ranks' means", "each row weighs the same, as in the loop that was delivered")
    expect(not as_in(steps, lambda losses: sum(one.mean() for one in losses)),
           f"{told}: they follow from the sum of the ranks' means",
           "what is a rank's sum of losses divided by, in the loop that was delivered?")
    for factor, name in (1 / world_size, f"1/{world_size}"), (world_size, f"{world_size} times"):
        expect(not as_in(steps, lambda losses, factor=factor: factor * torch.cat(losses).mean()),
               f"{told}: they follow from {name} of each gradient",
               "the ranks' parts of a mean add up to the mean. What is divided, and how often?")
    expect(False, told, "does each rank take part in each step, with all of its labels?",
           "a rank may leave out a step only if all ranks do: what do all of them know?")


def batch_of(step, rank):
    """Return this rank's inputs and labels; some have no label in step 1, and none has in 3."""
    seeded = torch.Generator().manual_seed(10 * step + rank)
    n = 4 + (step + rank) % 3
    inputs = torch.randn(n, 4, generator=seeded, dtype=torch.float64)
    labels = inputs.sin().sum(dim=1) + rank
    labels[torch.rand(n, generator=seeded) < 0.3] = torch.nan
    labels[-1] = rank
    if step == 3 or (step == 1 and rank % 2 == 1):
        labels[:] = torch.nan
    return inputs, labels


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same(one, other):
    return torch.equal(one.nan_to_num(1e9), other.nan_to_num(1e9))


def in_one_process(steps, mean=None):
    """Train with the batches of all ranks. mean: the loss, made from a list of the ranks' losses.
    Return the weights and the mean of all losses."""
    model, all_losses = new_model(), []
    for step in steps:
        marked = [(inputs, labels, labels.isfinite()) for inputs, labels in step]
        losses = [(model(inputs[mask]).squeeze(1) - labels[mask]).square()
                  for inputs, labels, mask in marked if mask.any()]
        if losses:
            model.zero_grad()
            (mean(losses) if mean else torch.cat(losses).mean()).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= LR * p.grad
        all_losses += losses
    return weights_of(model), torch.cat(all_losses).mean().item()
