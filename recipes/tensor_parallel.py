"""How do I split a single layer over several GPUs?

    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {
        "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel(),  # a pair
        "first": ColwiseParallel(output_layouts=Replicate())})  # a layer without a partner
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

A mesh is a table of ranks (processes), here with two in each row: start an even number. Along
"tp", the ranks of a group each hold a part of every matrix, as a DTensor. They compute each layer
together, from the same rows of data: tensor parallelism. Along "dp", the groups take different
rows, and fully_shard (FSDP2) spreads the weights over the groups. Start from the same weights on
all ranks. Try shard_with_fsdp2.py first: this here is for a block that is too large for it, or a
batch that cannot be divided further.

    torchrun --standalone --nproc-per-node=4 recipes/tensor_parallel.py

    [rank 0/4] 1 x 4, 16648 of 66208 weights on a rank: gradient off by 1.8e-07, weights by 3.4e-06
    [rank 0/4] 1 x 4, different rows on each rank: gradient off by 1.0e+00, no error
    [rank 0/4] 1 x 4, dropout seeded by rank: a group's outputs differ by 0.97, by dp rank: by 0.00
    [rank 0/4] 1 x 4, layer outside the plan, clip_grad_norm_: "got mixed torch.Tensor and DTensor"
    [rank 0/4] 1 x 4, layer outside the plan, clip_by_mesh: gradient off by 1.5e-07
    [rank 0/4] 2 x 2, 16584 of 66208 weights on a rank: gradient off by 2.3e-07, weights by 1.6e-06
    [rank 0/4] 2 x 2, different rows on each rank: gradient off by 7.7e-01, no error
    [rank 0/4] 2 x 2, dropout seeded by rank: a group's outputs differ by 0.93, by dp rank: by 0.00
    [rank 0/4] 2 x 2, layer outside the plan, clip_grad_norm_: "must have the same mesh"
    [rank 0/4] 2 x 2, layer outside the plan, clip_by_mesh: gradient off by 2.3e-07
    [rank 0/4] 2 x 2, DDP around split layers: 0 of 10 tensors get a gradient, parameters() has 0
    [rank 0/4] DDP              529664 bytes in a step with 120 rows,  529664 with 480
    [rank 0/4] FSDP2            777856 bytes in a step with 120 rows,  777856 with 480
    [rank 0/4] tensor parallel  276480 bytes in a step with 120 rows, 1105920 with 480
    [rank 0/4] 4 ranks train like one process; only the bytes of tensor parallel grow with the batch

1 x 4 is one group of four ranks, 2 x 2 is two groups of two. "Off by" compares with one process.
All ranks of a group need the same rows: where DDP counts by rank, count by the place along "dp",
mesh["dp"].get_local_rank(), of mesh["dp"].size(). DistributedSampler counts by rank, unless you
pass it num_replicas and rank: no error, a wrong gradient. Seed dropout alike, too: the ranks of a
group must drop the same units of what they all hold. Between "up" and "down", each rank holds other
hidden units, and equal masks mean less variety: draw those from a torch.Generator() of their own,
seeded with seed_of_group(mesh, step) * mesh["tp"].size() + mesh["tp"].get_local_rank().

A layer outside the plan trains, but its gradient is a plain tensor, or is on another mesh.
clip_grad_norm_ then fails. Give the layer a place in the plan, or, if it cannot be split (a
LayerNorm, say), clip with clip_by_mesh below. To train several groups, use fully_shard. DDP can
wrap split layers, as DDP(model, device_mesh=mesh["dp"]), but an optimizer made before trains
nothing: its parameters never get a gradient. After the first forward pass parameters() and
state_dict() are empty: clipping does nothing, a save is empty. None of this raises an error.

The bytes are the whole tensors of the exchanges that a rank takes part in. An all-reduce counts
twice, since it is a reduce-scatter and an all-gather. DDP exchanges gradients, and FSDP2 weights,
too. Tensor parallelism exchanges activations, and each layer waits for them: keep a group on one
machine, with fast links.

With a pipeline, too: three_dimensions.py. Now write it yourself: exercises/15_tensor_parallel.py.
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections import OrderedDict, defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count bytes
from torch.utils._pytree import tree_leaves  # private, too

# The hidden size must be a multiple of the ranks that share a layer. If it is not, torch fails with
# "a and b must have same reduction dim". All groups must take equally many rows: their gradients
# are averaged.
WIDTH, HIDDEN, ROWS = 64, 240, 120
SEED, STEPS, MAX_NORM = 0, 10, 0.1


class FeedForward(nn.Module):
    """Stands for your own block: two matrices and an activation, as in a transformer."""

    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(gelu(self.up(x))))


BLOCKS = {  # names in the model, with * for any: how the layer is split
    # Each rank computes some columns of the hidden layer. It needs no others, since gelu acts on
    # each number alone. Its rows of the second matrix fit its columns, and give it a part of each
    # sum. An all-reduce adds up the parts: one exchange for two matrices.
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}
# A layer without such a partner: the ranks gather its columns, since the next one needs them all.
PLAN = BLOCKS | {"first": ColwiseParallel(output_layouts=Replicate())}


def parallelize(model, mesh, plan=PLAN):
    """The right way. model: with the same weights on all ranks; it is changed in place.

    mesh: its dimensions are "dp" and "tp", in this order. The ranks of a tp group then follow each
    other: they are on one machine if their number divides its number of GPUs. plan: has an entry
    for each layer with weights, or clip with clip_by_mesh.
    """
    parallelize_module(model, mesh["tp"], plan)
    if mesh["dp"].size() > 1:  # several groups: share out between them what each rank has left
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])  # the layers that are in no block
    return model


def share_of_group(rows, mesh):
    """The right rows: all ranks of a tp group take the same ones."""
    # With a loader: DistributedSampler(data, num_replicas=dp.size(), rank=dp.get_local_rank())
    dp = mesh["dp"]
    return rows[dp.get_local_rank()::dp.size()]


def share_of_rank(rows, mesh):
    """Wrong: each rank takes rows of its own, as with DDP (and DistributedSampler(data))."""
    return rows[dist.get_rank()::dist.get_world_size()]


def seed_of_group(mesh, step):
    """The right seed for dropout of what a tp group holds alike: all its ranks drop the same."""
    return SEED + step * mesh["dp"].size() + mesh["dp"].get_local_rank()


def seed_of_rank(mesh, step):
    """Wrong: each rank drops units of its own, and what should be copies differs."""
    return SEED + step * dist.get_world_size() + dist.get_rank()


def clip_by_mesh(parameters, max_norm):
    """clip_grad_norm_ for a model with layers outside the plan: a norm for each mesh, then one.

    Return the norm. All ranks must call it.
    """
    groups = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            groups[p.device_mesh if isinstance(p, DTensor) else None].append(p)
    norms = [get_total_norm([p.grad for p in group]) for group in groups.values()]
    norm = torch.stack([full(norm) for norm in norms]).norm()
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def main():
    parse_args()
    world_size = int(os.environ["WORLD_SIZE"])
    if HIDDEN % world_size or ROWS % world_size:
        stop(f"the hidden size, {HIDDEN}, and the batch, {ROWS}, must be multiples of the number of"
             f" ranks, which is {world_size}")
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    # On 2 x 2, torch notes that it gathers along one dimension, then along the other. That does no
    # harm. This logger's name is private.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    compare(device, world_size)
    count(device, world_size)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device, world_size):
    """Compare with one process that has the plain model and takes all rows."""
    expected = train(new_model(device), device, steps=STEPS)
    shapes = [(1, world_size)]  # tensor parallelism alone
    if world_size % 2 == 0 and world_size > 2:
        shapes.append((world_size // 2, 2))  # and FSDP2 over groups of two
    for shape in shapes:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        compare_on(mesh, f"{shape[0]} x {shape[1]},", expected, device)


def compare_on(mesh, name, expected, device):
    model = parallelize(new_model(device), mesh)
    gradient, weights = differences(expected, train(model, device, mesh, steps=STEPS))
    held = sum(p.to_local().numel() for p in model.parameters())
    log(f"{name} {held} of {len(expected[1])} weights on a rank: gradient off by {gradient:.1e},"
        f" weights by {weights:.1e}")
    if not (gradient < 1e-5 and weights < 1e-4):
        raise RuntimeError("split layers do not train like those of one process")

    model = parallelize(new_model(device), mesh)
    wrong, _ = differences(expected, train(model, device, mesh, share_of_rank))
    log(f"{name} different rows on each rank: gradient off by {wrong:.1e}, no error")
    if wrong < 0.1:
        raise RuntimeError("different rows on each rank do no harm")

    wrong, right = (spread_of_outputs(mesh, seed, device) for seed in (seed_of_rank, seed_of_group))
    log(f"{name} dropout seeded by rank: a group's outputs differ by {wrong:.2f}, by dp rank: by"
        f" {right:.2f}")
    if not (wrong > 0.1 and right == 0):
        raise RuntimeError(f"the outputs of a tp group differ by {wrong} and {right}")

    model = parallelize(new_model(device), mesh, BLOCKS)
    message = ("got mixed torch.Tensor and DTensor" if mesh["dp"].size() == 1
               else "must have the same mesh")
    error = error_of(train, model, device, mesh)
    if message not in error:
        raise RuntimeError(f"a layer outside the plan, and clip_grad_norm_: {error}")
    log(f'{name} layer outside the plan, clip_grad_norm_: "{message}"')
    model = parallelize(new_model(device), mesh, BLOCKS)
    mended, _ = differences(expected, train(model, device, mesh, clip=clip_by_mesh))
    log(f"{name} layer outside the plan, clip_by_mesh: gradient off by {mended:.1e}")
    if mended > 1e-5:
        raise RuntimeError("clip_by_mesh does not clip like clip_grad_norm_")

    if mesh["dp"].size() > 1:
        model = parallelize_module(new_model(device), mesh["tp"], PLAN)
        before = list(model.parameters())  # what an optimizer made here would train
        model = DDP(model, device_mesh=mesh["dp"])
        model(torch.ones(1, WIDTH, device=device)).sum().backward()
        trained, after = sum(p.grad is not None for p in before), len(list(model.parameters()))
        log(f"{name} DDP around split layers: {trained} of {len(before)} tensors get a gradient,"
            f" parameters() has {after}")
        if trained or after:
            raise RuntimeError("DDP keeps the parameters of split layers")


def train(model, device, mesh=None, share=share_of_group, clip=clip_grad_norm_, steps=1):
    """Return the first step's clipped gradient, and the weights after the last step, both whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)  # every rank makes the same rows, and takes its share
    for step in range(steps):
        inputs, targets = torch.randn(2, ROWS, WIDTH).to(device)
        if mesh:
            inputs, targets = share(inputs, mesh), share(targets, mesh)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        clip(list(model.parameters()), MAX_NORM)
        if step == 0:
            gradient = torch.cat([full(p.grad).flatten() for p in model.parameters()])
        optimizer.step()
    return gradient, torch.cat([full(p.detach()).flatten() for p in model.parameters()])


def spread_of_outputs(mesh, seed, device):
    """By how much the outputs of this rank's tp group differ, for the same rows, with dropout."""
    model = parallelize(new_model(device, dropout=0.5), mesh)
    torch.manual_seed(seed(mesh, step=1))
    most = model(torch.ones(ROWS, WIDTH, device=device)).detach()
    least, group = most.clone(), mesh["tp"].get_group()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return (most - least).max().item()


def full(tensor):
    """The whole of a tensor that may be a DTensor, of which each rank has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(expected, found):
    """Of the gradient, relative to its length; of the weights, the largest one."""
    return (((found[0] - expected[0]).norm() / expected[0].norm()).item(),
            (found[1] - expected[1]).abs().max().item())


def error_of(function, *args):
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "no error"


class CountBytes(TorchDispatchMode):
    """Adds up the whole tensors of all collectives; those of an all-reduce twice.

    An all-reduce is a reduce-scatter and an all-gather. In a ring of W ranks, each rank sends
    (W - 1) / W of what is counted here.
    """

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor calls the collectives: see them, not the layer
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if "c10d" in name and ("reduce" in name or "gather" in name):
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            whole = max(tensor.nbytes for tensor in tensors)
            self.total += whole * (1 if "gather" in name or "scatter" in name else 2)
        return result


def count(device, world_size):
    """Count the bytes of one forward and backward pass, for two batch sizes."""
    dims = ("dp", "tp")
    groups_of_one = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=dims)
    one_group = init_device_mesh(device.type, (1, world_size), mesh_dim_names=dims)
    found = {}
    for name, mesh, wrap in [
        ("DDP", groups_of_one, lambda model, mesh: DDP(model)),
        ("FSDP2", groups_of_one, lambda model, mesh: parallelize(model, mesh, {})),
        ("tensor parallel", one_group, parallelize),
    ]:
        found[name] = []
        for rows in (ROWS, 4 * ROWS):
            model = wrap(new_model(device), mesh)
            inputs, targets = torch.randn(2, rows, WIDTH).to(device)
            with CountBytes() as counted:
                loss = mse_loss(model(share_of_group(inputs, mesh)), share_of_group(targets, mesh))
                loss.backward()
            found[name].append(counted.total)
        few, many = found[name]
        log(f"{name:<15} {few:>7} bytes in a step with {ROWS} rows, {many:>7} with {4 * ROWS}")
    growth = {name: many / few for name, (few, many) in found.items()}
    if growth != {"DDP": 1, "FSDP2": 1, "tensor parallel": 4}:
        raise RuntimeError(f"the bytes do not grow as this file says: {growth}")
    log(f"{world_size} ranks train like one process; only the bytes of tensor parallel grow with"
        " the batch")


def new_model(device, dropout=0.0):
    torch.manual_seed(0)  # FSDP2 takes each rank's own weights as they are: make the same ones
    blocks = nn.Sequential(FeedForward(dropout), FeedForward(dropout))
    return nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, WIDTH), blocks=blocks)).to(device)


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
        stop(f"start it with: torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
