"""How do I shard a pretrained model with FSDP2, when only rank 0 reads the file?

    with torch.device("meta"):  # names and shapes, no memory
        model = YourModel()
    for block in model.blocks:  # the layers of your model
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)  # memory for shards and buffers, without values
    fill_buffers(model, YourModel)  # below: some are in no file
    reads = dist.get_rank() == 0
    state = torch.load(path, mmap=True, map_location="cpu", weights_only=True) if reads else {}
    state = {name: tensor.contiguous() for name, tensor in state.items()}  # or scrambled: see below
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)  # all ranks call it

With fully_shard (FSDP2), each rank (process) holds a shard, its part of each weight. Rank 0 maps
the file: a tensor is read when it is used. It sends one whole tensor after the other. Each rank
keeps its part, and frees the rest. The package safetensors maps its files, too:
state = safetensors.torch.load_file(path) if reads else {}

    torchrun --standalone --nproc-per-node=2 recipes/pretrained_to_shards.py

    [rank 0/2] a file of 1082548 bytes, 115584 of them in the largest tensor
    [rank 0/2]                    rank 0 reads    keeps   rank 1 reads    keeps   outputs off by
    [rank 0/2] rank 0 reads            1082548   675484              0   675484   0.0e+00
    [rank 0/2] every rank reads        1082548  2171240        1082548  2171240   0.0e+00
    [rank 0/2] buffers forgotten       1082548   621340              0   663196   7.4e-01
    [rank 0/2] not contiguous          1082548   675484              0   675484   3.5e-01
    [rank 0/2] rank 0 alone reads the file; no rank keeps more than its shards and one tensor

"Keeps" is the most bytes of weights and buffers that a rank held at one moment: its shards and one
whole tensor. What is mapped does not count: the system can drop it, and read it again. The other
ways are wrong:

- Every rank reads: each holds the whole model, for a moment twice.
- Buffers forgotten: a buffer is a tensor that is not trained. One with persistent=False, say a
  table of positions, is in no file. It keeps what was in the memory, without an error.
- Not contiguous: the file has a weight in channels_last. torch sends its bytes in that order, and
  the other ranks read them in the usual one, without an error. A weight saved as a .t() is also
  scrambled with Gloo; with NCCL it is an error on rank 0 alone. contiguous() copies such weights,
  on rank 0, and leaves the others in the file.

torch compares the names with the model's, but not the shapes of the weights. A model in
DistributedDataParallel (DDP) saves names with "module.":
torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.") takes that off. Do
not pass strict=False instead: it loads nothing, without an error. An embedding and a head that are
one tensor (tied) stay so if one call of fully_shard() takes both. Files of safetensors mostly have
one of the two names: give state the other one, too.
"""

import argparse
import gc
import math
import os
import sys
import tempfile
import time
import weakref
from datetime import timedelta
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


def load_by_rank_0(path, device, mesh):
    """The right way."""
    model = shards_without_values(device, mesh)
    fill_buffers(model, Pretrained)  # some are in no file
    state = read_on_rank_0(path)
    send(model, {name: tensor.contiguous() for name, tensor in state.items()})
    return model


def shards_without_values(device, mesh):
    with torch.device("meta"):  # names and shapes, no memory
        model = Pretrained()
    shard(model, mesh)
    model.to_empty(device=device)
    return model


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


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


def read_on_rank_0(path):
    if dist.get_rank() != 0:
        return {}
    # mmap: a tensor is read when it is sent; otherwise all are in memory at once.
    # map_location: otherwise tensors saved on a GPU go back to that GPU, all of them.
    return torch.load(path, mmap=True, map_location="cpu", weights_only=True)


def send(model, state):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)  # all ranks call it


def load_on_every_rank(path, device, mesh):
    """Wrong: each rank reads the whole file, and holds the whole model, for a moment twice."""
    model = Pretrained()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    shard(model, mesh)
    return model


def forget_buffers(path, device, mesh):
    """Wrong: the buffers that are in no file keep what was in the memory. No error."""
    model = shards_without_values(device, mesh)
    model.positions.zero_()  # new memory often has zeros; here always: each run prints the same
    send(model, {name: tensor.contiguous() for name, tensor in read_on_rank_0(path).items()})
    return model


def send_as_it_is(path, device, mesh):
    """Wrong: the bytes of a weight in channels_last arrive in another order. No error."""
    model = shards_without_values(device, mesh)
    fill_buffers(model, Pretrained)
    send(model, read_on_rank_0(path))
    return model


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    with tempfile.TemporaryDirectory() as folder:
        shared = [os.path.join(folder, "pretrained.pt")]
        dist.broadcast_object_list(shared)  # the path of rank 0's file
        compare_loads(shared[0], device)
        dist.barrier()  # before rank 0 removes it
    gc.collect()  # otherwise what is left of the model can abort the process at its exit
    dist.destroy_process_group()


def compare_loads(path, device):
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    torch.manual_seed(1)  # all ranks make the same weights and images
    plain, images = Pretrained(), torch.randn(4, 3, 32, 32).to(device)
    state = plain.state_dict()
    state["patches.weight"] = state["patches.weight"].to(memory_format=torch.channels_last)
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()  # until the file is there
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    whole, largest = sum(sizes.values()), max(sizes.values())
    shards = sum(p[:math.ceil(len(p) / world_size)].nbytes for p in plain.parameters())
    # A whole tensor; the buffers, and what fill_buffers() makes them from.
    few = shards + largest + 3 * plain.positions.nbytes
    with torch.no_grad():
        expected = plain.to(device)(images)

    log(f"a file of {whole} bytes, {largest} of them in the largest tensor")
    log("                   rank 0 reads    keeps   rank 1 reads    keeps   outputs off by")
    for name, load, right in [
            ("rank 0 reads", load_by_rank_0, True), ("every rank reads", load_on_every_rank, True),
            ("buffers forgotten", forget_buffers, False), ("not contiguous", send_as_it_is, False)]:
        with CountBytes() as count, mock.patch.object(torch, "load", count.load):
            model = load(path, device, mesh)
        with torch.no_grad():
            off = ((model(images) - expected).norm() / expected.norm()).item()
        reads, keeps = zip(*gathered((count.read, count.most)), strict=True)
        log(f"{name:<19} {reads[0]:>11} {keeps[0]:>8} {reads[1]:>14} {keeps[1]:>8}   {off:.1e}")
        if not (off < 1e-6 if right else off > 0.1):  # so that nan fails, too
            raise RuntimeError(f"{name}: outputs off by {off}")
        lean = (reads[0] == whole and sum(reads[1:]) == 0 and max(keeps[1:]) <= few
                and keeps[0] <= few + sizes["patches.weight"])  # contiguous() makes a copy
        wasteful = min(reads) == whole and min(keeps) >= 2 * whole
        if not (wasteful if load is load_on_every_rank else lean):
            raise RuntimeError(f"{name}: reads {reads}, keeps {keeps}; lean is {few}")
    log("rank 0 alone reads the file; no rank keeps more than its shards and one tensor")


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
            self.mapped = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
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
            if (type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta
                    and tensor.is_floating_point()):  # the names are sent as uint8
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.mapped:
                    self.kept[storage.data_ptr()] = weakref.ref(storage)
        alive = [storage for kept in self.kept.values() if (storage := kept()) is not None]
        self.most = max(self.most, sum(storage.nbytes() for storage in alive))
        return result


class PretrainedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(relu(self.up(x)))


class Pretrained(nn.Module):
    """Your model. This one cuts an image into patches."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=8, stride=8)
        waves = torch.arange(PATCHES)[:, None] * torch.logspace(0, -3, WIDTH)
        self.register_buffer("positions", waves.sin(), persistent=False)  # in no file
        self.blocks = nn.Sequential(*(PretrainedLayer() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(x).mean(dim=1))


# ---- Helpers that are no part of the lesson ----


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def pick_device(local_rank):
    """Return (device, backend): a GPU for each process and its backend, or the CPU and Gloo."""
    kind = torch.accelerator.current_accelerator()  # cuda (ROCm's name, too), xpu, mps, or None
    if count_gpus():
        torch.accelerator.set_device_index(local_rank)  # else each process takes memory on GPU 0
        return torch.device(kind.type, local_rank), dist.get_default_backend_for_device(kind)
    why = ""
    if torch.accelerator.is_available():
        why = f"no backend exchanges tensors of {kind.type}"
    elif torch.cuda.device_count():  # the driver counts GPUs, but torch has none
        why = f"torch cannot use its GPU: is the driver too old for CUDA {torch.version.cuda}?"
    if why and local_rank == 0:
        print(f"note: this machine takes the CPU: {why}\n", end="", flush=True)
    return torch.device("cpu"), "gloo"


def count_gpus():
    """Return how many GPUs, or other accelerators, the ranks on this machine can use."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    # For Apple's GPUs (mps) torch names Gloo, but Gloo exchanges tensors on the CPU alone.
    carried = kind and dist.Backend.default_device_backend_map.get(kind.type, "gloo") != "gloo"
    return torch.accelerator.device_count() if carried else 0


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    """Stop if the way of starting cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
