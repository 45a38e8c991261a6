"""How do I shard a pretrained model with FSDP2, when only rank 0 reads the file?

    with torch.device("meta"):  # names and shapes, no memory
        model = YourModel()
    for block in model.blocks:  # the layers of your model
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)  # memory for shards and buffers, without values
    reads = dist.get_rank() == 0
    state = torch.load(path, mmap=True, map_location="cpu", weights_only=True) if reads else {}
    state = fitting(model, state)  # below: checks names and shapes
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)  # all ranks call it
    send_buffers(model, YourModel)  # below: those that are in no file

With fully_shard (FSDP2), each rank (process) holds a shard, its part of each tensor. Rank 0 maps
the file: a tensor is read when it is used. It sends one whole tensor after the other. Each rank
keeps its part, and frees the rest. The package safetensors maps its files, too:
state = safetensors.torch.load_file(path) if reads else {}

A buffer is a tensor that is not trained. One with persistent=False, say a table of positions, is in
no file. So rank 0 builds the model once more, for these buffers, and sends them. Its weights go to
the meta device at once. So that takes little memory and time, and the other ranks need not wait.

    torchrun --standalone --nproc-per-node=2 recipes/pretrained_to_shards.py

    [rank 0/2] a file of 1009536 bytes, 115584 of them in the largest tensor
    [rank 0/2]                       rank 0 reads    keeps   rank 1 reads    keeps   outputs off by
    [rank 0/2] rank 0 reads               1009536   642432              0   630144   0.0e+00
    [rank 0/2] every rank reads           1009536  2025216        1009536  2025216   0.0e+00
    [rank 0/2] buffers forgotten          1009536   564096              0   630144   3.5e-01
    [rank 0/2] the file has ...        fitting()  without it   mended
    [rank 0/2] names with "module."     an error    an error   0.0e+00
    [rank 0/2] one name of two tied     an error    an error   0.0e+00
    [rank 0/2] a column for a weight    an error     3.4e-01
    [rank 0/2] a weight as a .t()        0.0e+00     2.1e-01
    [rank 0/2] rank 0 alone reads the file; no rank keeps more than its shards and one tensor

"Keeps" is the most bytes of weights and buffers that a rank held at one moment: its shards and the
tensor on its way. What is mapped does not count: the system can drop it, and read it again. The
next two rows are wrong. "Every rank reads": each holds the whole model, for a moment twice.
"Buffers forgotten": they keep what was in the memory, without an error.

The last rows show how far off the outputs are with other files. DistributedDataParallel (DDP)
writes names with "module.". Do not take strict=False then: it loads nothing, without an error.
torch does not compare the shapes of weights: a size of 1 fits all, others raise an error on some
ranks alone, and the rest wait. torch also scrambles a tensor that is not contiguous, such as one in
channels_last. fitting() raises its error on all ranks, and makes such a tensor contiguous.

An embedding and a head that are one tensor (tied) stay so if one call of fully_shard() takes both.
Files of safetensors mostly have one of the two names: give state the other one, too. A buffer that
several modules share, say a mask, becomes one for each in to_empty().
"""

import argparse
import gc
import math
import os
import sys
import tempfile
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold that
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import relu
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count bytes
from torch.utils._pytree import tree_leaves  # private, too

BLOCKS, WIDTH, VOCABULARY, POSITIONS = 6, 96, 301, 16  # 301: its shards differ in size
torch_load = torch.load  # see CountLoad


def load_by_rank_0(path, device, mesh, change=lambda state: None, check=True):
    """The right way."""
    model = shards_without_values(device, mesh)
    fill(model, path, change, check)
    send_buffers(model, Pretrained)
    return model


def shards_without_values(device, mesh):
    with torch.device("meta"):  # names and shapes, no memory
        model = Pretrained()
    shard_blocks(model, mesh)
    model.to_empty(device=device)
    return model


def shard_blocks(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the rest, here all that is tied


def fill(model, path, change=lambda state: None, check=True):
    """Give a model in shards the tensors of a file, which rank 0 alone reads. All ranks call it.

    change: changes the file's {name: tensor}, in place.
    """
    state = {}
    if dist.get_rank() == 0:
        # mmap: a tensor is read when it is sent; otherwise all are in memory at once.
        # map_location: otherwise tensors saved on a GPU go back to that GPU, all of them.
        state = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        change(state)
    if check:
        state = fitting(model, state)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def fitting(model, state):
    """Return rank 0's {name: tensor}, ready to be sent. It raises on all ranks if it does not fit.

    Without it, a size of 1 fits all, and another error can come on some of the ranks only.
    """
    shapes = {name: tensor.shape for name, tensor in get_model_state_dict(model).items()}
    found = {name: tensor.shape for name, tensor in state.items()}
    wrong = [sorted({name for name, _ in shapes.items() ^ found.items()})]
    dist.broadcast_object_list(wrong)  # what rank 0 has found
    if wrong[0]:
        raise RuntimeError(f"{len(wrong[0])} names or shapes in the file are not the model's:"
                           f" {', '.join(wrong[0][:4])} ...")
    # Of a .t() or channels_last tensor, the bytes would arrive in another order. Others stay.
    return {name: tensor.contiguous() for name, tensor in state.items()}


def send_buffers(model, build):
    """Fill the buffers that are in no file. All ranks call it. build: makes the model anew."""
    # Not by name: with checkpoint_wrapper(), state_dict() and named_buffers() have different ones.
    in_file = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    values = new_buffers(build) if dist.get_rank() == 0 else []
    for i, buffer in enumerate(all_buffers(model)):
        if id(buffer) not in in_file:
            if dist.get_rank() == 0:
                buffer.copy_(values[i])
            dist.broadcast(buffer, src=0)
    if empty := [name for name, p in model.named_parameters() if id(p) not in in_file]:
        raise RuntimeError(f"without values: {', '.join(empty)}")  # hooks can hide some


def new_buffers(build):
    """Return a new model's buffers. It is built with each weight on the meta device at once."""
    def to_meta(module, name, weight):
        if weight is not None and not weight.is_meta:
            return nn.Parameter(weight.to("meta"), weight.requires_grad)

    with (register_module_parameter_registration_hook(to_meta),  # for all modules built in here
          torch.random.fork_rng(devices=[])):  # else this rank's next random numbers are others
        return all_buffers(build())


def all_buffers(model):
    # What modules share comes once for each: to_empty() has given each a buffer of its own.
    return [buffer for _, buffer in model.named_buffers(remove_duplicate=False)]


def load_on_every_rank(path, device, mesh):
    """Wrong: each rank reads the whole file, and holds the whole model, for a moment twice."""
    model = Pretrained()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    shard_blocks(model, mesh)
    return model


def forget_buffers(path, device, mesh):
    """Wrong: the buffers that are in no file keep what was in the memory. No error."""
    model = with_zeros(shards_without_values(device, mesh))
    fill(model, path)
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
    torch.manual_seed(1)  # all ranks make the same weights and tokens
    plain, tokens = Pretrained(), torch.randint(VOCABULARY, (4, POSITIONS)).to(device)
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), path)
    dist.barrier()  # until the file is there
    in_file = {t.data_ptr(): t.nbytes for t in plain.state_dict().values()}  # what is tied: once
    whole, largest = sum(in_file.values()), max(in_file.values())
    shards = sum(p[:math.ceil(len(p) / world_size)].nbytes for p in plain.parameters())
    # The tensor on its way; buffers are whole on each rank, and rank 0 makes and sends others.
    few = shards + largest + 3 * sum(b.nbytes for b in plain.buffers())
    with torch.no_grad():
        expected = plain.to(device)(tokens)

    def off_from_plain(model):
        with torch.no_grad():
            return ((model(tokens) - expected).norm() / expected.norm()).item()

    log(f"a file of {whole} bytes, {largest} of them in the largest tensor")
    log("                      rank 0 reads    keeps   rank 1 reads    keeps   outputs off by")
    for name, way, right in [
            ("rank 0 reads", load_by_rank_0, True), ("every rank reads", load_on_every_rank, True),
            ("buffers forgotten", forget_buffers, False)]:
        with CountLoad() as count, mock.patch.object(torch, "load", count.load):
            model = way(path, device, mesh)
        off = off_from_plain(model)
        reads, keeps = zip(*gathered((sum(count.read.values()), count.most)), strict=True)
        log(f"{name:<22} {reads[0]:>11} {keeps[0]:>8} {reads[1]:>14} {keeps[1]:>8}   {off:.1e}")
        if not (off < 1e-6 if right else off > 0.1):  # so that nan fails, too
            raise RuntimeError(f"{name}: outputs off by {off}")
        lean = reads[0] == whole and sum(reads[1:]) == 0 and max(keeps) <= few
        wasteful = min(reads) == whole and min(keeps) >= 2 * whole
        if not (wasteful if way is load_on_every_rank else lean):
            raise RuntimeError(f"{name}: reads {reads}, keeps {keeps}; lean is {few}")

    def outcome(*load):
        try:
            model = load_by_rank_0(path, device, mesh, *load)
            tied = "" if model.head.weight is model.embedding.weight else ", not tied"
            text = f"{off_from_plain(model):.1e}{tied}"
        except RuntimeError:
            text = "an error"
        [text] = set(gathered(text))  # the same on all ranks
        return text

    log("the file has ...        fitting()  without it   mended")
    for name, spoil, mend in [('names with "module."', add_prefix, take_prefix_off),
                              ("one name of two tied", drop_second_name, add_second_name),
                              ("a column for a weight", cut_weight, None),
                              ("a weight as a .t()", transpose_weight, None)]:
        found, bare = outcome(spoil), outcome(spoil, False)
        mended = outcome(chain(spoil, mend)) if mend else ""
        log(f"{name:<22} {found:>10} {bare:>11}   {mended}".rstrip())
        right = bare == "an error" and float(mended) < 1e-6 if mend else float(bare) > 0.01
        if not right or (found != "an error" if spoil is not transpose_weight
                         else not float(found) < 1e-6):
            raise RuntimeError(f"{name}: this is not what this file says")
    log("rank 0 alone reads the file; no rank keeps more than its shards and one tensor")


class CountLoad(TorchDispatchMode):
    """Count the bytes that this rank reads from a file, and the most that it keeps at a moment."""

    def __init__(self):
        super().__init__()
        self.read, self.mapped, self.kept, self.most = {}, {}, {}, 0

    def load(self, path, mmap=False, **options):
        """In place of torch.load()."""
        with mock.patch.object(self, "look", lambda *_: None) if mmap else nullcontext():
            state = torch_load(path, mmap=mmap, **options)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in state.values()}
        if mmap:
            self.mapped = storages  # the count comes when they are used
        else:
            self.read = {address: storage.nbytes() for address, storage in storages.items()}
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
        real = [t for t in tree_leaves((args, result)) if type(t) in (torch.Tensor, nn.Parameter)
                and t.is_floating_point() and not t.is_meta]  # names are sent as uint8
        self.look(function.name(), [t.untyped_storage() for t in real])
        return result

    def look(self, name, storages):
        for storage in storages:
            address = storage.data_ptr()
            if address not in self.mapped:
                self.kept[address] = weakref.ref(storage)
            elif "c10d" in name or "copy" in name:  # others only make views
                self.read[address] = storage.nbytes()
        alive = [storage for kept in self.kept.values() if (storage := kept()) is not None]
        self.most = max(self.most, sum(storage.nbytes() for storage in alive))


def with_zeros(model):
    """Memory that nobody has filled often holds zeros. Here always: each run prints the same."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().zero_()
    return model


def add_prefix(state):
    """As in a file saved with the names of DDP."""
    for name in list(state):
        state[f"module.{name}"] = state.pop(name)


def take_prefix_off(state):
    consume_prefix_in_state_dict_if_present(state, "module.")


def drop_second_name(state):
    """As in a file of safetensors."""
    del state["head.weight"]


def add_second_name(state):
    state["head.weight"] = state["embedding.weight"]


def chain(*functions):
    return lambda state: [function(state) for function in functions]


def cut_weight(state):
    state["blocks.0.up.weight"] = state["blocks.0.up.weight"][:, :1].contiguous()


def transpose_weight(state):
    """As a weight that was transposed before torch.save(), or one in channels_last."""
    state["blocks.0.up.weight"] = state["blocks.0.up.weight"].t().contiguous().t()


class PretrainedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.randn(WIDTH))  # as BatchNorm's: in the file

    def forward(self, x):
        return x + self.down(relu(self.up(x - self.mean)))


class Pretrained(nn.Module):
    """Your model. Its embedding and its head are one tensor: tied."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        waves = torch.arange(POSITIONS)[:, None] * torch.logspace(0, -3, WIDTH)
        self.register_buffer("positions", waves.sin(), persistent=False)  # in no file
        self.blocks = nn.ModuleList(PretrainedLayer() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
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
