"""The activations do not fit on my GPU: what do I wrap first, checkpoint, compile or fully_shard?

    for i, block in enumerate(model.blocks):  # the layers of your model
        model.blocks[i] = checkpoint_wrapper(block)  # 1. keep its input only
        # 2. if you compile: model.blocks[i].compile()
        fully_shard(model.blocks[i], mesh=mesh)  # 3. with DDP, leave this line out
    fully_shard(model, mesh=mesh)  # with DDP: model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters())

Activations are the results that the forward pass keeps for backward(). They grow with the batch.
fully_shard (FSDP2) spreads weights, gradients and optimizer state over the ranks (processes), but
each rank keeps all activations of its own rows. With activation checkpointing, a block keeps only
its input. backward() computes the block's forward pass once more, and frees the results before the
next block. That takes time, but no more gathers: the weights gathered for backward() serve both.

Whatever else the forward pass does, it does twice. Exchanges inside the block (of tensor parallel,
SyncBatchNorm, experts) run again, unless backward() needs nothing that comes after them. So do
updates of buffers: BatchNorm's running mean, counters of experts' load, histories of FP8 scales.
The gradient stays right, but the model evaluates differently. Leave such a layer outside of the
checkpoint, or use keep_buffers() below. Compiled blocks updated their buffers once (torch 2.15).

    torchrun --standalone --nproc-per-node=2 recipes/checkpoint_activations.py

    [rank 0/2]                               kept  at once   whole gathers  off by
    [rank 0/2] no checkpoint              8126468  8650760  165632      13 0.0e+00
    [rank 0/2] checkpoint, shard          1048580  2703624  165632      13 0.0e+00
    [rank 0/2] checkpoint() in forward    1048580  2703624  165632      13 0.0e+00
    [rank 0/2] checkpoint, DDP            1048580  2686984  827392       0 0.0e+00
    [rank 0/2] each single operation      8126468  8650760  165632      13 0.0e+00
    [rank 0/2] the whole model             131076  8601864  827392      13 0.0e+00
    [rank 0/2] preserve_rng_state=False   1048580  2703624  165632      13 6.9e-02
    [rank 0/2] checkpoint, compile, shard: graphs compiled: 1, 16% kept, off by 0.0e+00
    [rank 0/2] shard, checkpoint, compile: graphs compiled: 0, 16% kept, off by 0.0e+00
    [rank 0/2] BatchNorm in a block: running mean off by 9.0e-01; with keep_buffers(): 0.0e+00
    [rank 0/2] use_reentrant=True, first layer frozen: 24 of 26 weights get no gradient; False: 0
    [rank 0/2] in named_parameters(): blocks.0._checkpoint_wrapped_module.up.weight
    [rank 0/2] checkpoint, shard: 13% of the activations, the same gathers and gradient; not buffers

"Kept" are the bytes of activations between forward and backward, "at once" is the most of
activations and gradients at any moment of a step, "whole" the most bytes of whole weights.
"Gathers" are the exchanges of weights in a step. "Off by" is the gradient's distance from that
without checkpoints. The models have dropout; those that are compiled here have none, and there
"kept" includes a few whole weights.

In this order all three work. Without compile, fully_shard may also come first (tried with torch
2.15). What does not work is to compile a checkpoint around a sharded block: compile() compiles
nothing then, without an error. checkpoint_wrapper() is part of torch, but its path is private.
torchtitan uses it, in this order. It leaves the names in state_dict() as they were, and not those
in named_parameters(). For the public way, call checkpoint(block, x, use_reentrant=False) from
torch.utils.checkpoint in your model's forward(), in place of block(x).

The wrong ways: a checkpoint around each single operation (nn.Linear, ...) keeps as much as none,
since the input of one is the result of another. Around the parts of a block, such as attention and
MLP, it is fine. A checkpoint around the whole model computes all activations at once, a bit later,
and keeps all weights whole meanwhile. With preserve_rng_state=False, dropout draws other masks the
second time. With use_reentrant=True, a block whose input needs no gradient (because the layer
before it is frozen, say) trains nothing, and only warns. With DDP, it may also give a layer a wrong
gradient (pitfalls/reentrant_checkpoint.py).
"""

import argparse
import contextlib
import gc
import os
import sys
import time
import warnings
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch._dynamo import lookup_backend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # private
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count bytes
from torch.utils._pytree import tree_leaves  # private, too
from torch.utils.checkpoint import checkpoint

BLOCKS, WIDTH, ROWS = 6, 64, 512  # ROWS on each rank


def wrap(model, mesh, compiler=None, **options):
    """The right way. Make the optimizer after this.

    compiler: a backend of torch.compile, "inductor" by default there. None: do not compile.
    """
    for i, block in enumerate(model.blocks):
        # Its defaults are use_reentrant=False and preserve_rng_state=True.
        model.blocks[i] = checkpoint_wrapper(block, **options)
        if compiler:
            # In place. torch.compile(block) would add "_orig_mod." to the names in state_dict().
            model.blocks[i].compile(backend=compiler)
        fully_shard(model.blocks[i], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_for_ddp(model, mesh):
    """Right, too, for a model whose weights do fit on each rank."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return DDP(model, gradient_as_bucket_view=True)


def shard(model, mesh):
    """Without checkpoints."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_first(model, mesh, compiler=None):
    """Right without a compiler. With one, it is wrong: no part of the model is compiled."""
    shard(model, mesh)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        if compiler:
            model.blocks[i].compile(backend=compiler)
    return model


def in_forward(model, mesh):
    """Right, too, and public: Model.forward() calls checkpoint(block, x, use_reentrant=False)."""
    model.checkpoints = True
    return shard(model, mesh)


def keep_buffers(block):
    """Return a context_fn for checkpoint_wrapper(block): computing again changes copies of buffers.

    For registered buffers, and blocks that are not compiled: those refuse it.
    """
    @contextlib.contextmanager
    def second_pass():
        kept = [(layer, name, buffer) for layer in block.modules()
                for name, buffer in layer.named_buffers(recurse=False)]
        for layer, name, buffer in kept:
            setattr(layer, name, buffer.clone())
        try:
            yield
        finally:  # torch leaves by an exception, as soon as it has all that backward() needs
            for layer, name, buffer in kept:
                setattr(layer, name, buffer)

    return lambda: (contextlib.nullcontext(), second_pass())


def wrap_operations(model, mesh):
    """Wrong: what a block computes between its layers is kept, as the inputs of checkpoints."""
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            setattr(block, name, checkpoint_wrapper(layer))
    return shard(model, mesh)


def wrap_model(model, mesh):
    """Wrong: backward() begins with the forward pass of all blocks, and frees none of them."""
    return checkpoint_wrapper(shard(model, mesh))


def other_masks(model, mesh):
    """Wrong, if there is dropout."""
    return wrap(model, mesh, preserve_rng_state=False)


def reentrant(model, mesh):
    """Wrong, if the first block's input needs no gradient. (This is use_reentrant=True.)"""
    return wrap(model, mesh, checkpoint_impl=CheckpointImpl.REENTRANT)


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare(device)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(1 + dist.get_rank())  # rows of its own for each rank
    inputs = torch.randn(ROWS, WIDTH).to(device)
    log("                              kept  at once   whole gathers  off by")
    found, expected = {}, None
    for name, way in [
            ("no checkpoint", shard), ("checkpoint, shard", wrap),
            ("checkpoint() in forward", in_forward), ("checkpoint, DDP", wrap_for_ddp),
            ("each single operation", wrap_operations),
            ("the whole model", wrap_model), ("preserve_rng_state=False", other_masks)]:
        watch, gradient = step(way(new_model(device), mesh), inputs)
        found[name], expected = watch, gradient if expected is None else expected
        off = ((gradient - expected).norm() / expected.norm()).item()
        log(f"{name:<25} {watch.kept:>8} {watch.most:>8} {watch.whole:>7} {watch.gathers:>7}"
            f" {off:>7.1e}")
        # What the blocks and the head take in, what the head gives back, and the loss.
        inputs_only = watch.kept == (BLOCKS + 2) * inputs.nbytes + inputs.itemsize
        if inputs_only == (way in (shard, wrap_operations, wrap_model)):
            raise RuntimeError(f"{name}: {watch.kept} bytes kept, not what this file says")
        if (off < 1e-6) == (way is other_masks):
            raise RuntimeError(f"{name}: the gradient is not what this file says")
        if watch.gathers != (0 if way is wrap_for_ddp else found["no checkpoint"].gathers):
            raise RuntimeError(f"{name}: other gathers than without checkpoints")
    none, right, operations, whole = (found[name] for name in (
        "no checkpoint", "checkpoint, shard", "each single operation", "the whole model"))
    if not (right.most < none.most / 2 and right.whole == none.whole):
        raise RuntimeError("checkpoints around the blocks do not keep a step small")
    if not (operations.kept == none.kept and whole.most > 0.9 * none.most
            and whole.whole > 2 * none.whole):
        raise RuntimeError("a checkpoint in a wrong place does not do what this file says")
    show_compile(device, mesh, inputs)
    show_buffers(device, mesh, inputs)
    show_reentrant(device, mesh, inputs)
    show_names(device, mesh)
    log(f"checkpoint, shard: {right.kept / none.kept:.0%} of the activations, the same gathers and"
        " gradient; not buffers")


def show_compile(device, mesh, inputs):
    none, expected = step(shard(new_model(device, dropout=0), mesh), inputs, watch=Saved)
    for name, way in [("checkpoint, compile, shard", wrap),
                      ("shard, checkpoint, compile", shard_first)]:
        graphs = []

        def compiler(graph, example_inputs, graphs=graphs):
            """Stands for "inductor", which takes long: the same up to the code for the device.

            Not for dropout: without that code, backward() draws other masks.
            """
            graphs.append(graph)
            return lookup_backend("aot_eager")(graph, example_inputs)

        torch.compiler.reset()  # forget the graphs of the way before
        saved, gradient = step(way(new_model(device, 0), mesh, compiler), inputs, watch=Saved)
        share, off = saved.kept / none.kept, ((gradient - expected).norm() / expected.norm()).item()
        log(f"{name}: graphs compiled: {len(graphs)}, {share:.0%} kept, off by {off:.1e}")
        if bool(graphs) != (way is wrap) or share > 0.25 or off > 1e-6:
            raise RuntimeError(f"{name}: other graphs or bytes than this file says")


def show_buffers(device, mesh, inputs):
    means, gradients = [], []
    for way in (shard, wrap,
                lambda model, mesh: wrap(model, mesh, context_fn=keep_buffers(model.blocks[0]))):
        model = new_model(device)
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()).to(device)
        model.blocks = nn.ModuleList([block])
        way(model, mesh)(inputs).square().mean().backward()
        means.append(flat([block[1].running_mean]))
        gradients.append(flat([p.grad for p in model.parameters()]))
    twice, kept = (((mean - means[0]).norm() / means[0].norm()).item() for mean in means[1:])
    log(f"BatchNorm in a block: running mean off by {twice:.1e}; with keep_buffers(): {kept:.1e}")
    if not all((g - gradients[0]).norm() < 1e-6 * gradients[0].norm() for g in gradients):
        raise RuntimeError("BatchNorm: the gradient is not what this file says")
    if twice < 0.5 or kept > 1e-6:
        raise RuntimeError("BatchNorm: the running means are not what this file says")


def show_reentrant(device, mesh, inputs):
    without = {}
    for way in wrap, reentrant:
        model = new_model(device)
        model.first.requires_grad_(False)
        model = way(model, mesh)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
            model(inputs).square().mean().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        without[way] = sum(p.grad is None for p in trained)
    log(f"use_reentrant=True, first layer frozen: {without[reentrant]} of {len(trained)} weights"
        f" get no gradient; False: {without[wrap]}")
    if without[wrap] or not without[reentrant]:
        raise RuntimeError("use_reentrant: other weights train than this file says")


def show_names(device, mesh):
    model = wrap(new_model(device), mesh)
    named = [name for name, _ in model.named_parameters()]
    saved = list(model.state_dict())
    log(f"in named_parameters(): {named[2]}")
    if saved != list(new_model("cpu").state_dict()) or "_checkpoint_wrapped" not in named[2]:
        raise RuntimeError("the names are not what this file says")


def step(model, inputs, watch=None):
    """Return what a step did (a Watch, or another class, if given), and its gradient, whole."""
    for warm in (True, True, False):  # FSDP2 and DDP take memory in the first two, and keep it
        for p in model.parameters():
            p.grad = None
        torch.manual_seed(dist.get_rank())  # dropout draws the same masks in each way
        seen = None if warm else (watch or Watch)(model)
        with seen or contextlib.nullcontext():
            loss = model(inputs).square().mean()
            if seen:
                seen.kept = seen.alive()
            loss.backward()
        del loss
    return seen, flat([p.grad for p in model.parameters()])


class Watch(TorchDispatchMode):
    """Watches the memory of all results inside a "with".

    On a GPU, torch.accelerator.max_memory_allocated() says what all of it needs together.
    """

    def __init__(self, model):
        super().__init__()
        self.model, self.memory, self.others = model, {}, set()
        self.most = self.whole = self.gathers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor calls this again, with its shards
        result = function(*args, **(kwargs or {}))
        inputs, name = self.storages((args, kwargs)), function.name()
        if "c10d" in name:  # a collective: these are weights or gradients on their way
            self.gathers += "allgather" in name
            for key in inputs:
                self.memory.pop(key, None)
        else:
            new = {key: s for key, s in self.storages(result).items() if key not in inputs}
            self.memory.update((key, weakref.ref(s)) for key, s in new.items())
        self.most = max(self.most, self.alive())
        whole = sum(p.untyped_storage().nbytes() for p in self.model.parameters()
                    if not isinstance(p, DTensor))
        self.whole = max(self.whole, whole)
        return result

    @staticmethod
    def storages(values):
        found = [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
        return {storage._cdata: storage for storage in found}

    def alive(self):
        """Return the bytes of what is in use: an activation counts once, whoever keeps it."""
        self.memory = {key: s for key, s in self.memory.items() if s() is not None}
        return sum(s().nbytes() for s in self.memory.values())


def flat(weights):
    """Return the weights, of a model or in a list, as one tensor on the CPU, whole.

    Shards are gathered: then all ranks must call it.
    """
    tensors = weights.parameters() if isinstance(weights, nn.Module) else weights
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole]).cpu()


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Holds what autograd saves inside a "with". torch compiles nothing under a Watch."""

    def __init__(self, model):
        super().__init__(self.note, lambda tensor: tensor)
        self.storages = {}

    def note(self, tensor):
        self.storages |= Watch.storages(tensor)
        return tensor

    def alive(self):
        return sum(storage.nbytes() for storage in self.storages.values())


class FeedForward(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(gelu(self.up(x))))


class Model(nn.Module):
    """Your model."""

    def __init__(self, dropout):
        super().__init__()
        self.first, self.checkpoints = nn.Linear(WIDTH, WIDTH), False
        self.blocks = nn.ModuleList(FeedForward(dropout) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def new_model(device, dropout=0.1):
    torch.manual_seed(0)
    return Model(dropout).to(device)


# ---- Helpers that are no part of the lesson ----


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
