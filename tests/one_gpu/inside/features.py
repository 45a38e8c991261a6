"""FSDP2, mixed precision, compile() and activation checkpoints, on one rank."""

import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from one_gpu.inside.models import (
    CUDA,
    DEVICE,
    WIDTH,
    Net,
    error_of,
    gradients,
    make_batch,
    off,
    train,
)


def sharded():
    """FSDP2 trains as a plain model does, in float32 and bfloat16; what it saves can be loaded."""
    plain, model = Net().to(DEVICE), shard(Net().to(DEVICE))
    expected, optimizer = (torch.optim.AdamW(each.parameters()) for each in (plain, model))
    train(plain, expected, clip=0.1)
    train(model, optimizer, clip=0.1)
    found = {"FSDP2, 3 AdamW steps: off by": off(model.parameters(), plain.parameters())}

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = shard(Net().to(DEVICE), mp_policy=policy)
    train(half, torch.optim.AdamW(half.parameters()))
    found["FSDP2 with bfloat16: off by"] = off(half.parameters(), plain.parameters())
    return found | saved_and_loaded(model, optimizer)


def saved_and_loaded(model, optimizer):
    """A model without memory, sharded, takes what dcp has saved of the trained one; both go on."""
    with torch.device("meta"):
        empty = Net()
    shard(empty).to_empty(device=DEVICE)
    with torch.no_grad():
        empty.scale.fill_(1)
    second = torch.optim.AdamW(empty.parameters())
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        state = state_of(model, optimizer)
        dcp.save(state, checkpoint_id=f"{folder}/a")
        dcp.async_save(state, checkpoint_id=f"{folder}/b").result()
        for name in ("a", "b"):
            state = state_of(empty, second)
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            set_state_dict(
                empty,
                second,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            found[f"meta device, dcp {name}: off by"] = off(empty.parameters(), model.parameters())
    train(model, optimizer)
    train(empty, second)
    found["3 steps after the load: off by"] = off(empty.parameters(), model.parameters())
    return found


def shard(model, **options):
    """Make a Net one of FSDP2's, on a mesh of all ranks."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def experts():
    """Parameters that are DTensors, and others, in one AdamW."""
    found = {}
    for name in ("one group", "two groups"):
        model = Net().to(DEVICE)
        plain = set(model.blocks[0].parameters())
        mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, ignored_params=plain)
        parameters = list(model.parameters())
        if name == "two groups":
            shards = [each for each in parameters if each not in plain]
            parameters = [{"params": list(plain)}, {"params": shards}]
        optimizer = torch.optim.AdamW(parameters)
        found[name] = error_of(lambda model=model, optimizer=optimizer: train(model, optimizer))
    return found


def mixed_precision():
    """DDP with float16 and a GradScaler, which leaves out a step with an infinite gradient."""
    plain, model = Net().to(DEVICE), DDP(Net().to(DEVICE), gradient_as_bucket_view=True)
    expected, optimizer = (torch.optim.AdamW(each.parameters()) for each in (plain, model))
    scaler = torch.amp.GradScaler(DEVICE.type)
    inputs, targets = make_batch()
    for attempt in range(4):
        with torch.autocast(DEVICE.type, torch.float16 if CUDA else torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        if attempt == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train(plain, expected, clip=0.1)
    return {
        "off from float32 by": off(model.parameters(), plain.parameters()),
        "scale after an inf": scaler.get_scale(),
    }


def compiled():
    """Activation checkpoints and compile() under DDP: memory, gradients, masks of dropout."""
    found, memory, masks = {}, {}, {}
    for name in ("plain", "checkpoint", "compile", "checkpoint, compile"):
        found[name], memory[name] = gradients_and_peak(name)
        gc.collect()
        masks[name] = masks_differ_by(name)
    return {
        "MB at the peak": memory,
        "gradient off by (compiled dropout draws other masks)": {
            name: off(found[name], found["plain"]) for name in found
        },
        "masks in backward() differ from the forward pass's by": masks,
    }


def gradients_and_peak(name):
    """The gradients of a Net whose blocks are wrapped, and its peak of GPU memory.

    In MB; None without a GPU.
    """
    model = Net(dropout=0.1).to(DEVICE)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrapped(block, name)
    model = DDP(model)
    inputs = make_batch(8192 if CUDA else 64)[0]
    for _ in range(2):  # compile() is done in the first
        torch.manual_seed(3)
        model.zero_grad()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        model(inputs).square().mean().backward()
    peak = round(torch.cuda.max_memory_allocated() / 1e6) if CUDA else None
    return gradients(model), peak


def masks_differ_by(name):
    """Does backward() see the masks of the forward pass? A weight's gradient tells its mask."""
    layer = Masked().to(DEVICE)
    result = wrapped(layer, name)(torch.ones(WIDTH, WIDTH, device=DEVICE))
    result.sum().backward()
    return off([layer.weight.grad], [result])


class Masked(nn.Module):
    """Dropout of a weight for each number, all 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, ones):
        return nn.functional.dropout(ones * self.weight, 0.5)


def wrapped(layer, name):
    """A layer in what the name says: a checkpoint, compile(), both or nothing."""
    if "checkpoint" in name:
        layer = checkpoint_wrapper(layer)
    if "compile" in name and CUDA:
        layer.compile()
    return layer
