"""All ranks load one batch, each takes its rows of it, and they average the gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= world_size
        optimizer.step()

dist.destroy_process_group()
