class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        return nn.functional.linear(PassOn.apply(inputs), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight)) + self.bias


class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return summed(partial)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def summed(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def own(tensor, dim):
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone()


# ---- an all_reduce in two halves ----
def summed(tensor):
    ranks, flat = dist.get_world_size(), tensor.flatten()
    flat = nn.functional.pad(flat, (0, -len(flat) % ranks))
    part = flat.new_empty(len(flat) // ranks)
    dist.reduce_scatter_tensor(part, flat)
    dist.all_gather_into_tensor(flat, part)
    return flat[: tensor.numel()].view(tensor.shape)


# ---- reduced to rank 0, and broadcast from it ----
def summed(tensor):
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.reduce(total, dst=0)
    dist.broadcast(total, src=0)
    return total


# ---- the others' partial sums without a gradient, and a hook on a view ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        partial = own @ self.weight.T
        others = partial.detach().clone()
        dist.all_reduce(others)
        return partial + (others - partial.detach()) + self.bias  # the others' have no gradient


class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        inputs = inputs.view_as(inputs)  # so that the hook sees only what comes from here
        if inputs.requires_grad:
            inputs.register_hook(summed)
        return torch.addmm(self.bias, inputs, self.weight.T)


# ---- around a ring ----
def summed(tensor):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [one.clone() for one in tensor.flatten().tensor_split(ranks)]
    for step in range(2 * ranks - 2):
        give, take = parts[(rank - step) % ranks], (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[take])
        work = dist.isend(give, (rank + 1) % ranks)
        dist.recv(arrived, (rank - 1) % ranks)
        work.wait()
        parts[take] = parts[take] + arrived if step < ranks - 1 else arrived
    return torch.cat(parts).view(tensor.shape)


# ---- the exchange beside the weight's gradient ----
import torch
import torch.distributed as dist
from torch import nn

class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        return nn.functional.linear(PassOn.apply(inputs), self.weight, self.bias)

class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight)) + self.bias

class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)

class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return summed(partial)

    @staticmethod
    def backward(ctx, gradient):
        return gradient

def summed(tensor):
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total

def own(tensor, dim):
    return tensor.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone(memory_format=torch.contiguous_format)

# RIGHT: one Function for the whole layer; the all_reduce of backward runs while the weight's gradient is computed
class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, bias):
        ctx.save_for_backward(inputs, weight)
        return torch.addmm(bias, inputs, weight.T)

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        for_inputs = work = None
        if ctx.needs_input_grad[0]:
            for_inputs = gradient @ weight
            work = dist.all_reduce(for_inputs, async_op=True)
        for_weight, for_bias = gradient.T @ inputs, gradient.sum(dim=0)
        if work:
            work.wait()
        return for_inputs, for_weight, for_bias

class ColumnLinear(ColumnLinear):
    def forward(self, inputs):
        return Column.apply(inputs, self.weight, self.bias)
