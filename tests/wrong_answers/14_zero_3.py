class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape

    def forward(self, inputs):
        return Layer.apply(inputs, self.part, self.shape)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        for_part = scattered(gradient.T @ inputs) / dist.get_world_size()
        return gradient @ gathered(part, ctx.shape), for_part, None


def cut(weight):
    return padded(weight).chunk(dist.get_world_size())[dist.get_rank()].clone()


def padded(weight):
    return nn.functional.pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))


def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, part.detach())
    return whole[: shape.numel()].view(shape)


def scattered(gradient):
    whole = padded(gradient)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, whole)
    return part


# ---- autograd keeps the whole weights: after the forward pass of layer 0, this rank keeps ----
from torch.nn.functional import pad


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, shape):
        whole = part.new_empty(len(part) * dist.get_world_size())
        dist.all_gather_into_tensor(whole, part.detach())
        return whole[: shape.numel()].view(shape)

    @staticmethod
    def backward(ctx, gradient):
        ranks = dist.get_world_size()
        gradient = pad(gradient.flatten(), (0, -gradient.numel() % ranks))
        part = gradient.new_empty(len(gradient) // ranks)
        dist.reduce_scatter_tensor(part, gradient)
        return part / ranks, None


class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.shape, ranks = weight.shape, dist.get_world_size()
        parts = pad(weight.flatten(), (0, -weight.numel() % ranks)).chunk(ranks)
        self.part = nn.Parameter(parts[dist.get_rank()].clone())

    def forward(self, inputs):
        return inputs @ Gather.apply(self.part, self.shape).T


# ---- saved for backward: after the forward pass of layer 0, this rank keeps ----
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        whole = gathered(part, shape)
        ctx.save_for_backward(inputs, whole)
        return inputs @ whole.T

    @staticmethod
    def backward(ctx, gradient):
        inputs, whole = ctx.saved_tensors
        return gradient @ whole, scattered(gradient.T @ inputs) / dist.get_world_size(), None


# ---- a view kept: once the layers are made, this rank keeps \d+ bytes: its parts have \d+ ----
def cut(weight):
    return padded(weight).chunk(dist.get_world_size())[dist.get_rank()]


# ---- gathered once and kept: after the forward pass of layer 0, this rank keeps ----
class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape

    def forward(self, inputs):
        self.whole = gathered(self.part, self.shape)
        return Layer.apply(inputs, self.part, self.shape)


# ---- gathered for backward, and kept: in the backward pass, before that of layer 2, this rank keeps ----
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        for_part = scattered(gradient.T @ inputs) / dist.get_world_size()
        part.whole = gathered(part, ctx.shape)
        return gradient @ part.whole, for_part, None


# ---- summed, not averaged: part is 2.00 times the mean ----
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        for_part = scattered(gradient.T @ inputs)
        return gradient @ gathered(part, ctx.shape), for_part, None


# ---- hard-coded for two ranks: 3 ranks: .* part is 1.50 times the mean ----
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        for_part = scattered(gradient.T @ inputs) / 2
        return gradient @ gathered(part, ctx.shape), for_part, None


# ---- nothing exchanged in backward: part is off by ----
def scattered(gradient):
    whole = padded(gradient)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    return whole.chunk(dist.get_world_size())[dist.get_rank()] * dist.get_world_size()


# ---- an all_reduce of the gradient: the two passes together send ----
def scattered(gradient):
    whole = padded(gradient)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    dist.all_reduce(whole)
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


# ---- the gradient of the inputs averaged: the gradient of the inputs is off ----
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        for_part = scattered(gradient.T @ inputs) / dist.get_world_size()
        for_inputs = gradient @ gathered(part, ctx.shape)
        dist.all_reduce(for_inputs)
        return for_inputs / dist.get_world_size(), for_part, None


# ---- the rest dropped: has the shape \(\d+,\), not ----
def padded(weight):
    ranks = dist.get_world_size()
    return weight.flatten()[: weight.numel() // ranks * ranks]


# ---- gathered when the layer is made: the output of step 2 is off by ----
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape, start):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(torch.tensor(start, dtype=part.dtype), shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        for_part = scattered(gradient.T @ inputs) / dist.get_world_size()
        return gradient @ gathered(part, ctx.shape), for_part, None, None


class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape
        self.start = self.part.tolist()

    def forward(self, inputs):
        return Layer.apply(inputs, self.part, self.shape, self.start)


# ---- without autograd: autograd does not see layer 0 ----
class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.shape, ranks = weight.shape, dist.get_world_size()
        padded = nn.functional.pad(weight.flatten(), (0, -weight.numel() % ranks))
        self.part = nn.Parameter(padded.chunk(ranks)[dist.get_rank()].clone())

    @torch.no_grad()
    def forward(self, inputs):
        whole = self.part.new_empty(len(self.part) * dist.get_world_size())
        dist.all_gather_into_tensor(whole, self.part)
        return inputs @ whole[: self.shape.numel()].view(self.shape).T


# ---- filled up with ones: what fills up the part of layer 0 is not zero ----
def padded(weight):
    return nn.functional.pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()), value=1)


# ---- the gradient's end not cleared: what fills up the gradient of layer .* is not zero ----
def scattered(gradient):
    fill = -gradient.numel() % dist.get_world_size()
    whole = nn.functional.pad(gradient.flatten(), (0, fill), value=7.0)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, whole)
    return part


# ---- the gradient set by hand: has taken the place of the one that was there ----
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs)
        ctx.part, ctx.shape = part, shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        [inputs] = ctx.saved_tensors
        ctx.part.grad = scattered(gradient.T @ inputs) / dist.get_world_size()
        return gradient @ gathered(ctx.part, ctx.shape), None, None


# ---- a gradient for each rank gathered: the two passes together send ----
def scattered(gradient):
    whole = padded(gradient)
    all_of_them = whole.new_empty(dist.get_world_size() * len(whole))
    dist.all_gather_into_tensor(all_of_them, whole)
    return all_of_them.view(-1, len(whole)).sum(dim=0).chunk(dist.get_world_size())[dist.get_rank()].clone()


# ---- the parts in single precision: the output of step 1 is off by ----
def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size()).float()
    dist.all_gather_into_tensor(whole, part.detach().float())
    return whole[: shape.numel()].view(shape).double()


# ---- a reentrant checkpoint: autograd does not see the layer ----
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

def cut(weight):
    return padded(weight.detach()).chunk(dist.get_world_size())[dist.get_rank()].clone()

def padded(weight):
    return pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))

def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, part.detach())
    return whole[: shape.numel()].view(shape)

def scattered(gradient):
    whole = padded(gradient)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, whole)
    return part

# WRONG: where inputs need no gradient (the first layer, on data), a reentrant checkpoint gives none to part
from torch.utils.checkpoint import checkpoint

class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape

    def forward(self, inputs):
        return checkpoint(self.run, inputs, use_reentrant=True)

    def run(self, inputs):
        return nn.functional.linear(inputs, Whole.apply(self.part, self.shape))

class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, shape):
        return gathered(part, shape)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient) / dist.get_world_size(), None


# ---- the part is no argument: autograd does not see the layer ----
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

def cut(weight):
    return padded(weight.detach()).chunk(dist.get_world_size())[dist.get_rank()].clone()

def padded(weight):
    return pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))

def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, part.detach())
    return whole[: shape.numel()].view(shape)

def scattered(gradient):
    whole = padded(gradient)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, whole)
    return part

# WRONG: same: autograd knows nothing of part, so with inputs that need no gradient there is no backward
class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape

    def forward(self, inputs):
        return Layer.apply(inputs, self)

class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, layer):
        ctx.save_for_backward(inputs)
        ctx.layer = layer
        return inputs @ gathered(layer.part, layer.shape).T

    @staticmethod
    def backward(ctx, gradient):
        [inputs], layer = ctx.saved_tensors, ctx.layer
        for_inputs = gradient @ gathered(layer.part, layer.shape)
        for_part = scattered(gradient.T @ inputs) / dist.get_world_size()
        if layer.part.grad is None:
            layer.part.grad = for_part
        else:
            layer.part.grad += for_part
        return for_inputs, None


# ---- the inputs in an attribute: after two forward passes, .* is off by ----
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

def cut(weight):
    return padded(weight.detach()).chunk(dist.get_world_size())[dist.get_rank()].clone()

def padded(weight):
    return pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))

def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, part.detach())
    return whole[: shape.numel()].view(shape)

def scattered(gradient):
    whole = padded(gradient)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, whole)
    return part

# WRONG: the inputs of the last forward pass only: two forward passes before the backward passes (micro-batches, a shared layer)
class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape

    def forward(self, inputs):
        self.inputs = inputs.detach()
        return Layer.apply(inputs, self.part, self)

class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, layer):
        ctx.layer = layer
        return inputs @ gathered(part, layer.shape).T

    @staticmethod
    def backward(ctx, gradient):
        layer = ctx.layer
        for_inputs = gradient @ gathered(layer.part, layer.shape)
        return for_inputs, scattered(gradient.T @ layer.inputs) / dist.get_world_size(), None


# ---- chunk, of few numbers: in the case 'a weight of 4 numbers', an ex(?s:.*)IndexError: tuple index out of range ----
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

def cut(weight):
    return padded(weight.detach()).chunk(dist.get_world_size())[dist.get_rank()].clone()

def padded(weight):
    return pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))

def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, part.detach())
    return whole[: shape.numel()].view(shape)

def scattered(gradient):
    whole = padded(gradient)
    part = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, whole)
    return part

# WRONG for weights of few numbers (4 on 3 ranks): unpadded chunk. (the docstring says zeros fill up the last part)
def cut(weight):
    ranks, flat = dist.get_world_size(), weight.detach().flatten()
    size = -(-len(flat) // ranks)
    part = flat.chunk(ranks)[dist.get_rank()]
    return torch.cat([part, part.new_zeros(size - len(part))])

class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape

    def forward(self, inputs):
        return Layer.apply(inputs, self.part, self.shape)

class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        return gradient @ gathered(part, ctx.shape), scattered(gradient.T @ inputs) / dist.get_world_size(), None


# ---- divided after it was added: is right, but the one that was there before has changed ----
def divide(part):
    part.grad /= dist.get_world_size()


class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.part, self.shape = nn.Parameter(cut(weight)), weight.shape
        self.part.register_post_accumulate_grad_hook(divide)

    def forward(self, inputs):
        return Layer.apply(inputs, self.part, self.shape)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        return gradient @ gathered(part, ctx.shape), scattered(gradient.T @ inputs), None


# ---- the inputs on a stack of the layer: after two forward passes, .* is off by ----
from torch import nn
from torch.nn.functional import pad


class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        parts = padded(weight.detach()).chunk(dist.get_world_size())
        self.part, self.shape = nn.Parameter(parts[dist.get_rank()].clone()), weight.shape
        self.stack = []

    def forward(self, inputs):
        return Layer.apply(inputs, self.part, self)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, part, layer):
        ctx.save_for_backward(part)
        ctx.layer = layer
        layer.stack.append(inputs.detach())
        return inputs @ gathered(part, layer.shape).T

    @staticmethod
    def backward(ctx, gradient):
        (part,), inputs = ctx.saved_tensors, ctx.layer.stack.pop()
        for_inputs = gradient @ gathered(part, ctx.layer.shape)  # whole for this line only
        for_part = torch.empty_like(part)
        dist.reduce_scatter_tensor(for_part, padded(gradient.T @ inputs))
        return for_inputs, for_part / dist.get_world_size(), None


def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, part.detach())
    return whole[: shape.numel()].view(shape)


def padded(weight):
    return pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))
