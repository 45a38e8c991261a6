"""All ranks go over one loader in one order, and each takes its own of the batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        if number % world_size != rank:
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

dist.destroy_process_group()
