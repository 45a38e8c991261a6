"""A perturbation's gradient is clipped in each inner step, and the model's once."""

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
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        delta = torch.zeros_like(a, requires_grad=True)
        for _ in range(3):
            nn.functional.mse_loss(model.module(a + delta), b).backward(inputs=[delta])
            nn.utils.clip_grad_norm_([delta], 0.1)
            delta.data.add_(delta.grad)
            delta.grad = None
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a + delta.detach()), b).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


dist.destroy_process_group()
