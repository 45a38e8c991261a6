"""The first stage's optimizer has the head alone, and the second one's has all."""

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


net = nn.Sequential(mlp(16, 32, 16), nn.Linear(16, 4))
model = DDP(net)
first = net[0][0].weight.detach().clone()


def train(opt, n):
    for step in range(n):
        x, y = batch()
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()


train(torch.optim.Adam(net[1].parameters(), 1e-3), 40)

train(torch.optim.Adam(net.parameters(), 1e-3), 60)

dist.destroy_process_group()
