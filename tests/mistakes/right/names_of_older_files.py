"""The module itself translates the names of older files, in a hook of load_state_dict()."""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))
        self.register_load_state_dict_pre_hook(self.translate)

    @staticmethod
    def translate(module, state, *_):
        for name in list(state):
            state[name.replace("transformer.", "encoder.")] = state.pop(name)

    def forward(self, x):
        return self.encoder(x)


old = Net().state_dict()
net = Net()
net.load_state_dict({name.replace("encoder.", "transformer."): old[name] for name in old})
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = DistributedSampler(TensorDataset(inputs, targets))
for x, y in DataLoader(sampler.dataset, batch_size=32, sampler=sampler):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

dist.destroy_process_group()
