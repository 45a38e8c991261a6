"""How do I shard a pretrained model with FSDP2, when only rank 0 reads the file?

    with torch.device("meta"):  # names and shapes, no memory
        model = YourModel()
    for block in model.blocks:  # the layers of your model
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)  # memory for shards and buffers, without values
    fill_buffers(model, YourModel)  # below: some are in no file
    state = {}
    for path in paths if dist.get_rank() == 0 else []:  # one file, or several
        state |= torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    if state:  # a layer that the file lacks, made on all ranks; or leave this out
        state |= {f"head.{name}": tensor for name, tensor in new_head.state_dict().items()}
    state = {name: tensor.contiguous() for name, tensor in state.items()}  # or scrambled: see below
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)  # all ranks call it

With fully_shard (FSDP2), each rank (process) holds a shard, its part of each weight. Rank 0 maps
the files: a tensor is read when it is used. It sends one whole tensor after the other. Each rank
keeps its part, and frees the rest. For files of safetensors, which are mapped, too:
state |= safetensors.torch.load_file(path). If all ranks see these files, each can read its own
parts: dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folder)), with dcp
for torch.distributed.checkpoint.

    torchrun --standalone --nproc-per-node=2 recipes/pretrained_to_shards.py

    [rank 0/2] 2 files of 965760 bytes; 115584 in the largest tensor
    [rank 0/2]                    rank 0 reads    keeps   rank 1 reads    keeps   outputs off by
    [rank 0/2] rank 0 reads             965760   738128              0   675484   0.0e+00
    [rank 0/2] every rank reads         965760  2245544         965760  2245544   0.0e+00
    [rank 0/2] buffers forgotten        965760   738128              0   663196   nan
    [rank 0/2] strict=False             965760   675484              0   675484   nan
    [rank 0/2] not contiguous           965760   675484              0   675484   3.5e-01
    [rank 0/2] rank 0 alone reads the files; no rank keeps more than its shards and one tensor

"Keeps" is the most bytes of weights and buffers that a rank held at one moment: its shards and one
whole tensor. What is mapped does not count: the system can drop it, and read it again. The other
ways are wrong:

- Every rank reads: each holds the whole model, for a moment twice.
- Buffers forgotten: a buffer is a tensor that is not trained. One with persistent=False, say a
  table of positions, is in no file. It keeps what was in the memory, without an error.
- strict=False: a new head, or the matrices of LoRA, are in no file, either. By default, that is an
  error. With strict=False, they keep what was in the memory. Put them into state, as above.
- Not contiguous: the file has a weight in channels_last. torch sends its bytes in that order, and
  the other ranks read them in the usual one, without an error. A weight saved as a .t() is also
  scrambled with Gloo; with NCCL it is an error on rank 0 alone.

To see memory without values in your own job, call torch.use_deterministic_algorithms(True) first,
as this file does: torch then fills new memory with nan.

torch compares the names with the model's, but not all shapes: (30, 1) is spread over (30, 13). A
model in DistributedDataParallel (DDP) saves names with "module.":
consume_prefix_in_state_dict_if_present(state, "module.") of torch.nn.modules.utils takes that off.
An embedding and a head that are one tensor (tied) stay so if one call of fully_shard() takes both.
Files of safetensors mostly have one of the two names: give state the other one, too.
"""

import gc
import math
import os
import tempfile
import weakref
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold that
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import relu
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves  # private, both; only to count bytes

BLOCKS, WIDTH, CLASSES, PATCHES = 6, 96, 301, 16  # 301: its shards differ in size
torch_load = torch.load  # see CountBytes


def load_by_rank_0(paths, device, mesh, new_head):
    """The right way."""
    with torch.device("meta"):
        model = YourModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    fill_buffers(model, YourModel)
    state = {}
    for path in paths if dist.get_rank() == 0 else []:
        state |= torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    if state:
        state |= {f"head.{name}": tensor for name, tensor in new_head.state_dict().items()}
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


def fill_buffers(model, build):
    """Give the buffers the values that they have in a new model. build: makes one."""

    def to_meta(module, name, weight):  # at once: so it is one at a time, and not initialized
        if weight is not None and not weight.is_meta:
            return nn.Parameter(weight.to("meta"), weight.requires_grad)

    with register_module_parameter_registration_hook(to_meta):  # for all modules built in here
        new = build()
    for buffer, value in zip(all_buffers(model), all_buffers(new), strict=True):
        buffer.copy_(value)


def all_buffers(model):
    # What modules share comes once for each: to_empty() has given each a buffer of its own.
    return [buffer for _, buffer in model.named_buffers(remove_duplicate=False)]


def load_on_every_rank(paths, device, mesh, new_head):
    """Wrong: each rank reads all files, and holds the whole model, for a moment twice."""
    model, state = YourModel(), {}
    for path in paths:
        state |= torch.load(path, map_location="cpu", weights_only=True)
    state |= {f"head.{name}": tensor for name, tensor in new_head.state_dict().items()}
    model.load_state_dict(state)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


@mock.patch.dict(globals(), fill_buffers=lambda model, build: None)
def forget_buffers(*args):
    """Wrong: the buffers that are in no file keep what was in the memory. No error."""
    return load_by_rank_0(*args)


@mock.patch.dict(globals(), StateDictOptions=partial(StateDictOptions, strict=False))
def forget_head(paths, device, mesh, new_head):
    """Wrong: so does a new layer. No error."""
    return load_by_rank_0(paths, device, mesh, nn.Identity())  # it adds nothing to state


@mock.patch.object(torch.Tensor, "contiguous", lambda tensor: tensor)
def send_as_it_is(*args):
    """Wrong: the bytes of a weight in channels_last arrive in another order. No error."""
    return load_by_rank_0(*args)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.use_deterministic_algorithms(True)  # new memory is filled with nan
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("1.pt", "2.pt")]
        dist.broadcast_object_list(paths)  # all ranks use the folder of rank 0
        compare_loads(paths)
        dist.barrier()  # before rank 0 removes it
    gc.collect()  # otherwise what is left of the model can abort the process at its exit
    dist.destroy_process_group()


def compare_loads(paths):
    device, world_size = torch.device("cpu"), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    torch.manual_seed(1)  # all ranks make the same weights and images
    plain, images = YourModel(), torch.randn(4, 3, 32, 32)
    state = {name: tensor for name, tensor in plain.state_dict().items() if "head" not in name}
    state["patches.weight"] = state["patches.weight"].to(memory_format=torch.channels_last)
    if dist.get_rank() == 0:
        for path, part in zip(paths, (list(state)[::2], list(state)[1::2]), strict=True):
            torch.save({name: state[name] for name in part}, path)
    dist.barrier()  # until the files are there
    sizes = {name: tensor.nbytes for name, tensor in plain.state_dict().items()}
    whole, largest = sum(tensor.nbytes for tensor in state.values()), max(sizes.values())
    shards = sum(p[: math.ceil(len(p) / world_size)].nbytes for p in plain.parameters())
    # A whole tensor; the buffers, and what fill_buffers() makes them from.
    few = shards + largest + 3 * plain.positions.nbytes
    # On rank 0, the new layer, and what contiguous() copies.
    more = sizes["head.weight"] + sizes["head.bias"] + sizes["patches.weight"]
    with torch.no_grad():
        expected = plain(images)
    log(f"2 files of {whole} bytes; {largest} in the largest tensor")
    log("                   rank 0 reads    keeps   rank 1 reads    keeps   outputs off by")
    for name, load, right in [
        ("rank 0 reads", load_by_rank_0, True),
        ("every rank reads", load_on_every_rank, True),
        ("buffers forgotten", forget_buffers, False),
        ("strict=False", forget_head, False),
        ("not contiguous", send_as_it_is, False),
    ]:
        with CountBytes() as count, mock.patch.object(torch, "load", count.load):
            model = load(paths, device, mesh, plain.head)
        with torch.no_grad():
            off = ((model(images) - expected).norm() / expected.norm()).item()
        reads, keeps = zip(*gathered((count.read, count.most)), strict=True)
        log(f"{name:<19} {reads[0]:>11} {keeps[0]:>8} {reads[1]:>14} {keeps[1]:>8}   {off:.1e}")
        if not (off < 1e-6 if right else off > 0.1 or math.isnan(off)):
            raise RuntimeError(f"{name}: outputs off by {off}")
        lean = (
            reads[0] == whole
            and sum(reads[1:]) == 0
            and max(keeps[1:]) <= few
            and keeps[0] <= few + more
        )
        wasteful = min(reads) == whole and min(keeps) >= 2 * whole
        if not (wasteful if load is load_on_every_rank else lean):
            raise RuntimeError(f"{name}: reads {reads}, keeps {keeps}; lean is {few}")
    log("rank 0 alone reads the files; no rank keeps more than its shards and one tensor")


class CountBytes(TorchDispatchMode):
    """Count the bytes that this rank reads from a file, and the most that it keeps at a moment."""

    def __init__(self):
        super().__init__()
        self.read, self.mapped, self.kept, self.most = 0, set(), {}, 0

    def load(self, path, mmap=False, **options):
        """In place of torch.load()."""
        with _disable_current_modes():
            state = torch_load(path, mmap=mmap, **options)
        self.read += sum(tensor.nbytes for tensor in state.values())
        if mmap:
            self.mapped |= {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        return state

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # a DTensor calls operations on its shards: see those
        if function.name() == "c10d::broadcast_":
            # Copies, which do not count: Gloo's thread lets go of what it sends somewhat late.
            copies = [tensor.clone() for tensor in args[0]]
            _, work = function(copies, *args[1:])
            work.wait()
            result = [tensor.copy_(copy) for tensor, copy in zip(args[0], copies)], work
        else:
            result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if (
                type(tensor) in (torch.Tensor, nn.Parameter)
                and not tensor.is_meta
                and tensor.is_floating_point()
            ):  # the names are sent as uint8
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.mapped:
                    self.kept[storage.data_ptr()] = weakref.ref(storage)
        alive = [storage for kept in self.kept.values() if (storage := kept()) is not None]
        self.most = max(self.most, sum(storage.nbytes() for storage in alive))
        return result


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(relu(self.up(x)))


class YourModel(nn.Module):
    """It cuts an image into patches."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=8, stride=8)
        waves = torch.arange(PATCHES)[:, None] * torch.logspace(0, -3, WIDTH)
        self.register_buffer("positions", waves.sin(), persistent=False)  # in no file
        self.blocks = nn.Sequential(*(Layer() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(x).mean(dim=1))


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
