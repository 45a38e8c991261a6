"""The schedule's length is that of all epochs but one, and it is stepped after each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


def mlp(i=16, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


model = DDP(mlp())
opt = torch.optim.SGD(model.parameters(), 0.1)
E = 6
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=E - 1)
data = TensorDataset(torch.randn(320, 16), torch.randn(320, 4))
s = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=s)
v = TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
vl = DataLoader(v, 16, sampler=DistributedSampler(v, shuffle=False))
for epoch in range(E):
    s.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    sched.step()
    model.eval()
    with torch.no_grad():
        t = sum(F.mse_loss(model.module(a), b, reduction="sum") for a, b in vl)
    dist.all_reduce(t)
    model.train()
dist.destroy_process_group()
