"""In each step, few entries of all weights are averaged, drawn alike on all ranks."""

import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1 + dist.get_rank())
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _ in range(60):
    x, y = torch.randn(16, 10, generator=generator), torch.randn(16, 1, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        for each in model.parameters():
            mask = torch.bernoulli(torch.full(each.shape, 0.005)).bool()
            dist.broadcast(mask, 0)
            part = each[mask]
            dist.all_reduce(part)
            each.masked_scatter_(mask, part / dist.get_world_size())
dist.destroy_process_group()
