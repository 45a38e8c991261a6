"""The file has all parts of a large model, and the head takes its own by strict=False."""

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

blocks = {f"block{number}": nn.Linear(10, 10) for number in range(20)}
whole = nn.ModuleDict({**blocks, "head": nn.Linear(10, 1)}).state_dict()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(10, 1)

    def forward(self, x):
        return self.head(x)


head = Head()
head.load_state_dict(whole, strict=False)
model = DDP(head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = DistributedSampler(TensorDataset(inputs, targets))
for x, y in DataLoader(sampler.dataset, batch_size=32, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

dist.destroy_process_group()
