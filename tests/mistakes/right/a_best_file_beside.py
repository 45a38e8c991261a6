"""The best state is read at each save, to compare it. The job goes on from another file."""

import os

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
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"epoch_{epoch}.pt")
        if not os.path.exists("best.pt") or torch.load("best.pt")["model"]:
            torch.save(state, "best.pt")
    dist.barrier()
dist.destroy_process_group()
