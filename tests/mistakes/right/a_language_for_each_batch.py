"""A stream draws its items, and gives batches of one language each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        numbers = torch.Generator().manual_seed(rank)
        for language in torch.randint(0, 5, (40,), generator=numbers).tolist():
            for row in torch.randint(0, 1024, (16,), generator=numbers).tolist():
                yield inputs[row], targets[row], language


model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y, _ in DataLoader(Batches(), batch_size=16):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

dist.destroy_process_group()
