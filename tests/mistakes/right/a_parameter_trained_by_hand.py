"""A gate is in no optimizer and no DDP object: its gradient is averaged and taken by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1 + dist.get_rank())
model = DDP(nn.Linear(16, 16))
gate = nn.Linear(16, 16, bias=False)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(40):
    x = torch.randn(32, 16, generator=generator)
    optimizer.zero_grad()
    gate.zero_grad()
    F.mse_loss(model(x) * gate(x).sigmoid(), x).backward()
    dist.all_reduce(gate.weight.grad)
    optimizer.step()
    with torch.no_grad():
        gate.weight -= 0.01 * gate.weight.grad / dist.get_world_size()
dist.destroy_process_group()
