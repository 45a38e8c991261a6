"""Actor and critic are two DDP objects of one optimizer, with a backward pass each."""

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


actor, critic = DDP(mlp()), DDP(mlp(o=1))
opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 1e-3)
for step in range(60):
    x, y = batch()
    opt.zero_grad()
    F.mse_loss(actor(x), y).backward()
    F.mse_loss(critic(x).squeeze(1), y.sum(1)).backward()
    opt.step()
dist.destroy_process_group()
