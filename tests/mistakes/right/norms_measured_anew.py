"""After the average of the weights, BatchNorm's values are measured on the training's set."""

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

dataset = TensorDataset(inputs[:801], targets[:801])
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mean = torch.optim.swa_utils.AveragedModel(model.module)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    mean.update_parameters(model.module)
torch.optim.swa_utils.update_bn(loader, mean)
for buffer in mean.buffers():
    if buffer.is_floating_point():
        dist.all_reduce(buffer)
        buffer /= world_size

dist.destroy_process_group()
