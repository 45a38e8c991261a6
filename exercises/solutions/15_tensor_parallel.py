import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear


class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        return linear(PassOn.apply(inputs), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(linear(own, self.weight)) + self.bias  # once, behind the sum


# Megatron's f and g: each is the other's backward pass. AddUp's backward passes on, as all ranks
# compute the same loss, and so have the whole gradient of the output already. To add it up, as
# torch.distributed.nn.all_reduce does, would be right for losses that are added up, too. torch's
# ColwiseParallel and RowwiseParallel get both from DTensor: a sum still to come is Partial there,
# and what all ranks have alike is Replicate.
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
    parts = tensor.detach().tensor_split(dist.get_world_size(), dim)
    return parts[dist.get_rank()].clone(memory_format=torch.contiguous_format)
