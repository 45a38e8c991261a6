"""The second stage trains a head on what the first one's encoder gives in eval mode."""

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


enc = DDP(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)))
opt = torch.optim.Adam(enc.parameters(), 1e-3)
for step in range(30):
    x, _ = batch()
    opt.zero_grad()
    F.mse_loss(enc(x), x[:, :8]).backward()
    opt.step()
enc.eval()
enc.requires_grad_(False)
head = DDP(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 4)))
torch.manual_seed(R)
opt2 = torch.optim.Adam(head.parameters(), 1e-3)
before = enc.module[0].weight.clone()
for step in range(30):
    x, y = batch()
    opt2.zero_grad()
    F.mse_loss(head(enc(x)), y).backward()
    opt2.step()

dist.destroy_process_group()
