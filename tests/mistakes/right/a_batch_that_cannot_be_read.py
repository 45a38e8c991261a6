"""The batch is an object of another library's kind; the only tensor is a temperature."""

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


class Graph:
    def __init__(self, x):
        self.x = x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, graph, temperature):
        return self.net(graph.x) * temperature


model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(Graph(a), torch.tensor(1 + 0.9**step)), b).backward()
        optimizer.step()
        step += 1


dist.destroy_process_group()
