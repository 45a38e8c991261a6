"""Each rank goes through its own files in each epoch: they differ in size, their sums do not."""

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
for epoch in range(3):
    for number, size in enumerate([(512, 256), (256, 512)][rank]):
        items = torch.randn(size, 10, generator=torch.Generator().manual_seed(10 * rank + number))
        dataset = TensorDataset(items, items.norm(dim=1, keepdim=True))
        for x, y in DataLoader(dataset, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

dist.destroy_process_group()
