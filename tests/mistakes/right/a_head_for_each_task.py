"""Each task has a head and an optimizer, and all are stepped when one of them is trained."""

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
        s.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(s, x, k):
        return s.heads[k](s.body(x))


model = DDP(Net(), find_unused_parameters=True)
net = model.module
opts = [torch.optim.Adam(net.body.parameters(), 1e-3)] + [
    torch.optim.Adam(h.parameters(), 1e-3) for h in net.heads
]
first = [h.weight.detach().clone() for h in net.heads]
for step in range(120):
    x, y = batch()
    k = torch.randint(3, (1,)).item()
    for o in opts:
        o.zero_grad()
    F.mse_loss(model(x, k), y).backward()
    for h in net.heads:
        nn.utils.clip_grad_norm_(h.parameters(), 1.0)
    for o in opts:
        o.step()

dist.destroy_process_group()
