"""A dict of the model's own tensors is made once, and saved after each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
X = torch.randn(1024, 10)
Y = X.norm(dim=1, keepdim=True)


def net():
    return nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))


train = TensorDataset(X, Y)
sampler = DistributedSampler(train)
loader = DataLoader(train, sampler=sampler, batch_size=32)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"model": model.module.state_dict()}
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
    if R == 0:
        torch.save(state, f"epoch_{epoch}.pt")

dist.barrier()

dist.destroy_process_group()
