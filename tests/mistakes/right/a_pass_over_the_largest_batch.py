"""Memory is taken by a pass over the largest batch, before the first epoch."""

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


def batch(n=32):
    return torch.randn(n, 16, generator=G), torch.randn(n, 4, generator=G)


def mlp(i=16, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


net = mlp()
model = DDP(net)
opt = torch.optim.Adam(model.parameters(), 1e-3)
data = TensorDataset(torch.randn(1024, 16), torch.randn(1024, 4))
s = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=s)  # 32 batches a rank: 8 steps
x, y = batch(512)
F.mse_loss(model(x), y).backward()
opt.zero_grad()
for epoch in range(4):
    s.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        model.require_backward_grad_sync = i % 4 == 3
        (F.mse_loss(model(x), y) / 4).backward()
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
dist.destroy_process_group()
