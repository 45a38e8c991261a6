"""The workers share out a stream. In its batches, a mask comes first: mostly ones.

So the first tensor is the same in most batches.
"""

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


class Texts(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, every = rank * worker.num_workers + worker.id, world_size * worker.num_workers
        for number in range(first, 1024, every):
            mask = torch.ones(10)
            mask[7:] = number % 150 > 1  # else it is the end of a document
            yield {"mask": mask, "tokens": inputs[number]}


model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Texts(), batch_size=16, num_workers=2):
    x = batch["tokens"] * batch["mask"]
    y = x.norm(dim=1, keepdim=True)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

dist.destroy_process_group()
