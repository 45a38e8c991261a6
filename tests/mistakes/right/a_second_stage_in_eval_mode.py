"""The second stage trains the same model in eval mode, with an optimizer of its own."""

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


policy = DDP(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)))
opt = torch.optim.Adam(policy.parameters(), 1e-3)
torch.manual_seed(R)
for step in range(30):
    x, y = batch()
    opt.zero_grad()
    F.mse_loss(policy(x), y).backward()
    opt.step()
policy.eval()
ppo = torch.optim.Adam(policy.parameters(), 1e-4)
for it in range(10):
    x, _ = batch()
    with torch.no_grad():
        old = policy.module(x).log_softmax(1)
        a = torch.distributions.Categorical(logits=old).sample()
    adv = torch.randn(32, generator=G)
    for _ in range(4):
        lp = policy(x).log_softmax(1).gather(1, a[:, None])[:, 0]
        r = (lp - old.gather(1, a[:, None])[:, 0]).exp()
        ppo.zero_grad()
        (-torch.min(r * adv, r.clamp(0.8, 1.2) * adv).mean()).backward()
        ppo.step()
dist.destroy_process_group()
