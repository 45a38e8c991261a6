"""How do I shard a model inside each machine, and replicate it across machines (HSDP)?

    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])  # set by torchrun
    mesh = init_device_mesh(device.type, (world_size // per_machine, per_machine),
                            mesh_dim_names=("replicate", "shard"))  # torch wants names
    for block in model.blocks:  # the layers of your model
        fully_shard(block, mesh=mesh)  # the whole mesh, with both dimensions
    fully_shard(model, mesh=mesh)

    for i, (inputs, targets) in enumerate(micro_batches):  # of one step
        model.set_requires_all_reduce(i == len(micro_batches) - 1)  # once, if each uses all weights
        (loss_fn(model(inputs), targets) / len(micro_batches)).backward()

A mesh is a table of ranks (processes). torchrun numbers the ranks machine by machine, so each row
of this table is a machine. fully_shard (FSDP2) goes by the order of the dimensions, not by their
names. Along the last one, it gives each rank a shard, its part of each tensor. Along the first one,
all rows hold the same. This is HSDP, hybrid sharding. Start from the same weights on all ranks.

Plain FSDP2 gathers the weights over all ranks, twice for each micro-batch, and most networks
between machines are far slower than a machine's own links. With HSDP, only gradients cross, and
those of all micro-batches together. (If a micro-batch leaves weights out, a layer or an expert,
call model.set_reduce_scatter_unused_params(True), of torch 2.13; or leave that line out. Else
gradients are lost, or added to another weight, without an error.) The price is memory: each machine
holds everything that is trained. If that does not fit, use plain FSDP2, and pass
reshard_after_forward=per_machine for each block. After the forward pass, each machine then keeps
the weights, spread over its ranks, and backward() gathers them inside it.

    torchrun --standalone --nproc-per-node=4 recipes/shard_inside_machines.py

    [rank 0/4] 2 machines of 2 ranks            kept  halfway   across   off by
    [rank 0/4] FSDP2                          613056    37248  5461632  2.1e-07
    [rank 0/4] FSDP2, reshard to a machine    613056   631680  3678336  2.1e-07
    [rank 0/4] HSDP                          1226112    37248  2452224  2.1e-07
    [rank 0/4] HSDP, ranks in turns          1226112    37248  7282176  2.1e-07
    [rank 0/4] HSDP, rows by machine         1226112    37248  2452224  6.2e-01
    [rank 0/4] with bfloat16 weights:
    [rank 0/4] FSDP2                          613056    18624  3650400
    [rank 0/4] FSDP2, reshard to a machine    613056   315840  2758752
    [rank 0/4] HSDP                          1226112    18624  2452224
    [rank 0/4] with 4 micro-batches:
    [rank 0/4] FSDP2                          613056    37248 21846528  3.3e-07
    [rank 0/4] HSDP, all-reduce in each      1226112    37248  9808896  3.3e-07
    [rank 0/4] HSDP, all-reduce in the last  1226112    37248  2452224  3.3e-07
    [rank 0/4] by the formula, 16 machines of 8 ranks, of FSDP2's bytes:
    [rank 0/4] HSDP 63%, reshard to a machine 67%; with bfloat16 weights 94% and 75%
    [rank 0/4] HSDP: 45% of FSDP2's bytes across, 2 times its memory, the same gradient

One machine plays several here. "Kept" are the bytes of weights and gradients on a rank between two
steps; AdamW's averages are as many again. "Halfway" are those of gathered weights that stay from
forward to backward. "Across" are the bytes that cross from machine to machine in a step, if each
exchange goes round a ring of its ranks. "Off by" is the clipped gradient's distance from that of
one process with all rows.

FSDP2 sends 2 + r times the weights' bytes, with r bytes of gradients for a byte of weights. HSDP
sends 2r, reshard to a machine 1 + r. r is 2 if weights travel in bfloat16 and gradients in
float32: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), and
the loss from model(inputs).float(). Name both: without reduce_dtype, gradients travel in
param_dtype up to torch 2.14, and in the dtype of the weights, mostly float32, from 2.15 on.

Two mistakes: some launchers deal the ranks out in turns, one to each machine (srun -m cyclic). Then
a row of the mesh is spread over machines, and more bytes cross than without HSDP. All ranks need
rows of their own, as with DDP: DistributedSampler(data) is right. A sampler that counts along
"replicate" gives the same rows to all ranks of a machine.

Now write it yourself: exercises/21_mesh.py.
"""

import gc
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count bytes
from torch.utils._pytree import tree_leaves  # private, too

BLOCKS, WIDTH, ROWS = 8, 96, 16  # ROWS on each rank
MAX_NORM = 0.02  # clips the gradient here


def hsdp(model, device, world_size, **options):
    """The right way. options: of fully_shard, such as mp_policy."""
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh(
        device.type, (world_size // per_machine, per_machine), mesh_dim_names=("replicate", "shard")
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def fsdp2(model, device, world_size, after_forward=True, **options):
    """Right for one machine. after_forward=per_machine: right for several, if HSDP does not fit."""
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=after_forward, **options)
    fully_shard(model, mesh=mesh, **options)


def all_reduce_in_the_last(model, micro_batches, loss_fn):
    """The right way with HSDP: inside each machine, gradients are exchanged each time."""
    for i, (inputs, targets) in enumerate(micro_batches):
        model.set_requires_all_reduce(i == len(micro_batches) - 1)
        (loss_fn(model(inputs), targets) / len(micro_batches)).backward()


def exchange_in_each(model, micro_batches, loss_fn):
    """With HSDP: the right gradient, but it crosses once for each micro-batch."""
    for inputs, targets in micro_batches:
        (loss_fn(model(inputs), targets) / len(micro_batches)).backward()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if os.environ["LOCAL_WORLD_SIZE"] == str(world_size):  # several machines are taken as they are
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    machines = world_size // per_machine
    if min(per_machine, machines) < 2 or world_size % per_machine or WIDTH % world_size:
        raise SystemExit("start it with: torchrun --standalone --nproc-per-node=4, 6 or 8")
    in_order = [other // per_machine for other in range(world_size)]  # the machine of each rank
    in_turns = [other % machines for other in range(world_size)]
    torch.manual_seed(0)  # every rank makes the rows of all, and takes its own
    rows = torch.randn(2, ROWS * world_size, WIDTH)
    own = rows[:, rank::world_size]  # right: as with DistributedSampler(data)
    # Wrong: as with DistributedSampler(data, mesh["replicate"].size(), its get_local_rank()).
    of_machine = rows[:, rank // per_machine :: machines][:, :ROWS]
    one_process = new_model()
    exchange_in_each(one_process, [rows], mse_loss)
    clip_grad_norm_(one_process.parameters(), MAX_NORM)
    expected = flat_gradient(one_process)

    def measure(
        name, way, data=own, machine_of=in_order, backward=exchange_in_each, parts=1, policy=None
    ):
        """Log a line; return (bytes kept, bytes across, how far the gradient is off)."""
        model = new_model()
        way(model, torch.device("cpu"), world_size, mp_policy=policy or MixedPrecisionPolicy())
        shards, halfway = {p.to_local().data_ptr() for p in model.parameters()}, 0

        def loss_fn(outputs, targets):  # it runs between forward and backward
            nonlocal halfway
            weights = [local(p) for p in model.parameters()]
            halfway = sum(w.nbytes for w in weights if w.data_ptr() not in shards)
            return mse_loss(outputs.float(), targets)

        with CountAcross(machine_of) as seen:
            backward(model, list(zip(*(part.chunk(parts) for part in data), strict=True)), loss_fn)
        clip_grad_norm_(model.parameters(), MAX_NORM)  # it knows the mesh
        dist.all_reduce(across := torch.tensor(seen.bytes))
        kept = sum(local(p).nbytes + local(p.grad).nbytes for p in model.parameters())
        off = ((flat_gradient(model) - expected).norm() / expected.norm()).item()
        shown = "" if policy else f"  {off:.1e}"
        log(f"{name:<28} {kept:>8} {halfway:>8} {across:>8}{shown}")
        return kept, across.item(), off

    inside = partial(fsdp2, after_forward=per_machine)
    log(f"{machines} machines of {per_machine} ranks            kept  halfway   across   off by")
    plain = measure("FSDP2", fsdp2)
    resharded = measure("FSDP2, reshard to a machine", inside)
    right = measure("HSDP", hsdp)
    turns = measure("HSDP, ranks in turns", hsdp, machine_of=in_turns)
    by_machine = measure("HSDP, rows by machine", hsdp, of_machine)
    log("with bfloat16 weights:")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain_mixed = measure("FSDP2", fsdp2, policy=mixed)
    resharded_mixed = measure("FSDP2, reshard to a machine", inside, policy=mixed)
    right_mixed = measure("HSDP", hsdp, policy=mixed)
    log("with 4 micro-batches:")
    often = measure("FSDP2", fsdp2, parts=4)
    each = measure("HSDP, all-reduce in each", hsdp, parts=4)
    once = measure("HSDP, all-reduce in the last", hsdp, backward=all_reduce_in_the_last, parts=4)
    claims = {
        "a machine holds everything": right[0]
        == machines * plain[0]
        == (2 * expected.nbytes // per_machine),
        "a reshard to a machine keeps as little as FSDP2": resharded[0] == plain[0],
        "in float32, the formula holds": torch.allclose(
            torch.tensor([right[1] / plain[1], resharded[1] / plain[1]]),
            torch.tensor(shares_across(machines, per_machine, 1)),
            atol=0.02,
        ),
        "in bfloat16, the formula holds": torch.allclose(
            torch.tensor([right_mixed[1] / plain_mixed[1], resharded_mixed[1] / plain_mixed[1]]),
            torch.tensor(shares_across(machines, per_machine, 2)),
            atol=0.02,
        ),
        "dealt out in turns, more cross": turns[1] > plain[1],
        "an all-reduce in the last is one": 4 * once[1] == each[1] < often[1],
        "only rows by machine give another gradient": by_machine[2] > 0.1
        and max(way[2] for way in (plain, resharded, right, turns, often, each, once)) < 1e-5,
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")
    log("by the formula, 16 machines of 8 ranks, of FSDP2's bytes:")
    log(
        "HSDP {:.0%}, reshard to a machine {:.0%}; with bfloat16 weights {:.0%} and {:.0%}".format(
            *shares_across(16, 8, 1), *shares_across(16, 8, 2)
        )
    )
    log(
        f"HSDP: {right[1] / plain[1]:.0%} of FSDP2's bytes across, {machines} times its memory,"
        " the same gradient"
    )
    gc.collect()  # otherwise what is left of FSDP2 can abort the process at its exit
    dist.destroy_process_group()


def shares_across(machines, per_machine, ratio):
    """Return the parts of FSDP2's bytes that HSDP and a reshard to a machine send across.

    ratio: bytes of a gradient to those of a weight.
    """
    ranks = machines * per_machine
    return (
        2 * ratio / (2 + ratio) * (ranks - per_machine) / (ranks - 1),
        (1 + ratio) / (2 + ratio),
    )


class CountAcross(TorchDispatchMode):
    """Counts the bytes that cross inside a "with". machine_of: the machine of each rank."""

    def __init__(self, machine_of):
        super().__init__()
        self.machine_of, self.bytes = machine_of, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor calls this again, with its shards
        result = function(*args, **(kwargs or {}))
        if "c10d" in function.name():
            group = next(
                dist.ProcessGroup.unbox(a)
                for a in args
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            )
            ranks = dist.get_process_group_ranks(group)
            links = zip(ranks, ranks[1:] + ranks[:1], strict=True)
            crossing = sum(self.machine_of[a] != self.machine_of[b] for a, b in links)
            # Of what goes in and what comes out, the larger one is the whole tensor. A ring cuts it
            # into as many pieces as it has ranks. Gathering moves all of them but one over each
            # link, reducing and scattering, too; an all-reduce is both.
            size = max(t.nbytes for t in tree_leaves((args, result)) if torch.is_tensor(t))
            over_a_link = size * (len(ranks) - 1) // len(ranks)
            if ranks[0] == dist.get_rank():  # one rank of each group counts
                self.bytes += crossing * over_a_link * (2 if "allreduce" in function.name() else 1)
        return result


class Model(nn.Module):
    """Your model."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.head(inputs)


def new_model():
    torch.manual_seed(1)
    return Model()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat_gradient(model):
    whole = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    return torch.cat([gradient.flatten() for gradient in whole])


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
