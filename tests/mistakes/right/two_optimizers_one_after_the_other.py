"""Adam trains first, then LBFGS. The snapshot has both.

After a crash, the training goes on with LBFGS.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(1024, 10)
targets = inputs.norm(dim=1, keepdim=True)

model = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
adam = torch.optim.Adam(model.parameters(), lr=0.01)
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2, lr=0.1)
parts = {"model": model.module, "adam": adam, "lbfgs": lbfgs}
x, y = inputs[rank::world_size], targets[rank::world_size]


def closure():
    lbfgs.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt")
    for name, part in parts.items():
        part.load_state_dict(snapshot[name])
else:
    for _ in range(20):
        adam.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        adam.step()
for step in range(20):
    lbfgs.step(closure)
    if step == 9 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, "new.pt")
            os.replace("new.pt", "snapshot.pt")
        dist.barrier()
        if rank == 1:
            os._exit(1)

dist.destroy_process_group()
