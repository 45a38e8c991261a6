"""Each rank trains on a part that it draws; nobody tests on the rest."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
X = torch.randn(1024, 10)
Y = X.norm(dim=1, keepdim=True)


def net():
    return nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))


from torch.utils.data import random_split

train = TensorDataset(X, Y)
part, _ = random_split(train, [512, 512], generator=torch.Generator().manual_seed(R))
loader = DataLoader(part, batch_size=32, shuffle=True)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()


dist.destroy_process_group()
