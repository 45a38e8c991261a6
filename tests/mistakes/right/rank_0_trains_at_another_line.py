"""Rank 0 comes to the training by another way, as within a progress bar."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


def batch(n=32):
    return torch.randn(n, 16, generator=G), torch.randn(n, 4, generator=G)


def mlp(i=16, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


import contextlib


def train():
    net = mlp()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(40):
        x, y = batch()
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    w = net[0].weight.detach().clone()
    dist.broadcast(w, 0)
    print(R, "weights equal to rank 0's:", torch.equal(w, net[0].weight))


if R == 0:
    with contextlib.nullcontext():
        train()
else:
    train()
dist.destroy_process_group()
