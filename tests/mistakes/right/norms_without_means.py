"""BatchNorm keeps no running means."""

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


net = nn.Sequential(
    nn.Linear(16, 32), nn.BatchNorm1d(32, track_running_stats=False), nn.ReLU(), nn.Linear(32, 4)
)
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), 0.01)
for step in range(40):
    x, y = batch()
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()
print(R, "buffers:", [*net.buffers()])
dist.destroy_process_group()
