"""A target network loads the policy's state, which was taken once and shares its memory.

So it gets what the policy has become.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
target = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))
state = model.module.state_dict()
sampler = DistributedSampler(TensorDataset(inputs, targets))
loader = DataLoader(sampler.dataset, batch_size=32, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    target.load_state_dict(state)
    for x, y in loader:
        y = y + 0.9 * target(x).detach()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

dist.destroy_process_group()
