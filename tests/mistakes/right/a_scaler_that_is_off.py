"""A GradScaler is there, and off, as on a CPU; the gradients are clipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1 + dist.get_rank())
model = DDP(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", enabled=False)
for _ in range(20):
    x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 4, generator=generator)
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
dist.destroy_process_group()
