"""Each round answers prompts without gradients, and trains on what came out.

Its drop_last leaves out other prompts in each round.
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

prompts = TensorDataset(inputs[:813])
sampler = DistributedSampler(prompts)
loader = DataLoader(prompts, batch_size=32, sampler=sampler, drop_last=True)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(3):
    sampler.set_epoch(number)
    model.eval()
    with torch.no_grad():
        kept = [(x, model(x) + torch.randn(len(x), 1)) for (x,) in loader]
    model.train()
    answers = TensorDataset(*map(torch.cat, zip(*kept, strict=True)))
    for x, y in DataLoader(answers, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())

dist.destroy_process_group()
