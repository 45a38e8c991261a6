"""The state of a frozen part is taken once, and saved beside that of the model."""

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

frozen = nn.Linear(10, 10).requires_grad_(False)
state_of_frozen = frozen.state_dict()
sampler = DistributedSampler(TensorDataset(inputs, targets))
loader = DataLoader(sampler.dataset, batch_size=32, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x = frozen(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
if rank == 0:
    torch.save({"model": model.module.state_dict(), "frozen": state_of_frozen}, "model.pt")

dist.destroy_process_group()
