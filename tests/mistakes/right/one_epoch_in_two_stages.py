"""Two stages of one epoch each, which begin alike."""

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
for optimizer in (
    torch.optim.SGD(model.module[2].parameters(), lr=0.01),
    torch.optim.SGD(model.parameters(), lr=0.01),
):
    sampler.set_epoch(0)
    for a, b in loader:
        model.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()


dist.destroy_process_group()
