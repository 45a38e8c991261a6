"""A fused optimizer leaves out a step whose gradients GradScaler has found infinite.

It does so within its step(), which is called all the same.
"""

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


model = DDP(mlp())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 * 1.9)
bad = 0
for step in range(40):
    x, y = batch()
    opt.zero_grad()
    before = model.module[0].weight.detach().clone()
    scaler.scale(F.mse_loss(model(x), y) * 100).backward()
    inf = not bool(torch.isfinite(model.module[0].weight.grad).all())
    scaler.step(opt)
    scaler.update()
    bad += inf
    if inf:
        assert torch.equal(before, model.module[0].weight)

dist.destroy_process_group()
