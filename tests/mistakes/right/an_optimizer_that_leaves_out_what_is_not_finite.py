"""An optimizer of the script's own takes no step with gradients that are not finite."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G = torch.Generator().manual_seed(1 + R)


def batch(n=32):
    return torch.randn(n, 16, generator=G), torch.randn(n, 4, generator=G)


def mlp(i=16, h=32, o=4):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


class Safe(torch.optim.Adam):
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not all(bool(torch.isfinite(g).all()) for g in grads):
            return None
        return super().step(closure)


model = DDP(mlp())
opt = Safe(model.parameters(), lr=1e-3)
for step in range(40):
    x, y = batch()
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    if step == 7:
        loss = loss * float("inf")
    loss.backward()
    opt.step()

dist.destroy_process_group()
