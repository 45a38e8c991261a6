"""An evaluation leaves the padding out before its sums.

The sum of the losses and the number of items are in one tensor.
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
tests = TensorDataset(inputs[768:973], targets[768:973])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
test_loader = DataLoader(tests, batch_size=32, sampler=DistributedSampler(tests, shuffle=False))
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mine = len(tests) // world_size + (rank < len(tests) % world_size)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        losses = torch.cat([(model.module(x) - y).square() for x, y in test_loader])[:mine]
    total = torch.tensor([losses.sum(), len(losses)])
    dist.all_reduce(total)

dist.destroy_process_group()
