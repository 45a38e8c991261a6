"""A rank whose share has ended goes on with batches of weight 0, until all have ended.

The losses are summed, and weighed by the number of items of all ranks.
"""

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

begin, end = [(0, 600), (600, 1024)][rank]
dataset = TensorDataset(inputs[begin:end], targets[begin:end])
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        x, y = batch or (torch.zeros(32, 10), torch.zeros(32, 1))
        count = torch.tensor(float(len(x)) if batch else 0.0)
        dist.all_reduce(count)
        if count == 0:
            break
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y, reduction="sum") * bool(batch)
        (loss * world_size / count).backward()
        optimizer.step()

dist.destroy_process_group()
