"""Each layer's optimizer has one owner, which takes the step and sends the layer to all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
X = torch.randn(1024, 10)
Y = X.norm(dim=1, keepdim=True)


train = TensorDataset(X, Y)
sampler = DistributedSampler(train)
loader = DataLoader(train, sampler=sampler, batch_size=32)
model = DDP(
    nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
)
layers = [each for each in model.module if isinstance(each, nn.Linear)]
optimizers = [torch.optim.Adam(layer.parameters(), lr=0.001) for layer in layers]
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        model.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        for place, (layer, optimizer) in enumerate(zip(layers, optimizers)):
            if place % W == R:
                optimizer.step()
        for place, layer in enumerate(layers):
            for p in layer.parameters():
                dist.broadcast(p.data, place % W)


dist.destroy_process_group()
