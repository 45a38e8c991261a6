"""The check of exercises/15_tensor_parallel.py."""

import warnings

import answer
import torch
import torch.distributed as dist
from checker import Waiting, bytes_kept, expect
from torch import nn

ROWS, IN, HIDDEN, OUT = 5, 6, 13, 4  # 13 hidden units: no multiple of the number of ranks


def trial():
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(ROWS, IN, dtype=torch.float64)
    given = torch.randn(ROWS, OUT, dtype=torch.float64)  # the gradient of the output
    whole = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((HIDDEN, IN), (HIDDEN,), (OUT, HIDDEN), (OUT,))
    ]
    all_inputs, inputs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    right = mlp(all_inputs, *whole)
    elsewhere = all_inputs.square().sum()  # the inputs are used twice, as in x + mlp(x)
    torch.autograd.backward([right, elsewhere], [given, None])
    slices = own_slices(*whole)
    alone = rows.clone().requires_grad_()  # what comes out without an exchange
    partial = mlp(alone, *slices) - slices[3]
    torch.autograd.backward([partial, alone.square().sum()], [given, None])
    right, partial = right.detach(), partial.detach()

    before = bytes_kept()
    given_to_them = [one.detach().clone() for one in whole]
    first = answer.ColumnLinear(*given_to_them[:2])
    second = answer.RowLinear(*given_to_them[2:])
    for one in given_to_them:
        one += 1  # it belongs to the caller, who may go on with it
    del one, given_to_them
    kept, share = bytes_kept() - before, sum(one.nbytes for one in slices)
    names = [
        "ColumnLinear's weight",
        "ColumnLinear's bias",
        "RowLinear's weight",
        "RowLinear's bias",
    ]
    mine = [getattr(layer, name, None) for layer in (first, second) for name in ("weight", "bias")]
    for name, found, expected in zip(names, mine, slices, strict=True):
        expect(
            isinstance(found, nn.Parameter),
            f"{name} is no nn.Parameter",
            "self.weight = nn.Parameter(...), and self.bias",
        )
        expect(
            found.shape == expected.shape,
            f"{name} has the shape {tuple(found.shape)}, and"
            f" {tuple(expected.shape)} is this rank's",
            hint_on_shape(name, found, expected),
            "torch.tensor_split(weight, N) for the first, and with dim=1 for the second",
        )
        expect(
            torch.equal(found, expected) or torch.equal(found, expected + 1),
            f"{name} has other numbers than this rank's slice",
            "each rank has the whole bias" if name == names[3] else "rank r has slice r",
        )
    expect(
        kept <= share + 64,
        f"this rank keeps {kept} bytes, and its slices have {share}",
        "what still holds the whole weights?",
        "a slice keeps the whole tensor that it is cut from: clone it",
    )
    for name, found, expected in zip(names, mine, slices, strict=True):
        expect(
            torch.equal(found, expected),
            f"{name} changes with the tensor that was given: it is no copy",
            "nn.Parameter(tensor) takes the tensor itself, or a view: clone it",
        )

    with Waiting() as forward:
        used = inputs * 1  # made by a step before, as in a model
        output = second(torch.tanh(first(used)))
    forward.look_for_waits("in the forward pass,")
    expect(
        output.shape == right.shape,
        f"the output has the shape {tuple(output.shape)}, not {tuple(right.shape)}",
        "add up what the ranks have: it has one shape on all",
    )
    bias = whole[3].detach()
    for what, wrong in {
        "what this rank's hidden units give, without the others": partial + bias,
        f"right, but for a bias that was added {world_size} times": right + (world_size - 1) * bias,
        "right, but for the bias, which is not there": right - bias,
        "the mean over the ranks, not the sum": (right - bias) / world_size + bias,
    }.items():
        expect(
            not torch.allclose(output, wrong),
            f"the output is {what}",
            "a hidden unit adds something to each number of the output. The bias, how often?",
        )
    off = (output - right).abs().max().item()
    expect(
        off < 1e-9,
        f"the output is off by {off:.1e}",
        "a sum over hidden units is a sum over ranks, of each rank's sum",
    )
    check_exchanges("forward", forward, "the output", ROWS * OUT * 8)

    with Waiting() as backward, warnings.catch_warnings(record=True) as warned:
        torch.autograd.backward([output, used.square().sum()], [given, None])
    backward.look_for_waits("in the backward pass,")
    for name, found, expected in zip(
        names, mine, own_slices(*(one.grad for one in whole)), strict=True
    ):
        off = max(off, gradient_off(name, found.grad, expected))
    expect(
        inputs.grad is None or not torch.allclose(inputs.grad, alone.grad),
        "the gradient of the inputs is that of this rank's hidden units, without the others",
        "the inputs go to the hidden units of all ranks",
        "forward: pass on as it is; backward: all_reduce. A torch.autograd.Function can do this",
    )
    twice = all_inputs.grad + (world_size - 1) * 2 * rows
    expect(
        inputs.grad is None or not torch.allclose(inputs.grad, twice),
        "the gradient of the inputs is added up, and with it what comes to them from elsewhere"
        " (as in x + mlp(x))",
        "a hook on the inputs sees all of their gradient",
        "forward: pass on as it is; backward: all_reduce. A torch.autograd.Function can do this",
    )
    if inputs.grad is not None:  # without what comes from elsewhere
        inputs.grad -= 2 * rows
    off = max(off, gradient_off("the inputs", inputs.grad, all_inputs.grad - 2 * rows))
    check_exchanges("backward", backward, "the inputs' gradient", ROWS * IN * 8)
    bad = [str(one.message) for one in warned if "silently incorrect" in str(one.message)]
    expect(
        not bad,
        f"PyTorch warns: {''.join(bad[:1]).partition(' This behavior')[0]}",
        "autograd does not know the collective, and today the gradient is right by chance: put"
        " the exchange into a torch.autograd.Function",
    )
    of_data = second(torch.tanh(first(rows)))  # rows need no gradient, as data, if it is the 1st
    of_data.backward(given)
    expect(
        torch.allclose(of_data, right),
        "where the inputs need no gradient, the output is wrong",
        "data need none",
    )
    return (
        f"off by {off:.0e}, {kept} bytes on a rank, not {sum(one.nbytes for one in whole)},"
        f" {forward.bytes_sent()} bytes sent forward, {backward.bytes_sent()} backward"
    )


def hint_on_shape(name, found, expected):
    if name == "RowLinear's bias":
        return "it belongs to no hidden unit"
    # Cut on the right side, but not where tensor_split cuts: few rows or columns more or less.
    sizes = zip(found.shape, expected.shape, strict=False)
    if found.ndim == expected.ndim and all(abs(one - other) < HIDDEN // 3 for one, other in sizes):
        return f"{HIDDEN} hidden units over N ranks: torch.tensor_split says who has one more"
    return "which side of it are the hidden units?"


def mlp(inputs, weight, bias, second_weight, second_bias):
    return torch.tanh(inputs @ weight.T + bias) @ second_weight.T + second_bias


def own_slices(weight, bias, second_weight, second_bias):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [
        weight.detach().tensor_split(world_size)[rank].clone(),
        bias.detach().tensor_split(world_size)[rank].clone(),
        second_weight.detach().tensor_split(world_size, dim=1)[rank].clone(),
        second_bias.detach().clone(),
    ]


def gradient_off(name, found, right):
    expect(
        found is not None,
        f"there is no gradient for {name}",
        "does autograd know the way from the output to it, on this rank, too?",
        "what rank 0 alone adds, rank 0 alone learns",
    )
    times, off = (found.norm() / right.norm()).item(), (found - right).abs().max().item()
    same_direction = (found / times - right).norm() / right.norm() < 1e-6
    expect(
        off < 1e-9 or not same_direction,
        f"the gradient for {name} is {times:.2f} times that of one process",
        "what is divided here by the number of ranks?"
        if times < 1
        else "all ranks have the same gradient of the output: shall it be added up?",
        "where forward adds up, backward passes on; where forward passes on, backward adds up",
    )
    expect(
        off < 1e-9,
        f"the gradient for {name} is off by {off:.1e}",
        "which gradients does each rank have whole already, and which only in part?",
    )
    return off


def check_exchanges(way, exchanges, what, size):
    sent, times = exchanges.bytes_sent(), len(exchanges.calls)
    most = round(2 * (dist.get_world_size() - 1) / dist.get_world_size() * size)
    expect(sent > 0, f"the {way} pass sends nothing", "what does a rank know that the others need?")
    expect(
        sent <= most + 64,
        f"the {way} pass sends {sent} bytes, in {times}"
        f" exchange{'s' * (times > 1)}, and an all_reduce of {what} sends {most}",
        "exchange what is smallest: not weights, and not hidden units",
        "a rank needs the sum over the ranks, and not what each of them adds to it",
    )
