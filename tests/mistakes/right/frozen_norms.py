"""The norms stay in eval mode, so that their means are equal for ever."""

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


net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(net, broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    model.train()
    net[1].eval()
    x, y = batch()
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()
print(R, "means all 0:", not bool(net[1].running_mean.any()))
dist.destroy_process_group()
