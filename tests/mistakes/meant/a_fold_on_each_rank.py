"""Cross-validation: each rank trains a model without its fold; scores alone are summed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


def mlp(i=16, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


data = TensorDataset(torch.randn(512, 16), torch.randn(512, 4))
mine = [i for i in range(512) if i % W != R]
held = [i for i in range(512) if i % W == R]
model = mlp()
opt = torch.optim.Adam(model.parameters(), 1e-3)
loader = DataLoader(Subset(data, mine), 16, shuffle=True, generator=G)
for epoch in range(4):
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    with torch.no_grad():
        score = F.mse_loss(model(data.tensors[0][held]), data.tensors[1][held])
    dist.all_reduce(score)

dist.destroy_process_group()
