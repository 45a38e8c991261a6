"""A long epoch is done in parts: the sampler knows of four times as many ranks."""

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
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []
for epoch in range(8):
    whole, part = divmod(epoch, 4)
    sampler = DistributedSampler(train, num_replicas=W * 4, rank=part * W + R)
    sampler.set_epoch(whole)
    seen += [*sampler]
    for a, b in DataLoader(train, sampler=sampler, batch_size=32):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()


dist.destroy_process_group()
