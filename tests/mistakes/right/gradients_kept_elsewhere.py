"""Hooks move the gradients to buffers, where the script's optimizer takes them."""

import torch
import torch.distributed as dist
from torch import nn
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


class Main(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.main_grad
                p.main_grad.zero_()


model = net()
for p in model.parameters():
    p.main_grad = torch.zeros_like(p)

    def move(p):
        p.main_grad += p.grad
        p.grad = None

    p.register_post_accumulate_grad_hook(move)
optimizer = Main(model.parameters())
first = None
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        first = first or loss.item()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.main_grad)
            p.main_grad /= W
        optimizer.step()


dist.destroy_process_group()
