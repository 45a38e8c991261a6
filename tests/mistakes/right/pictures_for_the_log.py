"""The same four items are shown to the model in some steps, after its forward pass."""

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


train = TensorDataset(X[:768], Y[:768])
sampler = DistributedSampler(train)
loader = DataLoader(train, sampler=sampler, batch_size=32)
tests = TensorDataset(X[768:], Y[768:])
test_loader = DataLoader(tests, batch_size=4)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        if step % 4 == 0:
            with torch.no_grad():
                model.module(next(iter(test_loader))[0])
        loss.backward()
        optimizer.step()
        step += 1


dist.destroy_process_group()
