import copy
import gc
import io
import math
import multiprocessing
import os
import runpy
import time
import traceback
import weakref
from contextlib import redirect_stdout
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

globals().update(runpy.run_path("RECIPE"))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, width=8, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.blocks = nn.Linear(width, width), nn.Sequential(Block(width), Block(width))
        if device:
            self.to(device)

    def forward(self, x):
        return self.blocks(self.first(x))


class Drawn(list):  # a dataset that draws a number for each item
    def __getitem__(self, index):
        return torch.tensor([index, torch.randint(10**12, ())])


def shard(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (world_size,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)


def flat(tensors):
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole])


def weights(model):
    return flat(model.parameters())


def gradient(model):
    return flat(p.grad for p in model.parameters())


def gathered(value):
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


sent, all_reduce = [], dist.all_reduce


def counted(tensor, *args, **kwargs):
    sent.append(tensor.nbytes)
    return all_reduce(tensor, *args, **kwargs)


def check(found, expected, tolerance=1e-5):
    off = ((found - expected).norm() / expected.norm()).item()
    assert off < tolerance, f"off by {off:.1e}"


def take_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()


def one_step(model):  # with the gradients that it has
    torch.optim.AdamW(model.parameters()).step()


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last, device, mean_loss = world_size - 1, torch.device("cpu"), mse_loss
if world_size > 1:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
torch.manual_seed(0)
all_inputs, all_targets = torch.randn(2, 24, 8).to(device)  # of all ranks; 2, 3 and 4 divide them
inputs, targets = all_inputs[rank::world_size], all_targets[rank::world_size]
plain = Model()  # for what one process computes
mse_loss(plain(all_inputs), all_targets).backward()
