"""The check of exercises/14_zero_3.py."""

import time

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, case, expect
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef  # private; only to count bytes
from torch.utils._pytree import tree_leaves

ROWS, SHAPES = 2, [(101, 71), (93, 101), (83, 93), (91, 83)]  # few are multiples of N


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    sizes = [8 * -(-weight.numel() // world_size) for weight in weights]  # bytes of the parts
    most = sum(sizes) + 8 * weights[0].numel() // 2  # parts, and activations: less than a layer
    alive, worst = Alive(sum(sizes)), 0
    with alive:
        layers = [answer.ShardedLinear(weight.detach().clone()) for weight in weights]
        alive.look("once the layers are made", most)
    alive.check()
    check_parts(layers, weights)
    for step in range(2):
        rows = torch.randn(world_size, ROWS, SHAPES[0][1], dtype=torch.float64)
        given = torch.randn(world_size, ROWS, SHAPES[-1][0], dtype=torch.float64)
        right = all_rows = rows.clone().requires_grad_()
        for weight in weights:
            right = torch.tanh(right @ weight.T / 10)
        right.backward(given / world_size)  # the mean of the ranks' losses
        outputs = inputs = rows[rank].clone().requires_grad_()
        there = 2.0 * step  # in step 1, there is a gradient from before, as in accumulation
        for layer in layers:
            layer.part.grad = torch.full_like(layer.part, there) if step else None
        with alive:
            alive.calls = []
            for number, layer in enumerate(layers):
                outputs = layer(outputs)
                alive.look(f"after the forward pass of layer {number}", most)
                expect(
                    outputs.requires_grad,
                    f"autograd does not see layer {number}",
                    "where a pass is written by hand: torch.autograd.Function, and .apply()",
                )
                outputs = torch.tanh(outputs / 10)
                # When the gradient comes here, the layers behind have finished their backward.
                outputs.register_hook(
                    lambda _, after=number + 1: alive.look(
                        f"in the backward pass, before that of layer {after - 1}",
                        most + sum(sizes[after:]),
                    )
                )
            off = (outputs - right[rank]).abs().max().item()
            expect(
                off < 1e-9,
                f"the output of step {step + 1} is off by {off:.1e}",
                "gather the parts of all ranks, in order, without what fills them up",
                "the parts change in each step: gather them in each forward pass",
            )
            outputs.backward(given[rank])
            del outputs
            alive.look("after the backward pass", most + sum(sizes))
        alive.check()
        worst = max(worst, off, gradients_off(layers, weights, inputs, all_rows, there))
        sent, enough = alive.bytes_sent(), 3 * (world_size - 1) * sum(sizes)
        expect(
            sent >= sum(sizes),
            f"the two passes together send {sent} bytes, and this rank's parts have {sum(sizes)}",
            "the other ranks need them",
        )
        expect(
            sent <= enough + 64,
            f"the two passes together send {sent} bytes, and 3 (N - 1) / N"
            f" of the weights are {enough}",
            "how often is a layer gathered? Which rank needs which part of the gradient?",
            "two times all_gather, and one reduce_scatter",
        )
        with torch.no_grad():
            for part in [*(layer.part for layer in layers), *weights]:
                part -= 0.1 * part.grad
                part.grad = None
    look_at_two_passes()
    return (
        f"off by {worst:.0e}, {sum(sizes)} bytes of weights on a rank, not"
        f" {8 * sum(weight.numel() for weight in weights)}, {sent} bytes sent in a step"
    )


def look_at_two_passes():
    """Two forward passes come before the backward passes, on inputs that need no gradient, as data.
    And on 3 ranks the last part is all zeros."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weight = torch.randn(2, 2, dtype=torch.float64)
    rows, given = torch.randn(2, 2, world_size, ROWS, 2, dtype=torch.float64)
    with case(f"a weight of {weight.numel()} numbers"):
        layer = answer.ShardedLinear(weight.clone())
    check_parts([layer], [weight])
    for order in (0, 1), (1, 0):
        look_at_order(layer, rows[:, rank], given, order, (given.mT @ rows).sum(dim=(0, 1)))


def look_at_order(layer, rows, given, order, right):
    """Two forward passes, then their backward passes in this order. right: the sum of gradients."""
    layer.part.grad, rank, world_size = None, dist.get_rank(), dist.get_world_size()
    outputs = [layer(its.clone()) for its in rows]
    expect(
        all(one.requires_grad for one in outputs),
        "if the inputs need no gradient, as the data"
        " of a first layer, then autograd does not see the layer, and its part learns nothing",
        "the part needs a gradient, too: is it an argument of .apply()? (A reentrant checkpoint"
        " looks at the inputs alone)",
    )
    for number in order:
        outputs[number].backward(given[number, rank])
    right = own_part(right / world_size)
    expect(
        layer.part.grad is not None,
        "if the inputs need no gradient, the part has none",
        "the part needs a gradient, too: is it an argument of .apply()?",
    )
    off = (layer.part.grad[: len(right)] - right).abs().sum().item()
    expect(
        off < 1e-9,
        "after two forward passes, and then both backward passes, the gradient of"
        f" the part is off by {off:.1e}",
        "each backward pass needs the inputs of its own"
        " forward pass: ctx keeps them, and an attribute of the layer has those of the last one",
    )


def own_part(weight):
    """Return the numbers of a weight that are this rank's. The last rank has fewer."""
    size = -(-weight.numel() // dist.get_world_size())
    return weight.detach().flatten()[dist.get_rank() * size :][:size]


def check_parts(layers, weights):
    for number, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        part, right = getattr(layer, "part", None), own_part(weight)
        expect(
            isinstance(part, nn.Parameter),
            f"layer {number} has no nn.Parameter self.part",
            "self.part = nn.Parameter(...)",
        )
        shape = (-(-weight.numel() // dist.get_world_size()),)
        expect(
            part.shape == shape,
            f"the part of layer {number} has the shape {tuple(part.shape)}, not {shape}",
            "fill up the flat weight with zeros to a multiple of N, then cut",
        )
        expect(
            torch.equal(part[: len(right)], right),
            f"the part of layer {number} has other numbers than this rank's share of the weight",
            "number i of the flat weight belongs to rank i // (length of a part)",
        )
        expect(
            not part[len(right) :].any(),
            f"what fills up the part of layer {number} is not zero",
            "torch.nn.functional.pad fills up with zeros",
        )


def gradients_off(layers, weights, inputs, all_rows, there):
    """Return by how much the gradients of the inputs and of the parts are off, at most.

    there: what each number of the parts' gradients was before.
    """
    expect(
        inputs.grad is not None,
        "the inputs have no gradient",
        "backward returns a gradient for each argument of forward",
    )
    right = all_rows.grad[dist.get_rank()] * dist.get_world_size()  # of the rank's own loss
    worst = (inputs.grad - right).abs().max().item()
    expect(
        worst < 1e-9,
        f"the gradient of the inputs is off by {worst:.1e}",
        "the rows are this rank's own: their gradient is exchanged with nobody",
    )
    for number, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        what, right = f"the gradient of layer {number}'s part", own_part(weight.grad)
        expect(
            layer.part.grad is not None,
            f"layer {number}'s part has no gradient",
            "backward returns a gradient for each argument of forward",
        )
        found, fill = (layer.part.grad - there).split([len(right), len(layer.part) - len(right)])
        expect(
            not there or not torch.allclose(found + there, right),
            f"{what} has taken the place of the one that was there",
            "autograd adds up what backward() returns: return it, and leave .grad alone",
        )
        times, off = (found.norm() / right.norm()).item(), (found - right).abs().max().item()
        expect(
            off < 1e-9 or (found - right).std() > 1e-9,
            f"{what} is right, but the one that was there before has changed",
            "take the mean before you add: what divides .grad"
            " afterwards divides also what was there",
        )
        same_direction = (found / times - right).norm() / right.norm() < 1e-6
        expect(
            off < 1e-9 or not same_direction,
            f"{what} is {times:.2f} times the mean",
            "reduce_scatter adds up. What turns a sum into a mean? Do it once.",
        )
        expect(
            off < 1e-9,
            f"{what} is off by {off:.1e}",
            "the mean is over the gradients that all ranks have for this part",
            "does the gradient have the weight's shape, (out, in), before you make it flat? And"
            " with async_op=True, the sum is there when wait() returns",
        )
        expect(
            not fill.any(),
            f"what fills up {what} is not zero",
            "which numbers does the"
            " reduce_scatter add up there? torch.empty does not clear what it gets",
        )
        worst = max(worst, off)
    return worst


class Alive(Exchanges):
    """Counts exchanges, and the bytes of what was made inside the "with" and still exists."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.made, self.seen = parts, set(), []  # parts: the bytes of those of a rank

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(call, types, args, kwargs)
        given, came = (
            {
                StorageWeakRef(tensor.untyped_storage())
                for tensor in tree_leaves(one)
                if torch.is_tensor(tensor)
            }
            for one in (args, result)
        )
        self.made |= came - given  # a view has the storage of what was given
        return result

    def look(self, where, most):
        """Note how many bytes are there. If there are more than most, look again for a while."""
        if any(kept > enough for _, kept, enough in self.seen):
            return  # check() names the first
        for _ in range(50):  # Gloo's thread lets go of a tensor a little later
            storages = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self.made)
            kept = sum(storage.nbytes() for storage in storages if storage is not None)
            if kept <= most:
                break
            time.sleep(0.005)
        self.seen.append((where, kept, most))

    def check(self):
        for where, kept, most in self.seen:
            expect(
                kept <= most,
                f"{where}, this rank keeps {kept} bytes: its parts have"
                f" {self.parts} (at most {most} may be kept here)",
                "which whole weights or whole gradients are still there, and what holds them?"
                " Is a part a slice that holds the whole?",
                "what backward needs can be gathered again. A tensor saved for it, an attribute,"
                " or a slice that is no clone keeps it alive",
            )
