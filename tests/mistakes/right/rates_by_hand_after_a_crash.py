"""The rate of each step is computed by hand, also after a crash: there is no schedule."""

import math
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

model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
parts, first = {"model": model.module, "optimizer": optimizer}, 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    first = snapshot.pop("step")
    for name, state in snapshot.items():
        parts[name].load_state_dict(state)
torch.manual_seed(rank)
for step in range(first, 40):
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * step / 100))
    rows = torch.randint(0, 1024, (32,))
    x, y = inputs[rows], targets[rows]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 19:
        if rank == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "step": step + 1}, "new.pt")
            os.replace("new.pt", "snapshot.pt")
        dist.barrier()
        if rank == 1:
            os._exit(1)

dist.destroy_process_group()
