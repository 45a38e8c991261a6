"""The lines of recipes/context_parallel.py for GPUs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import experimental
from torch.nn.parallel import DistributedDataParallel as DDP

from one_gpu.inside.models import CUDA, DEVICE, gradients, off


class Transformer(nn.Module):
    """One layer of causal attention, over nine kinds of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.places = nn.Embedding(9, 64), nn.Embedding(256, 64)
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 9)

    def forward(self, tokens, positions):
        hidden = (self.embed(tokens) + self.places(positions))[:, None]
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(hidden + attended)[:, 0]


def context_parallel():
    """torch's own context_parallel leaves the gradient of the whole sequence."""
    model, plain = DDP(Transformer().to(DEVICE)), Transformer().to(DEVICE)
    tokens = torch.randint(9, (3, 129), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores = plain(tokens[:, :-1], torch.arange(128, device=DEVICE))
    nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    try:
        backward_in_parts(model, tokens)
    except RuntimeError as error:
        if CUDA:
            raise
        return {"on a CPU": str(error).splitlines()[0]}
    return {"gradient off by": off(gradients(model), gradients(plain))}


def backward_in_parts(model, tokens):
    """Forward and backward, each rank with its part of every sequence."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # changed in place
    positions = torch.arange(inputs.size(1), device=DEVICE)
    with experimental.context_parallel(
        mesh, buffers=[inputs, targets, positions], buffer_seq_dims=[1, 1, 0]
    ):
        scores = model(inputs, positions)
        counted = (targets != -100).sum()
        dist.all_reduce(counted)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss * dist.get_world_size() / counted).backward()
