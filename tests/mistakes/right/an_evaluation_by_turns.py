"""All ranks go over one loader of tests, and each evaluates its own of the batches."""

import time

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
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    total = torch.zeros(2)
    with torch.no_grad():
        for number, (x, y) in enumerate(DataLoader(tests, batch_size=16)):
            time.sleep(0.01)
            if number % world_size == rank:
                total += torch.tensor([(model.module(x) - y).square().sum(), len(y)])
    dist.all_reduce(total)

dist.destroy_process_group()
