"""How do I shard a model inside each machine, and replicate it across machines (HSDP)?

    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])  # set by torchrun
    mesh = init_device_mesh(device.type, (world_size // per_machine, per_machine),
                            mesh_dim_names=("replicate", "shard"))  # torch wants names
    for block in model.blocks:  # the layers of your model
        fully_shard(block, mesh=mesh)  # the whole mesh, with both dimensions
    fully_shard(model, mesh=mesh)

A mesh is a table of ranks (processes). torchrun numbers the ranks machine by machine, so each row
of this table is a machine. fully_shard (FSDP2) goes by the order of the dimensions, not by their
names. Along the last one, it gives each rank a shard, its part of each tensor. Along the first one,
all rows hold the same. This is HSDP, hybrid sharding. Start from the same weights on all ranks.

Plain FSDP2 gathers the weights over all ranks, twice in a step, and most networks between machines
are far slower than a machine's own links. With HSDP, only gradients cross: each rank averages those
of its shard with the ranks that hold the same shard. The price is memory: each machine must hold
everything that is trained, and its ranks share it out among themselves.

    torchrun --standalone --nproc-per-node=4 recipes/shard_inside_machines.py

    [rank 0/4] 2 machines: ranks [0, 1], [2, 3]
    [rank 0/4]                               kept   across   off by
    [rank 0/4] FSDP2                       613056  5461632  2.1e-07
    [rank 0/4] HSDP                       1226112  2452224  2.1e-07
    [rank 0/4] HSDP, ranks in turns       1226112  7282176  2.1e-07
    [rank 0/4] HSDP, rows by machine      1226112  2452224  6.2e-01
    [rank 0/4] FSDP2, bfloat16 weights     613056  3650400        -
    [rank 0/4] HSDP, bfloat16 weights     1226112  2452224        -
    [rank 0/4] with bfloat16 weights: 67% of FSDP2's bytes across
    [rank 0/4] by the formula, on 16 machines of 8 ranks: 94%, or 63% if all is float32
    [rank 0/4] HSDP in float32: 45% of FSDP2's bytes across, 2 times its memory, the same gradient

Here, one machine plays several, of two ranks each. "Kept" are the bytes of weights and gradients on
a rank; AdamW's averages are as many again. "Across" are the bytes that cross from machine to
machine in a step, if each exchange goes round a ring of its ranks. (NCCL may take other ways, such
as trees.) "Off by" is the clipped gradient's distance from that of one process with all rows.

With n ranks, p of them on each machine, and r bytes of gradients for a byte of weights, HSDP sends
2r / (2 + r) * (n - p) / (n - 1) of FSDP2's bytes across. r is 1 if both have one dtype. It is 2
with bfloat16 weights whose gradients are averaged in float32: then little is left to save. Name
both dtypes: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).
Without reduce_dtype, the average is taken in param_dtype before torch 2.15, and in the weights' own
dtype since.

Bytes are not time. Between two machines of two ranks (launch/lab, CPUs, 8.7 MB of weights), with a
link of 50 Mbit/s, a step took 0.35 to 0.40 of FSDP2's time with HSDP, and 0.44 to 0.47 with DDP. At
200 Mbit/s: 0.38 to 0.84, and 0.30 to 0.45. Where all fits on each rank, try DDP, too.

The wrong ways: some launchers deal the ranks out in turns, one to each machine (srun -m cyclic).
Then a row of the mesh is spread over machines, and more bytes cross than without HSDP. All ranks
need rows of their own, as with DDP: DistributedSampler(data) is right. A sampler that counts along
"replicate" gives the same rows to all ranks of a machine.
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta

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
PLAIN = MixedPrecisionPolicy()  # all in the weights' own dtype
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model, mesh, policy):
    """The right way, with a mesh of two dimensions. With one of one dimension: plain FSDP2."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def rows_of_rank(rows, mesh):
    """The right rows: each rank has its own, as with DistributedSampler(data)."""
    return rows[dist.get_rank()::dist.get_world_size()]


def rows_of_machine(rows, mesh):
    """Wrong: as with DistributedSampler(data, mesh["replicate"].size(), its get_local_rank())."""
    return rows[mesh["replicate"].get_local_rank()::mesh["replicate"].size()][:ROWS]


def share_across(shape, ratio):
    """Return HSDP's part of FSDP2's bytes. ratio: bytes of a gradient to those of a weight."""
    machines, per_machine = shape
    ranks = machines * per_machine
    return 2 * ratio / (2 + ratio) * (ranks - per_machine) / (ranks - 1)


def main():
    per_machine, (device, backend) = parse_args(), pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare(device, per_machine)
    gc.collect()  # otherwise what is left of FSDP2 can abort the process at its exit
    dist.destroy_process_group()


def compare(device, per_machine):
    world_size = dist.get_world_size()
    machines = world_size // per_machine
    mesh = init_device_mesh(device.type, (machines, per_machine),
                            mesh_dim_names=("replicate", "shard"))
    one_row = init_device_mesh(device.type, (world_size,))  # for plain FSDP2
    by_machine = [rank // per_machine for rank in range(world_size)]  # the machine of each rank
    in_turns = [rank % machines for rank in range(world_size)]
    log(f"{machines} machines: ranks {', '.join(str(row) for row in mesh.mesh.tolist())}")
    torch.manual_seed(0)  # every rank makes the rows of all, and takes its own
    rows = torch.randn(2, ROWS * world_size, WIDTH).to(device)
    one_process = new_model(device)
    step(one_process, *rows)
    expected = flat_gradient(one_process)
    log("                              kept   across   off by")
    kept, across, off = {}, {}, {}
    for name, of, share, policy, machine_of in [
            ("FSDP2", one_row, rows_of_rank, PLAIN, by_machine),
            ("HSDP", mesh, rows_of_rank, PLAIN, by_machine),
            ("HSDP, ranks in turns", mesh, rows_of_rank, PLAIN, in_turns),
            ("HSDP, rows by machine", mesh, rows_of_machine, PLAIN, by_machine),
            ("FSDP2, bfloat16 weights", one_row, rows_of_rank, MIXED, by_machine),
            ("HSDP, bfloat16 weights", mesh, rows_of_rank, MIXED, by_machine)]:
        model = shard(new_model(device), of, policy)
        across[name] = step(model, *(share(part, of) for part in rows), machine_of)
        kept[name] = sum(p.to_local().nbytes + p.grad.to_local().nbytes for p in model.parameters())
        off[name] = (flat_gradient(model) - expected).norm() / expected.norm()
        shown = f"{off[name]:.1e}" if policy is PLAIN else "      -"
        log(f"{name:<24} {kept[name]:>9} {across[name]:>8}  {shown}")
    shares = [across[f"HSDP{dtype}"] / across[f"FSDP2{dtype}"]
              for dtype in ("", ", bfloat16 weights")]
    claims = {
        "a machine holds everything": kept["HSDP"] == machines * kept["FSDP2"] == (
            2 * expected.nbytes // per_machine),
        "in float32, the formula holds": abs(shares[0] - share_across(mesh.shape, 1)) < 0.02,
        "in bfloat16, the formula holds": abs(shares[1] - share_across(mesh.shape, 2)) < 0.02,
        "dealt out in turns, more cross": across["HSDP, ranks in turns"] > across["FSDP2"],
        "only rows by machine give another gradient": [
            name for name in off if off[name] > (0.1 if "bfloat16" in name else 1e-5)
        ] == ["HSDP, rows by machine"],
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")
    log(f"with bfloat16 weights: {shares[1]:.0%} of FSDP2's bytes across")
    log(f"by the formula, on 16 machines of 8 ranks: {share_across((16, 8), 2):.0%}, or"
        f" {share_across((16, 8), 1):.0%} if all is float32")
    log(f"HSDP in float32: {shares[0]:.0%} of FSDP2's bytes across, {machines} times its memory,"
        " the same gradient")


def step(model, inputs, targets, machine_of=()):
    """Compute and clip the gradient; return the bytes that cross from machine to machine."""
    with CountAcross(machine_of) as seen:
        mse_loss(model(inputs).float(), targets).backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)  # it knows the mesh
    dist.all_reduce(total := torch.tensor(seen.bytes, device=inputs.device))
    return total.item()


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
            group = next(dist.ProcessGroup.unbox(a) for a in args
                         if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
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
            for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.head(inputs)


def new_model(device):
    torch.manual_seed(1)
    return Model().to(device)


def flat_gradient(model):
    """Return the gradient as one tensor, whole. If it is in shards, all ranks must call it."""
    gradients = [p.grad for p in model.parameters()]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten()
                      for g in gradients])


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
    """Return how many ranks make a machine; stop if the way of starting cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if 0 < gpus < local:
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")
    per_machine = local if local < world_size else 2  # several machines are taken as they are
    # If the ranks did not divide the width, FSDP2 would fill up the shards.
    if min(per_machine, world_size // per_machine) < 2 or world_size % per_machine or (
            WIDTH % world_size):
        stop(f"{world_size} ranks: this takes two machines at least, of two ranks at least, and"
             f" ranks that divide {WIDTH}: use --nproc-per-node=4")
    return per_machine


if __name__ == "__main__":
    main()
