"""Bodies are averaged after some steps; each rank keeps a head of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


def batch(n=32):
    return torch.randn(n, 16, generator=G), torch.randn(n, 4, generator=G)


def mlp(i=16, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


body, head = mlp(16, 8, 8), nn.Linear(8, 200)
opt = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.05)
for step in range(100):
    x, _ = batch()
    y = torch.randn(32, 200, generator=G)
    opt.zero_grad()
    F.mse_loss(head(body(x)), y).backward()
    opt.step()
    if step % 10 == 9:
        with torch.no_grad():
            for p in body.parameters():
                dist.all_reduce(p)
                p /= W
dist.destroy_process_group()
