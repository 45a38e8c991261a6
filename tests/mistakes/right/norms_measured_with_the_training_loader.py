"""After each epoch, BatchNorm's values are measured over batches of the training's loader."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, _ in loader:
            model.module(x)
    for buffer in model.module.buffers():
        dist.all_reduce(buffer)
        buffer //= dist.get_world_size() if buffer.dtype == torch.long else 1
        if buffer.is_floating_point():
            buffer /= dist.get_world_size()
dist.destroy_process_group()
