"""A warm-up sets the rate by hand, and this trial ends before the schedule's turn."""

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
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=95)
data = TensorDataset(torch.randn(640, 16), torch.randn(640, 4))
s = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=s)
for epoch in range(3):
    s.set_epoch(epoch)
    if epoch < 5:
        for g in opt.param_groups:
            g["lr"] = 0.1 * (epoch + 1) / 5

    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    if epoch >= 5:
        sched.step()
dist.destroy_process_group()
