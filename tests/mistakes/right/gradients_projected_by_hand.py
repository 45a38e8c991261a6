"""Gradient surgery: each task's gradients are taken away, projected and put together."""

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


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = mlp(16, 32, 16)
        s.a = nn.Linear(16, 4)
        s.b = nn.Linear(16, 4)

    def forward(s, x):
        h = s.body(x)
        return s.a(h), s.b(h)


model = DDP(Net())
ps = [*model.parameters()]
opt = torch.optim.Adam(ps, 1e-3)
for step in range(40):
    x, y = batch()
    gs = []
    for k in range(2):
        for p in ps:
            p.grad = None
        a, b = model(x)
        (F.mse_loss(a, y) + 0 * b.sum() if k == 0 else F.l1_loss(b, -y) + 0 * a.sum()).backward()
        gs.append(torch.cat([p.grad.flatten() for p in ps]))
    u, v = gs
    dot = u @ v
    if dot < 0:
        u, v = u - dot / (v @ v) * v, v - dot / (u @ u) * u
    g = u + v
    i = 0
    for p in ps:
        p.grad = g[i : i + p.numel()].view_as(p).clone()
        i += p.numel()
    opt.step()
dist.destroy_process_group()
