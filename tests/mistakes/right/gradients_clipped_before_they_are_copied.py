"""The model's gradients are clipped, and copied to the optimizer's own weights."""

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


net = mlp().bfloat16()
model = DDP(net)
ps = list(model.parameters())
masters = [p.detach().clone().float() for p in ps]
opt = torch.optim.Adam(masters, lr=1e-3)
first = masters[0].clone()
for step in range(60):
    x, y = batch()
    model.zero_grad(set_to_none=True)
    F.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
    nn.utils.clip_grad_norm_(ps, 0.1)
    for m, p in zip(masters, ps):
        m.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for m, p in zip(masters, ps):
            p.copy_(m)

dist.destroy_process_group()
