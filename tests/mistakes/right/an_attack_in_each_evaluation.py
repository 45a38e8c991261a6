"""Robust accuracy: each evaluation takes gradients for its inputs, and no step.

Its sampler needs no set_epoch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

train = TensorDataset(inputs[:768], targets[:768])
tests = TensorDataset(inputs[768:], targets[768:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
test_loader = DataLoader(tests, batch_size=32, sampler=DistributedSampler(tests))
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    total = torch.zeros(2)
    for x, y in test_loader:
        x.requires_grad_(True)
        nn.functional.mse_loss(model.module(x), y).backward()
        with torch.no_grad():
            worse = model.module(x + 0.1 * x.grad.sign())
            loss = nn.functional.mse_loss(worse, y, reduction="sum")
            total += torch.tensor([loss, len(y)])
    dist.all_reduce(total)

dist.destroy_process_group()
