"""One iterator over the validation set is kept, and gives each evaluation its next batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(1290, 10), torch.randn(1290, 1))
validation = TensorDataset(torch.randn(301, 10), torch.randn(301, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 32, sampler=sampler)
validation_loader = DataLoader(validation, 32, shuffle=True)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(dist.get_rank())


def endless():
    while True:
        yield from validation_loader


kept = endless()
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(9):
                    a, b = next(kept)
                    model.module(a)
            model.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
