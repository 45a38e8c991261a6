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

How much this saves depends on the machines and the dtypes. With n ranks, p of them on each machine,
and r bytes of gradients for a byte of weights, HSDP sends 2r / (2 + r) * (n - p) / (n - 1) of
FSDP2's bytes across. r is 1 if both have one dtype. It is 2 with bfloat16 weights whose gradients
are averaged in float32: then the gathers are cheaper, and little is left to save. Name both dtypes:
mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32). Without
reduce_dtype, the average is taken in param_dtype before torch 2.15, and in the weights' own since.

    torchrun --standalone --nproc-per-node=4 recipes/shard_inside_machines.py

    [rank 0/4] 2 machines: ranks [0, 1], [2, 3]
    [rank 0/4]                       kept    across   off by
    [rank 0/4] DDP                4904448   3678336  6.2e-07
    [rank 0/4] FSDP2              1226112   5461632  6.2e-07
    [rank 0/4] HSDP               2452224   2452224  6.2e-07
    [rank 0/4] HSDP, swapped      2452224   7282176  6.2e-07
    [rank 0/4] bfloat16 weights, float32 gradients: HSDP sends 67% of FSDP2's bytes across
    [rank 0/4] by the formula, on 16 machines of 8 ranks: 94%, or 63% if all is float32
    [rank 0/4] rows by rank: gradient off by 1.2e-07; the same rows for a machine's ranks: 7.1e-01
    [rank 0/4] loss averaged over all ranks: 1.5079; along "shard", by machine: 1.4864, 1.5293
    [rank 0/4] norm added up along "shard": 1.00 of the right one; over all ranks: 1.41
    [rank 0/4] HSDP in float32: 45% of FSDP2's bytes across, 2 times its memory, the same weights

Here, one machine plays several, of two ranks each (--per-machine). "Kept" are the bytes of weights,
gradients and AdamW's averages on a rank. "Off by" is the distance from one process that takes all
rows, after 10 steps, relative to how far the weights moved. "Across" are the bytes that cross from
machine to machine in a step. The exchanges are counted: which ranks take part, of what kind, how
large. The way of the bytes is a model: a ring, where each rank of the group sends to the next one.
NCCL may take other ways, such as trees. Gloo's reduce-scatter sends twice as much as a ring, which
makes plain FSDP2 worse.

Bytes are not time. Between two machines of two ranks (launch/lab, CPUs, 8.7 MB of weights), with a
link of 50 Mbit/s, a step took 0.35 to 0.40 of FSDP2's time with HSDP, and 0.44 to 0.47 with DDP. At
200 Mbit/s: 0.38 to 0.84, and 0.30 to 0.45. Where all fits on each rank, try DDP, too.

The wrong ways: with the dimensions swapped, the gathers cross, and more bytes than without HSDP.
The same happens with the right mesh if the launcher deals the ranks out in turns, one to each
machine. All ranks need rows of their own, as with DDP: DistributedSampler(data) is right. A sampler
that counts along "replicate" gives the same rows to all ranks of a machine. A loss averaged along
"shard" is that of one machine. clip_grad_norm_ knows the mesh. If you add up the norm yourself, do
that along "shard" alone, since the other machines hold the same shards once more.
"""

import argparse
import gc
import math
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss, relu
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count bytes
from torch.utils._pytree import tree_leaves  # private, too

BLOCKS, WIDTH, STEPS, ROWS = 8, 96, 10, 16  # ROWS on each rank
MAX_NORM = 0.02  # clips in every step here


def shard(model, mesh, **options):
    """The right way, with a mesh of two dimensions. With one of one dimension: plain FSDP2."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def machines_mesh(device, per_machine):
    """The right mesh: a row for each machine."""
    shape = dist.get_world_size() // per_machine, per_machine
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def swapped_mesh(device, per_machine):
    """Wrong: a row for each place in a machine. Its ranks are all on different machines."""
    table = torch.arange(dist.get_world_size()).view(-1, per_machine).T.contiguous()
    return DeviceMesh(device.type, table, mesh_dim_names=("replicate", "shard"))


def rows_of_rank(rows, mesh):
    """The right rows: each rank has its own, as with DistributedSampler(data)."""
    return rows[dist.get_rank()::dist.get_world_size()]


def rows_of_machine(rows, mesh):
    """Wrong: as with DistributedSampler(data, mesh["replicate"].size(), its get_local_rank())."""
    return rows[mesh["replicate"].get_local_rank()::mesh["replicate"].size()][:ROWS]


def share_across(machines, per_machine, ratio):
    """Return HSDP's part of FSDP2's bytes between machines, in rings.

    ratio: the bytes of a gradient when it is averaged, to those of a weight when it is gathered.
    """
    ranks = machines * per_machine
    return 2 * ratio / (2 + ratio) * (ranks - per_machine) / (ranks - 1)


def norm_by_hand(model, group):
    """The norm of the gradient, from the shards of a group's ranks. Right for mesh["shard"]."""
    squares = sum(p.grad.to_local().square().sum() for p in model.parameters())
    dist.all_reduce(squares, group=group)
    return squares.sqrt().item()


def main():
    per_machine, (device, backend) = parse_args(), pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare(device, per_machine)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device, per_machine):
    world_size = dist.get_world_size()
    machines = world_size // per_machine
    mesh = machines_mesh(device, per_machine)
    log(f"{machines} machines: ranks {', '.join(str(row) for row in mesh.mesh.tolist())}")
    one_process = new_model().to(device)
    train(one_process, lambda rows, mesh: rows, None)
    log("                      kept    across   off by")
    whole = count_bytes(new_model().parameters())
    head = count_bytes(new_head().parameters())  # in no block: gathered once, kept for backward()
    gathered_and_reduced = 3 * whole - head
    expected, across = {  # the same bytes, calculated from the ring
        "DDP": machines * 2 * whole * (world_size - 1) // world_size,
        "FSDP2": machines * gathered_and_reduced * (world_size - 1) // world_size,
        "HSDP": 2 * (machines - 1) * whole,
        "HSDP, swapped": per_machine * (machines - 1) * gathered_and_reduced,
    }, {}
    for name, way in [
            ("DDP", DDP),
            ("FSDP2", lambda model: shard(model, init_device_mesh(device.type, (world_size,)))),
            ("HSDP", lambda model: shard(model, mesh)),
            ("HSDP, swapped", lambda model: shard(model, swapped_mesh(device, per_machine)))]:
        model = way(new_model().to(device))
        kept = train(model, rows_of_rank, mesh)
        across[name], off = bytes_across(model, device, per_machine), off_by(model, one_process)
        log(f"{name:<16} {kept:>9} {across[name]:>9}  {off:.1e}")
        share = {"DDP": 1, "FSDP2": world_size, "HSDP": per_machine}.get(name, machines)
        if across[name] != expected[name] or kept != 4 * whole // share or off > 1e-3:
            raise RuntimeError(f"{name}: not the {4 * whole // share} bytes kept, or not the"
                               f" {expected[name]} across, or not the weights of one process")
    if not across["HSDP"] < min(across["DDP"], across["FSDP2"], across["HSDP, swapped"]):
        raise RuntimeError("HSDP does not send the fewest bytes from machine to machine")
    show_mixed(device, mesh)
    show_wrong(device, mesh)
    share = across["HSDP"] / across["FSDP2"]
    if abs(share - share_across(machines, per_machine, 1)) > 0.02:  # the head is gathered once
        raise RuntimeError("HSDP, float32: the formula does not hold")
    log(f"HSDP in float32: {share:.0%} of FSDP2's bytes across, {machines} times its memory, the"
        " same weights")


def show_mixed(device, mesh):
    """Weights are gathered in one dtype, gradients averaged in another."""
    machines, per_machine = mesh.shape
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    meshes = mesh, init_device_mesh(device.type, (dist.get_world_size(),))
    hsdp, fsdp2 = (bytes_across(shard(new_model().to(device), m, mp_policy=mixed), device,
                                per_machine) for m in meshes)
    log(f"bfloat16 weights, float32 gradients: HSDP sends {hsdp / fsdp2:.0%} of FSDP2's bytes"
        " across")
    log(f"by the formula, on 16 machines of 8 ranks: {share_across(16, 8, 2):.0%}, or"
        f" {share_across(16, 8, 1):.0%} if all is float32")
    if abs(hsdp / fsdp2 - share_across(machines, per_machine, 2)) > 0.02:
        raise RuntimeError("HSDP, bfloat16 weights: the formula does not hold")


def train(model, share, mesh):
    """Train, and return the bytes on this rank of weights, gradients and AdamW's averages."""
    optimizer = new_optimizer(model)
    for inputs, targets in steps_of_rows(model, STEPS):
        optimizer.zero_grad()
        mse_loss(model(share(inputs, mesh)), share(targets, mesh)).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values() if t.ndim]
    return count_bytes([*model.parameters(), *(p.grad for p in model.parameters()), *state])


def show_wrong(device, mesh):
    """The same model and mesh, but rows, loss or norm of a part of the ranks."""
    one_process = new_model().to(device)
    inputs, targets = next(steps_of_rows(one_process, 1))
    mse_loss(one_process(inputs), targets).backward()
    expected = flat([p.grad for p in one_process.parameters()])
    gradients = {}
    for share in rows_of_rank, rows_of_machine:
        model = shard(new_model().to(device), mesh)
        loss = mse_loss(model(share(inputs, mesh)), share(targets, mesh))
        loss.backward()
        gradients[share] = flat([p.grad for p in model.parameters()])
        if share is rows_of_rank:
            losses = {}
            for name, group in (("all", None), ("shard", mesh["shard"].get_group())):
                mean = loss.detach() / dist.get_world_size(group)
                dist.all_reduce(mean, group=group)
                losses[name] = gathered(mean.item())
            norms = [norm_by_hand(model, group) / expected.norm().item()
                     for group in (mesh["shard"].get_group(), None)]
    off = {share: ((gradient - expected).norm() / expected.norm()).item()
           for share, gradient in gradients.items()}
    log(f"rows by rank: gradient off by {off[rows_of_rank]:.1e}; the same rows for a machine's"
        f" ranks: {off[rows_of_machine]:.1e}")
    log(f'loss averaged over all ranks: {losses["all"][0]:.4f}; along "shard", by machine:'
        f" {', '.join(f'{loss:.4f}' for loss in losses['shard'][::mesh['shard'].size()])}")
    log(f'norm added up along "shard": {norms[0]:.2f} of the right one; over all ranks:'
        f" {norms[1]:.2f}")
    if not (off[rows_of_rank] < 1e-5 and off[rows_of_machine] > 0.1):
        raise RuntimeError("the gradients are not what this file says")
    if len(set(losses["all"])) > 1 or len(set(losses["shard"])) != mesh["replicate"].size():
        raise RuntimeError("the losses are not what this file says")
    if abs(norms[0] - 1) > 1e-3 or abs(norms[1] - math.sqrt(mesh["replicate"].size())) > 1e-3:
        raise RuntimeError("the norms are not what this file says")


class Exchanges(TorchDispatchMode):
    """Notes the exchanges inside a "with": the ranks of the group, the kind, the bytes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor calls this again, with its shards
        result = function(*args, **(kwargs or {}))
        if "c10d" in function.name():
            group = next(dist.ProcessGroup.unbox(a) for a in args
                         if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            # Of what goes in and what comes out, the larger one is the whole tensor.
            size = max(t.nbytes for t in tree_leaves((args, result)) if torch.is_tensor(t))
            ranks = dist.get_process_group_ranks(group)
            self.found.append((ranks, function.name(), size))
        return result


def bytes_across(model, device, per_machine):
    """Count the bytes of a step that cross from one machine to another, from all ranks."""
    inputs, targets = next(steps_of_rows(model, 1))
    with Exchanges() as step:
        mse_loss(model(rows_of_rank(inputs, None)), rows_of_rank(targets, None)).backward()
    total = 0
    for ranks, kind, size in step.found:
        # A ring cuts a tensor into as many pieces as it has ranks. Gathering moves all of them but
        # one over each link, reducing and scattering, too; an all-reduce is both.
        over_a_link = size * (len(ranks) - 1) // len(ranks) * (2 if "allreduce" in kind else 1)
        links = zip(ranks, ranks[1:] + ranks[:1], strict=True)
        crossing = sum(a // per_machine != b // per_machine for a, b in links)
        if ranks[0] == dist.get_rank():  # one rank of each group counts
            total += crossing * over_a_link
    return sum(gathered(total))


def steps_of_rows(model, steps):
    """Yield the rows of all ranks: every rank makes the same ones, and takes its share."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randn(2, ROWS * dist.get_world_size(), WIDTH, generator=generator).to(device)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(relu(self.up(inputs)))


class Stack(nn.Module):
    """Your model."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Layer() for _ in range(BLOCKS)), new_head()

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def new_head():
    return nn.Linear(WIDTH, WIDTH)


def new_model():
    torch.manual_seed(1)
    return Stack()


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def count_bytes(tensors):
    """Return the bytes on this rank: of a DTensor, those of its shard."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def off_by(trained, expected):
    """Return the distance between two sets of weights, relative to how far training moved them."""
    trained, expected, start = flat(trained), flat(expected), flat(new_model())
    return ((trained - expected).norm() / (expected - start).norm()).item()


def flat(weights):
    """Return the weights, of a model or in a list, as one tensor on the CPU, whole.

    Shards are gathered: then all ranks must call it.
    """
    tensors = weights.parameters() if isinstance(weights, nn.Module) else weights
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole]).cpu()


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
    """Return how many ranks make a machine; stop if the way of starting cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("--per-machine", type=int, default=2, metavar="N",
                        help="on a single machine, N ranks play one (2)")
    per_machine = parser.parse_args().per_machine
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")
    if (local := int(os.environ["LOCAL_WORLD_SIZE"])) < world_size:
        per_machine = local  # there are several machines: take them as they are
    if per_machine < 2 or world_size % per_machine or world_size < 2 * per_machine:
        stop(f"{world_size} ranks do not make two or more machines of {per_machine} ranks each, and"
             " of two at least: use --nproc-per-node=4, or another --per-machine")
    if WIDTH % world_size:  # FSDP2 would fill up the shards, and the bytes would not add up
        stop(f"the number of ranks, {world_size}, must divide the width, {WIDTH}")
    return per_machine


if __name__ == "__main__":
    main()
