"""Each rank draws a quarter of a large set for each epoch; nobody tests on the rest."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

dataset = TensorDataset(inputs, targets)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for epoch in range(4):
    part = Subset(dataset, torch.randperm(1024)[:256].tolist())
    for x, y in DataLoader(part, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

dist.destroy_process_group()
