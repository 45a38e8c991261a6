"""One of two networks is trained with a GradScaler; the other one is not, and is clipped."""

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


g, d = DDP(mlp(16, 32, 4)), DDP(mlp(4, 32, 1))
og, od = torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(60):
    x, y = batch()
    od.zero_grad()
    with torch.no_grad():
        fake = g(x)
    dd = d(torch.cat([y, fake]))
    (F.softplus(-dd[:32]).mean() + F.softplus(dd[32:]).mean()).backward()
    nn.utils.clip_grad_norm_(d.parameters(), 1.0)
    od.step()
    og.zero_grad()
    d.requires_grad_(False)
    with torch.autocast("cpu"):
        loss = F.softplus(-d.module(g(x))).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(og)
    scaler.step(og)
    scaler.update()
    d.requires_grad_(True)
dist.destroy_process_group()
