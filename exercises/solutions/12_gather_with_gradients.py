import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class Gather(torch.autograd.Function):
    # gradient is that of this rank's loss, for the rows of all ranks. reduce_scatter adds up each
    # rank's part over all ranks, and part r goes to rank r: the mirror image of all_gather. It
    # sends half of what an all_reduce sends. PyTorch's _AllGather, in torch.distributed.nn.
    # functional, does the same with NCCL. FSDP2 uses the pair for weights: all_gather in forward,
    # reduce_scatter in backward.
    @staticmethod
    def forward(ctx, rows):
        result = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(result, rows.contiguous())
        return result

    @staticmethod
    @once_differentiable  # a second derivative would be wrong
    def backward(ctx, gradient):
        own = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous())
        return own


def gather(rows):
    return Gather.apply(rows)
