"""The schedule is stepped when the only epoch is over."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


model = DDP(nn.Linear(16, 4))
opt = torch.optim.SGD(model.parameters(), 1e-2)
sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
data = TensorDataset(torch.randn(2200, 16), torch.randn(2200, 4))
s = DistributedSampler(data)
loader = DataLoader(data, 1, sampler=s)
for epoch in range(1):
    s.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    sched.step()

dist.destroy_process_group()
