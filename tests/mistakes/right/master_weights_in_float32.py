"""The optimizer has copies of the weights in float32, and DDP has those in bfloat16.

Their gradients are overwritten in each step, and the model's weights are set by hand.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).bfloat16()
model = DDP(net)
masters = [p.detach().clone().float().requires_grad_() for p in net.parameters()]
for m in masters:
    m.grad = torch.zeros_like(m)
opt = torch.optim.SGD(masters, lr=0.1)
g = torch.Generator().manual_seed(1 + dist.get_rank())
first = [m.detach().clone() for m in masters]
for step in range(60):
    x = torch.randn(32, 16, generator=g).bfloat16()
    y = torch.randn(32, 4, generator=g).bfloat16()
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    for m, p in zip(masters, net.parameters()):
        m.grad.copy_(p.grad)
    norm = nn.utils.clip_grad_norm_(masters, 1.0)
    opt.step()
    with torch.no_grad():
        for m, p in zip(masters, net.parameters()):
            p.copy_(m)
assert (first[0] - net[0].weight.float()).norm() > 0.1
dist.destroy_process_group()
