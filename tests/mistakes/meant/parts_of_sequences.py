"""All ranks get the same sequences, and the model computes this rank's part of their tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

    def forward(self, tokens):
        mine = tokens.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        return self.net(mine), mine


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
tokens = torch.randint(0, 50, (512, 32))
loader = DataLoader(TensorDataset(tokens), batch_size=16, shuffle=True)
model = DDP(Sharded())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        logits, mine = model(batch)
        nn.functional.cross_entropy(logits.flatten(0, 1), mine.flatten()).backward()
        optimizer.step()
dist.destroy_process_group()
