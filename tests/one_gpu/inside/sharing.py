"""Processes that share a GPU: what Gloo can exchange, and how much memory each takes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from one_gpu.inside.models import DEVICE, Net, error_of, gradients, make_batch, off


def gloo_with_two_ranks():
    """Two ranks on GPU 0 by Gloo: DDP's gradient, and each collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = make_batch()
    plain, model = Net().to(DEVICE), DDP(Net().to(DEVICE), gradient_as_bucket_view=True)
    nn.functional.mse_loss(plain(inputs), targets).backward()
    nn.functional.mse_loss(model(inputs[rank::world_size]), targets[rank::world_size]).backward()
    said = {name: error_of(call) for name, call in collectives(rank, world_size).items()}
    return {
        "DDP's gradient off by": off(gradients(model), gradients(plain)),
        "work": ", ".join(name for name, text in said.items() if text == "no error"),
        "fail": {name: text for name, text in said.items() if text != "no error"},
    }


def collectives(rank, world_size):
    """{name: a function that calls it}, with tensors on the device."""
    one = torch.full((4,), rank + 1.0, device=DEVICE)
    many = [torch.zeros(4, device=DEVICE) for _ in range(world_size)]
    wide = torch.zeros(4 * world_size, device=DEVICE)
    return {
        "all_reduce": lambda: dist.all_reduce(one.clone()),
        "broadcast": lambda: dist.broadcast(one.clone(), 0),
        "reduce": lambda: dist.reduce(one.clone(), 0),
        "all_gather": lambda: dist.all_gather(many, one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, one),
        "reduce_scatter": lambda: dist.reduce_scatter(one.clone(), many),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one.clone(), wide),
        "all_to_all_single": lambda: dist.all_to_all_single(wide, wide.clone()),
        "gather": lambda: dist.gather(one, many if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(one.clone(), many if rank == 0 else None, 0),
        "barrier": dist.barrier,
        "send, recv": lambda: dist.send(one, 1) if rank == 0 else dist.recv(one.clone(), 0),
    }


def memory_of_a_process():
    """MB that this process takes of the GPU: with a context and a tensor, and with NCCL."""
    torch.ones(1, device=DEVICE)
    before = megabytes_used()
    dist.all_reduce(torch.ones(1, device=DEVICE))
    return {"MB with a tensor": before, "MB after NCCL's first collective": megabytes_used()}


def megabytes_used():
    """MB of GPU 0 that all processes have taken."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    return round((total - free) / 1e6)
