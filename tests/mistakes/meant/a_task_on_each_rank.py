"""Each rank trains a task of its own: its head is its own, outside DDP."""

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


body = DDP(mlp(16, 32, 16))
head = nn.Linear(16, 4)
opt = torch.optim.Adam([*body.parameters(), *head.parameters()], 1e-3)
for step in range(60):
    x, y = batch()
    opt.zero_grad()
    F.mse_loss(head(body(x)), y).backward()
    opt.step()
    if step % 20 == 0:
        l = torch.tensor([float(step)])
        dist.all_reduce(l)
dist.destroy_process_group()
