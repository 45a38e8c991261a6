"""The first start saves the prepared data, and crashes before it saves a state."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

if not os.path.exists("prepared.pt"):
    if rank == 0:
        torch.save({"inputs": inputs, "targets": targets}, "new.pt")
        os.replace("new.pt", "prepared.pt")
    dist.barrier()
data = torch.load("prepared.pt")
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for step in range(40):
    rows = torch.randint(0, 1024, (32,))
    x, y = data["inputs"][rows], data["targets"][rows]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 20 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)

dist.destroy_process_group()
