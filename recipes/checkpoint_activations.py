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
next block: a third more to compute, and no more gathers of weights. To compute less again and keep
more, pass checkpoint_wrapper(block, context_fn=keep_products), below.

    torchrun --standalone --nproc-per-node=2 recipes/checkpoint_activations.py

    [rank 0/2]                                kept  at once   off by  computed
    [rank 0/2] no checkpoint               8126464   6 of 6  0.0e+00      100%
    [rank 0/2] checkpoint, shard           1048576   1 of 6  0.0e+00      133%
    [rank 0/2] checkpoint, DDP             1048576   1 of 6  0.0e+00      133%
    [rank 0/2] keep_products               4980736   6 of 6  0.0e+00      100%
    [rank 0/2] each single operation       8126464   6 of 6  0.0e+00      100%
    [rank 0/2] the whole model              262144   6 of 6  0.0e+00      134%
    [rank 0/2] preserve_rng_state=False    1048576   1 of 6  2.8e-02      133%
    [rank 0/2] use_reentrant=True           262144   0 of 6  5.3e-01       35%
    [rank 0/2] checkpoint, compile, shard  1048576        -  0.0e+00  graphs compiled: 2
    [rank 0/2] shard, checkpoint, compile  1048576        -  0.0e+00  graphs compiled: 0
    [rank 0/2] checkpoint, compile, shard: 13% of the activations, and the same gradient

"Kept" are the bytes of activations between forward and backward. "At once" says how many blocks
have activations in memory at the same time. "Off by" is the gradient's distance from that without
checkpoints. "Computed" are the operations in matrix products, in forward and backward. The first
layer is frozen, as in fine-tuning. (Before torch 2.14, the count does not see the products, so
keep_products shows 1048576.)

The wrong ways: compile() of a checkpoint around a sharded block compiles nothing, without an error.
(If you do not compile, fully_shard may come first.) A checkpoint around each single operation
keeps as much as none: the input of one is the result of another. One around the whole model
computes all activations at once, a bit later. With preserve_rng_state=False, dropout draws other
masks the second time. (Compiled by "inductor", dropout draws other masks than uncompiled, in both
passes alike.) With use_reentrant=True, a block trains nothing if its input needs no gradient; see
pitfalls/reentrant_checkpoint.py. What forward counts is counted twice: leave BatchNorm outside.

The path of checkpoint_wrapper() is private. The public way is to call checkpoint(block, x,
use_reentrant=False), from torch.utils.checkpoint, in your model's forward(). The wrapper leaves the
names in state_dict() as they were, and not those in named_parameters().
"""

import gc
import inspect
import warnings
import weakref
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend  # private; only to count graphs
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # private
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

BLOCKS, WIDTH, ROWS = 6, 64, 512  # ROWS on each rank


def wrap(model, mesh, compiler=None, **options):
    """The right way. Make the optimizer after this. mesh: None for DDP.

    compiler: a backend of torch.compile, "inductor" by default there. None: do not compile.
    """
    for i, block in enumerate(model.blocks):
        # Its defaults are use_reentrant=False and preserve_rng_state=True.
        model.blocks[i] = checkpoint_wrapper(block, **options)
        if compiler:
            # In place. torch.compile(block) would add "_orig_mod." to the names in state_dict().
            model.blocks[i].compile(backend=compiler)
        if mesh:
            fully_shard(model.blocks[i], mesh=mesh)
    return fully_shard(model, mesh=mesh) if mesh else DDP(model, gradient_as_bucket_view=True)


def keep_products():
    """Right, too: keep the results of matrix products, and compute the rest again.

    Attention has an operation of its own, _scaled_dot_product_flash_attention, say.
    """
    return create_selective_checkpoint_contexts(
        [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    )


def shard(model, mesh):
    """Without checkpoints."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_first(model, mesh, compiler):
    """Wrong: no part of the model is compiled. (Without the compiler, it is right.)"""
    shard(model, mesh)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        model.blocks[i].compile(backend=compiler)
    return model


def wrap_operations(model, mesh):
    """Wrong: what a block computes between its layers is kept, as the inputs of checkpoints."""
    for block in model.blocks:
        for i, layer in enumerate(block):
            block[i] = checkpoint_wrapper(layer)
    return shard(model, mesh)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare()
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1 + dist.get_rank())  # rows of its own for each rank
    inputs = torch.randn(ROWS, WIDTH)
    # It stands for "inductor", which takes long: the same, up to the code for the device.
    counter = CompileCounterWithBackend("aot_eager")
    none, operations, whole = "no checkpoint", "each single operation", "the whole model"
    option = "respect_saved_tensors_hooks"  # from torch 2.14 on: the hooks below see all
    counted = {option: True} if option in inspect.signature(checkpoint).parameters else {}
    ways = {
        none: shard,
        "checkpoint, shard": wrap,
        "checkpoint, DDP": lambda model, mesh: wrap(model, None),
        "keep_products": partial(wrap, context_fn=keep_products, **counted),
        operations: wrap_operations,
        whole: lambda model, mesh: checkpoint_wrapper(shard(model, mesh)),
        "preserve_rng_state=False": partial(wrap, preserve_rng_state=False),
        "use_reentrant=True": partial(wrap, checkpoint_impl=CheckpointImpl.REENTRANT),
        "checkpoint, compile, shard": partial(wrap, compiler=counter),
        "shard, checkpoint, compile": partial(shard_first, compiler=counter),
    }
    log("                               kept  at once   off by  computed")
    kept, blocks, off, flops, graphs = {}, {}, {}, {}, {}
    for name, way in ways.items():
        compiled = "compile" in name
        dropout = 0 if compiled else 0.1  # for dropout, compiled blocks keep random states, too
        *_, expected = step(shard(new_model(dropout), mesh), inputs)
        torch.compiler.reset()  # forget the graphs of the way before
        counter.clear()
        model = way(new_model(dropout), mesh)
        kept[name], blocks[name], gradient = step(model, inputs, watch_blocks=not compiled)
        off[name] = (gradient - expected).norm() / expected.norm()
        graphs[name] = counter.frame_count
        if compiled:
            note = f"     -  {off[name]:.1e}  graphs compiled: {graphs[name]}"
        else:
            with FlopCounterMode(display=False) as flop_counter:
                step(model, inputs)
            flops[name] = flop_counter.get_total_flops()
            note = (
                f"{blocks[name]} of {BLOCKS}  {off[name]:.1e}      {flops[name] / flops[none]:4.0%}"
            )
        log(f"{name:<26} {kept[name]:>8}   {note}")
    # What the blocks and the head take in, and what the head gives back.
    inputs_only = (BLOCKS + 2) * inputs.nbytes
    right = "checkpoint, shard", "checkpoint, DDP", "checkpoint, compile, shard"
    claims = {
        "the right ways keep a block's input": {kept[way] for way in right} == {inputs_only},
        "keep_products() computes none again, and keeps less than all": (
            flops["keep_products"] == flops[none] and kept["keep_products"] < kept[none]
        ),
        "they have one block's activations at once": blocks[right[0]] == blocks[right[1]] == 1,
        "around operations, they keep as much as none": kept[operations] >= kept[none],
        "around the model, all at once": blocks[whole] == blocks[none] == BLOCKS,
        "they compute a third again": (1 < flops[right[0]] / flops[none] < 1.34),
        "two ways have another gradient": [way for way in ways if off[way] > 1e-6]
        == ["preserve_rng_state=False", "use_reentrant=True"],
        "only the right order compiles": [way for way in ways if graphs[way]] == [right[2]],
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")
    log(
        f"{right[2]}: {inputs_only / kept['no checkpoint']:.0%} of the activations, and the same"
        " gradient"
    )


def step(model, inputs, watch_blocks=False):
    """Return (bytes kept for backward(), most blocks with activations at once, gradient)."""
    kept, results, most = {}, [], 0

    def keep(tensor):
        """Note an activation, which counts once, whoever keeps it."""
        weights = {
            p.untyped_storage().data_ptr() for p in model.parameters() if not isinstance(p, DTensor)
        }
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def count_blocks(layer, args, output):
        nonlocal most
        if output.requires_grad:
            results.append(weakref.ref(output.untyped_storage()))
            alive = {result().data_ptr() for result in results if result() is not None}
            most = max(most, len(alive))

    for layer in model.modules():
        if watch_blocks and isinstance(layer, nn.Linear) and layer.out_features > WIDTH:
            layer.register_forward_hook(count_blocks)  # a block begins with this layer
    torch.manual_seed(dist.get_rank())  # dropout draws the same masks in each way
    with saved_tensors_hooks(keep, lambda tensor: tensor), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        loss = model(inputs).square().mean()
    bytes_kept = sum(kept.values())
    loss.backward()
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad
        for p in model.parameters()
        if p.requires_grad
    ]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return bytes_kept, most, torch.cat([g.flatten() for g in whole])


class Model(nn.Module):
    """Your model."""

    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # frozen, as in fine-tuning
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
                nn.Dropout(dropout),
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def new_model(dropout):
    torch.manual_seed(0)
    return Model(dropout)


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
