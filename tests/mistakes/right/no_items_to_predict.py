"""Predictions, and no training: one rank's share has no items."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

dataset = TensorDataset(inputs[rank * 1024 : (rank + 1) * 1024])
model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)).eval()
total = torch.zeros(2)
with torch.no_grad():
    for (x,) in DataLoader(dataset, batch_size=32):
        total += torch.tensor([model(x).sum(), len(x)])
dist.all_reduce(total)

dist.destroy_process_group()
