import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad


class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        parts = padded(weight.detach()).chunk(dist.get_world_size())
        self.part, self.shape = nn.Parameter(parts[dist.get_rank()].clone()), weight.shape

    def forward(self, inputs):
        return Layer.apply(inputs, self.part, self.shape)


class Layer(torch.autograd.Function):
    # autograd would save the whole weight for the backward pass: here it saves the part. Three
    # exchanges of (N - 1) / N each, where DDP needs two: ZeRO's stage 3 sends half as much again.
    # FSDP2 (torch.distributed.fsdp.fully_shard) does this with hooks around any module. It cuts
    # each parameter by rows, gathers the next layer while one computes, and a layer is what you
    # wrap: a whole block, so that the exchanges are few and large.
    @staticmethod
    def forward(ctx, inputs, part, shape):
        ctx.save_for_backward(inputs, part)
        ctx.shape = shape
        return inputs @ gathered(part, shape).T

    @staticmethod
    def backward(ctx, gradient):
        inputs, part = ctx.saved_tensors
        for_inputs = gradient @ gathered(part, ctx.shape)  # whole for this line only
        for_part = torch.empty_like(part)
        dist.reduce_scatter_tensor(for_part, padded(gradient.T @ inputs))
        return for_inputs, for_part / dist.get_world_size(), None


def gathered(part, shape):
    whole = part.new_empty(len(part) * dist.get_world_size())
    dist.all_gather_into_tensor(whole, part.detach())
    return whole[: shape.numel()].view(shape)


def padded(weight):
    return pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))
