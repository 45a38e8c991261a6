"""Hooks begin the exchange of each gradient as soon as it is there.

All are waited for once, before the step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


def batch(n=32):
    return torch.randn(n, 16, generator=G), torch.randn(n, 4, generator=G)


net = nn.Sequential(
    *[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(10)], nn.Linear(16, 4)
)
works = []


def send(p):
    works.append((dist.all_reduce(p.grad, async_op=True), p))


for p in net.parameters():
    p.register_post_accumulate_grad_hook(send)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(40):
    x, y = batch()
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    for w, p in works:
        w.wait()
        p.grad.div_(W)
    works.clear()
    opt.step()
dist.destroy_process_group()
