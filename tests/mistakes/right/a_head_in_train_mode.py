"""The body is frozen in eval mode, and the head trains in train mode."""

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


train = TensorDataset(X, Y)
sampler = DistributedSampler(train)
loader = DataLoader(train, sampler=sampler, batch_size=32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.GELU())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(self.body(x))


model = DDP(Net())
torch.manual_seed(R)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    if epoch >= 1:
        model.eval()
        model.module.head.train()
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()

dist.destroy_process_group()
