"""Each pass gives its sampler the number of the step, also after a crash."""

import os

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

dataset = TensorDataset(inputs, targets)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
parts, step = {"model": model.module, "optimizer": optimizer}, 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    step = snapshot.pop("step")
    for name, state in snapshot.items():
        parts[name].load_state_dict(state)
while step < 64:
    sampler.set_epoch(step)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
    if rank == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "step": step}, "new.pt")
        os.replace("new.pt", "snapshot.pt")
    dist.barrier()
    if step == 32 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)

dist.destroy_process_group()
