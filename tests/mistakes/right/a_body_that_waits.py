"""The body gets no gradients in the first epochs, and its optimizer is stepped nevertheless."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


def batch(n=32):
    return torch.randn(n, 16, generator=G), torch.randn(n, 4, generator=G)


def mlp(i=16, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = mlp(16, 32, 16)
        s.head = nn.Linear(16, 4)
        s.waits = True

    def forward(s, x):
        with torch.set_grad_enabled(not s.waits):
            h = s.body(x)
        return s.head(h)


model = DDP(Net(), find_unused_parameters=True)
net = model.module
opts = [
    torch.optim.Adam(net.body.parameters(), 1e-3),
    torch.optim.Adam(net.head.parameters(), 1e-3),
]
for epoch in range(5):
    net.waits = epoch < 3
    first = net.body[0].weight.detach().clone()
    for step in range(20):
        x, y = batch()
        for o in opts:
            o.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(net.body.parameters(), 1.0)
        for o in opts:
            o.step()

dist.destroy_process_group()
