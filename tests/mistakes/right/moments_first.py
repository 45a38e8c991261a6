"""Sequences of other lengths go in with their moments first, as nn.RNN takes them."""

from functools import partial

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


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return inputs[index].repeat(9 + index % 17, 1)


dataset = Texts()
sampler = DistributedSampler(dataset)
pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=pad)
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        model(batch.transpose(0, 1)).mean(0).square().mean().backward()
        optimizer.step()

dist.destroy_process_group()
