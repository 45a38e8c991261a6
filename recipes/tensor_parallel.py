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

    [rank 0/4] 1 x 4, 16648 of 66208 weights on a rank: gradient off by 2.0e-07, weights by 2.3e-06
    [rank 0/4] 1 x 4, different rows on each rank: gradient off by 1.0e+00, no error
    [rank 0/4] 1 x 4, dropout seeded by rank: a group's outputs differ by 0.96, by dp rank: by 0.00
    [rank 0/4] 1 x 4, layer outside the plan, clip_grad_norm_: "got mixed torch.Tensor and DTensor"
    [rank 0/4] 1 x 4, layer outside the plan, clip_by_mesh: gradient off by 1.7e-07
    [rank 0/4] 2 x 2, 16584 of 66208 weights on a rank: gradient off by 2.4e-07, weights by 6.3e-07
    [rank 0/4] 2 x 2, different rows on each rank: gradient off by 7.7e-01, no error
    [rank 0/4] 2 x 2, dropout seeded by rank: a group's outputs differ by 0.97, by dp rank: by 0.00
    [rank 0/4] 2 x 2, layer outside the plan, clip_grad_norm_: "must have the same mesh"
    [rank 0/4] 2 x 2, layer outside the plan, clip_by_mesh: gradient off by 2.4e-07
    [rank 0/4] 2 x 2, DDP around split layers: 0 of 10 tensors get a gradient, parameters() has 0
    [rank 0/4] 4 ranks train like one process; rows or dropout by rank do not

1 x 4 is one group of four ranks, 2 x 2 is two groups of two. "Off by" compares with one process.
All ranks of a group need the same rows: where DDP counts by rank, count by the place along "dp",
mesh["dp"].get_local_rank(), of mesh["dp"].size(). DistributedSampler counts by rank, unless you
pass it num_replicas and rank: no error, a wrong gradient. Seed dropout alike, too: the ranks of a
group must drop the same units of what they all hold. Between "up" and "down", each rank holds other
hidden units, and equal masks mean less variety: draw those from a torch.Generator() of their own,
seeded with seed_of_group(mesh, step) * mesh["tp"].size() + mesh["tp"].get_local_rank().

A layer outside the plan is a plain tensor, or is on another mesh. clip_grad_norm_ then fails, and
on a GPU so does the optimizer's first step: it takes all of a group of parameters at once. Give the
layer a place in the plan. If it cannot be split (a LayerNorm, say), use two functions from below:
torch.optim.AdamW(by_mesh(model.parameters())), which makes a group for each mesh, and clip_by_mesh,
in place of clip_grad_norm_. To train several groups, use fully_shard. DDP can wrap split layers, as
DDP(model, device_mesh=mesh["dp"]), but an optimizer made before trains nothing. After the first
forward pass parameters() and state_dict() are empty, without an error.

Tensor parallelism exchanges activations, and each layer waits for them: keep a group on one
machine. dry_run_1024_ranks.py counts the bytes. SequenceParallel splits the activations of norms
and dropout over tp, too (not tried here). With a pipeline: three_dimensions.py. Now write it
yourself: exercises/15_tensor_parallel.py.
"""

import gc
import logging
import os
from collections import OrderedDict, defaultdict

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

# tp must divide HIDDEN: else "a and b must have same reduction dim". All groups take as many rows.
WIDTH, HIDDEN, ROWS = 64, 240, 120
SEED, STEPS, MAX_NORM = 0, 10, 0.1


class FeedForward(nn.Module):  # your block: two matrices and an activation
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
    """The right way. model: on its device, equal on all ranks; it is changed in place.

    mesh: "dp" and "tp", in this order. The ranks of a tp group then follow each other, on one
    machine. plan: has an entry for each layer with weights; or see by_mesh and clip_by_mesh.
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
    return rows[mesh["dp"].get_local_rank() :: mesh["dp"].size()]


def seed_of_group(mesh, step):
    """The right seed for dropout of what a tp group holds alike: all its ranks drop the same."""
    return SEED + step * mesh["dp"].size() + mesh["dp"].get_local_rank()


def by_mesh(parameters):
    """Return an optimizer's groups of parameters, one for each mesh: [{"params": [...]}, ...]."""
    groups = defaultdict(list)
    for p in parameters:
        groups[p.device_mesh if isinstance(p, DTensor) else None].append(p)
    return [{"params": group} for group in groups.values()]


def clip_by_mesh(parameters, max_norm):
    """clip_grad_norm_ for a model with layers outside the plan: a norm for each mesh, then one.

    Return the norm. All ranks must call it.
    """
    groups = by_mesh(p for p in parameters if p.grad is not None)
    norms = [full(get_total_norm([p.grad for p in group["params"]])) for group in groups]
    norm = torch.stack(norms).norm()
    for group in groups:
        clip_grads_with_norm_(group["params"], max_norm, norm)
    return norm


def main():
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2 or HIDDEN % world_size:
        raise SystemExit("start it with: torchrun --standalone --nproc-per-node=4 (or 2, 3, 5) ...")
    dist.init_process_group("gloo")
    # On 2 x 2, torch notes that it gathers twice. That does no harm. (This name is private.)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    expected = train(new_model(), steps=STEPS)  # one process has the plain model and all rows
    shapes = [(1, world_size)]  # tensor parallelism alone
    if world_size % 2 == 0 and world_size > 2:
        shapes.append((world_size // 2, 2))  # and FSDP2 over groups of two
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        compare_on(mesh, f"{shape[0]} x {shape[1]},", expected)
    log(f"{world_size} ranks train like one process; rows or dropout by rank do not")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_on(mesh, name, expected):
    model = parallelize(new_model(), mesh)
    gradient, weights = differences(expected, train(model, mesh, steps=STEPS))
    held = sum(p.to_local().numel() for p in model.parameters())
    log(
        f"{name} {held} of {len(expected[1])} weights on a rank: gradient off by {gradient:.1e},"
        f" weights by {weights:.1e}"
    )
    model = parallelize(new_model(), mesh)
    other_rows, _ = differences(
        expected,
        train(  # as with DDP, and DistributedSampler(data)
            model, mesh, lambda rows, mesh: rows[dist.get_rank() :: dist.get_world_size()]
        ),
    )
    log(f"{name} different rows on each rank: gradient off by {other_rows:.1e}, no error")
    by_rank = spread_of_outputs(mesh, SEED + dist.get_rank())
    by_group = spread_of_outputs(mesh, seed_of_group(mesh, step=0))
    log(
        f"{name} dropout seeded by rank: a group's outputs differ by {by_rank:.2f}, by dp rank: by"
        f" {by_group:.2f}"
    )
    message = (
        "got mixed torch.Tensor and DTensor"
        if mesh["dp"].size() == 1
        else "must have the same mesh"
    )
    try:
        error = train(parallelize(new_model(), mesh, BLOCKS), mesh)
    except RuntimeError as caught:
        error = caught
    log(f'{name} layer outside the plan, clip_grad_norm_: "{message}"')
    model = parallelize(new_model(), mesh, BLOCKS)
    mended, _ = differences(expected, train(model, mesh, clip=clip_by_mesh))
    log(f"{name} layer outside the plan, clip_by_mesh: gradient off by {mended:.1e}")
    trained = after = 0
    if mesh["dp"].size() > 1:
        model = parallelize_module(new_model(), mesh["tp"], PLAN)
        before = list(model.parameters())  # what an optimizer made here would train
        model = DDP(model, device_mesh=mesh["dp"])
        model(torch.ones(1, WIDTH)).sum().backward()
        trained, after = sum(p.grad is not None for p in before), len(list(model.parameters()))
        log(
            f"{name} DDP around split layers: {trained} of {len(before)} tensors get a gradient,"
            f" parameters() has {after}"
        )
    claims = {
        "split layers train like one process": gradient < 1e-5 and weights < 1e-4,
        "other rows, or dropout by rank, do harm": other_rows > 0.1 and by_rank > 0.1,
        "a tp group has one output": by_group == 0,
        "clip_grad_norm_ fails as shown": message in str(error),
        "clip_by_mesh clips like clip_grad_norm_": mended < 1e-5,
        "DDP loses the parameters of split layers": trained == after == 0,
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")


def train(model, mesh=None, share=share_of_group, clip=clip_grad_norm_, steps=1):
    """Return the first step's clipped gradient, and the weights after the last step, both whole."""
    optimizer = torch.optim.AdamW(by_mesh(model.parameters()), lr=1e-3, foreach=True)  # as on a GPU
    torch.manual_seed(1)  # every rank makes the same rows, and takes its share
    for step in range(steps):
        inputs, targets = torch.randn(2, ROWS, WIDTH)
        if mesh:
            inputs, targets = share(inputs, mesh), share(targets, mesh)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        clip(list(model.parameters()), MAX_NORM)
        if step == 0:
            gradient = torch.cat([full(p.grad).flatten() for p in model.parameters()])
        optimizer.step()
    return gradient, torch.cat([full(p.detach()).flatten() for p in model.parameters()])


def spread_of_outputs(mesh, seed):
    """By how much the outputs of this rank's tp group differ, for the same rows, with dropout."""
    model = parallelize(new_model(dropout=0.5), mesh)
    torch.manual_seed(seed)
    most = model(torch.ones(ROWS, WIDTH)).detach()
    least, group = most.clone(), mesh["tp"].get_group()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return (most - least).max().item()


def full(tensor):
    """The whole of a tensor that may be a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(expected, found):  # relative, of the gradient; the largest, of the weights
    return (
        ((found[0] - expected[0]).norm() / expected[0].norm()).item(),
        (found[1] - expected[1]).abs().max().item(),
    )


def new_model(dropout=0.0):
    torch.manual_seed(0)  # FSDP2 takes each rank's own weights as they are: make the same ones
    blocks = nn.Sequential(FeedForward(dropout), FeedForward(dropout))
    return nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, WIDTH), blocks=blocks))


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
