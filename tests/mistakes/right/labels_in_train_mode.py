"""Labels come by the DDP object in train mode, without gradients, and dropout is on.

A look at two batches of the tests is by the average of the weights, in eval mode.
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

train = TensorDataset(inputs[:768], targets[:768])
tests = TensorDataset(inputs[768:], targets[768:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
in_order = DistributedSampler(tests, shuffle=False)
test_loader = DataLoader(tests, batch_size=16, sampler=in_order)
inner = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.1), nn.Linear(32, 1))
average = torch.optim.swa_utils.AveragedModel(inner)
model = DDP(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        with torch.no_grad():
            y = (y + model(x)) / 2
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        average.update_parameters(inner)
        step += 1
        if step % 6:
            continue
        average.eval()
        total = torch.zeros(2)
        with torch.no_grad():
            for number, (x, y) in enumerate(test_loader):
                if number == 2:
                    break
                total += torch.tensor([(average(x) - y).square().sum(), len(y)])
        dist.all_reduce(total)

dist.destroy_process_group()
