"""Accumulated gradients are thrown away once, in the middle of an epoch, on all ranks."""

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


net = mlp()
model = DDP(net)
opt = torch.optim.Adam(model.parameters(), 1e-3)
data = TensorDataset(torch.randn(1024, 16), torch.randn(1024, 4))
s = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=s)  # 32 batches a rank: 8 steps
for epoch in range(4):
    s.set_epoch(epoch)
    n = 0
    for i, (x, y) in enumerate(loader):
        bad = epoch == 1 and i == 13
        model.require_backward_grad_sync = i % 4 == 3
        loss = F.mse_loss(model(x), y) / 4
        loss.backward()
        if bad:
            opt.zero_grad()  # loss not finite somewhere: begin the step anew
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
dist.destroy_process_group()
