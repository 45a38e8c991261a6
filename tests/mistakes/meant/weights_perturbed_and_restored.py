"""Each step is taken at perturbed weights, which are restored after it."""

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


def net():
    return nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))


train = TensorDataset(X, Y)
sampler = DistributedSampler(train)
loader = DataLoader(train, sampler=sampler, batch_size=32)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in loader:
        saved = None
        if epoch > 0:  # awp_warmup = 1
            saved = [p.detach().clone() for p in model.parameters()]
            grads = torch.autograd.grad(
                nn.functional.mse_loss(model.module(a), b), [*model.module.parameters()]
            )
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads):
                    p.add_(0.005 * p.norm() * g / (g.norm() + 1e-12))
            moved = [(p.detach() - s) for p, s in zip(model.parameters(), saved)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        if saved is not None:  # restore: what the step has changed is applied to the saved weights
            with torch.no_grad():
                for p, s, v in zip(model.parameters(), saved, before):
                    p.copy_(s - 0.01 * p.grad)


dist.destroy_process_group()
