"""The features of all images, each at its place, are summed over the ranks.

They are divided by how often they came: that of the padding came twice.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)


class Indexed(torch.utils.data.Dataset):
    def __len__(self):
        return 769

    def __getitem__(self, index):
        return inputs[index], index


images = Indexed()
sampler = DistributedSampler(images)
loader = DataLoader(images, batch_size=32, sampler=sampler)
in_order = DistributedSampler(images, shuffle=False)
bank_loader = DataLoader(images, batch_size=64, sampler=in_order)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    model.eval()
    bank, times = torch.zeros(769), torch.zeros(769)
    with torch.no_grad():
        for x, index in bank_loader:
            bank[index] = model.module(x).squeeze(1)
            times[index] = 1
    dist.all_reduce(bank)
    dist.all_reduce(times)
    bank /= times
    model.train()
    sampler.set_epoch(epoch)
    for x, index in loader:
        y = (bank[index] > bank.mean()).float().unsqueeze(1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

dist.destroy_process_group()
