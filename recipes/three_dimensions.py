"""How do I combine data, tensor and pipeline parallelism in one training?

    mesh = init_device_mesh(device.type, (world_size // 4, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    dp, pp, tp = mesh["dp"], mesh["pp"], mesh["tp"]
    model = keep_stage(model, pp.get_local_rank(), pp.size())  # the layers of this stage
    parallelize_module(model, tp, plan_of(model))  # split each layer over tp: this comes first
    for module in [*model.blocks.values(), model]:  # share out over dp what each rank has left
        fully_shard(module, mesh=dp, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    stage = PipelineStage(model, pp.get_local_rank(), pp.size(), device, group=pp.get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)

    rows = slice(dp.get_local_rank(), None, dp.size())  # by dp alone
    first = [inputs[rows].contiguous()] if stage.is_first else []
    last = {"target": targets[rows]} if stage.is_last else {}
    optimizer.zero_grad()
    schedule.step(*first, **last)  # forward and backward; tied weights: then add_up_tied()
    square = get_total_norm([p.grad for p in model.parameters()]).full_tensor() ** 2
    dist.all_reduce(square, group=pp.get_group())  # clip_grad_norm_ knows no stages
    clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())
    optimizer.step()

A mesh is a table of ranks (processes). Here it has a dimension for each way to split a training.
Along "tp" (tensor parallel), each rank has a part of every large layer. Along "pp" (pipeline
parallel), each has a stage: some of the layers. Along "dp" (data parallel), each takes other rows,
and keeps a shard of the stage's weights, gradients and optimizer state (fully_shard, FSDP2). Start
from the same weights on all ranks. torch's parts for this fit together, also with Gloo on a CPU.
keep_stage, plan_of and loss_fn are yours: below are those of a small GPT. Three things are left to
you: the norm over all stages (norm_of_model), a weight that two layers share (split_and_shard,
add_up_tied), and layers that tp does not split (Whole).

    torchrun --standalone --nproc-per-node=8 recipes/three_dimensions.py

    [rank 0/8] bytes in one process: weights 424448, a batch's activations after a block 131072
    [rank 0/8] stage  ranks               weights gradients optimizer     sent: dp       tp       pp
    [rank 0/8] dp 8, pp 1, tp 1 off by: loss 2.2e-16 gradients 1.3e-15 weights 4.6e-15
    [rank 0/8]     0  0 1 2 3 4 5 6 7       53056     53056    106304       743456        0        0
    [rank 0/8] dp 1, pp 4, tp 2 off by: loss 0.0e+00 gradients 1.3e-15 weights 4.3e-15
    [rank 0/8]     0  0 1                   63488     63488    127028            0   655464   139276
    [rank 0/8]     1  2 3                   51200     51200    102444            0   524376   262156
    [rank 0/8]     2  4 5                   51200     51200    102444            0   524376   262156
    [rank 0/8]     3  6 7                   59904     59904    119864            0   786536   139276
    [rank 0/8] replicate 2, dp 2, pp 2, tp 1 off by: loss 2.2e-16 gradients 1.3e-15 weights 4.0e-15
    [rank 0/8]     0  0 2 4 6              111104    111104    222304       333504        0    40968
    [rank 0/8]     1  1 3 5 7              109312    109312    218724       328128        0    40968
    [rank 0/8] dp 2, pp 2, tp 2 off by: loss 2.2e-16 gradients 1.3e-15 weights 4.1e-15
    [rank 0/8]     0  0 1 4 5               57344     57344    114784       114880   590016    69640
    [rank 0/8]     1  2 3 6 7               55552     55552    111204       111296   655552    69640
    [rank 0/8] wrong, on dp 2, pp 2, tp 2            gradients   weights
    [rank 0/8] other rows on each rank of tp           1.4e+00   1.0e+00
    [rank 0/8] averaged over dp x tp                   8.0e-01   1.0e+00
    [rank 0/8] tied weights go apart                   1.0e+00   1.3e+00
    [rank 0/8] clipped by the norm of a stage          1.3e-15   9.0e-03
    [rank 0/8] clipped, whole layers count twice       1.3e-15   5.2e-04
    [rank 0/8] 4 meshes train like one process; 5 mistakes do not, and raise no error

"Off by" compares with one process that takes the whole batch, in float64: the loss of the first
step; its gradients, before they are clipped; the weights after 10 steps of AdamW (2 for what is
wrong), most of them clipped. For gradients and weights, it is the worst tensor: the norm of the
difference, divided by the norm of the gradient, or of how far the weights have moved.

The bytes are what each of these ranks keeps between steps, and sends in one, as if the exchanges of
a group went round a ring. During a step, a rank holds all weights and gradients of its part of the
stage, so dp saves less at the peak. tp reduces the activations of a block twice forward, twice
backward. pp sends them on, and their gradients back. (Read that off the inner stages of the second
mesh, which are one block each.) dp gathers weights and scatters gradients, once in a step.

The five mistakes raise no error. All stages of a replica, with their tp groups, need the same rows:
DistributedSampler(data, num_replicas=dp.size(), rank=dp.get_local_rank()), and the same random
augmentation. (With "replicate", count over both dimensions: rows_of_replica.) All micro-batches, of
all ranks and in all steps, need equally many rows (drop_last=True), and equally many targets that
count: else there are errors, hangs or, silently, wrong gradients. AdamW hides a wrong scale of the
gradients: a wrong norm shows late. So compare a small model of yours with one process, too. DDP
around layers that tp has split fails, or trains nothing (recipes/tensor_parallel.py). The last
stage alone has the losses, one for each micro-batch of its replica: give
schedule.step(losses=...) an empty list, which it fills, and take the average, over dp, too.

Sizes: take the smallest tp and pp with which the model fits, and dp for the rest (Narayanan et al.
2021, arXiv:2104.04473). tp: each block waits for its exchanges. Keep its groups on one machine. pp
sends less, to neighbours only: it can cross machines. But of p stages with m micro-batches, each
idles (p - 1) / (m + p - 1) of the time, see 06_model_parallel_ddp.py: take many more micro-batches
than stages. If dp crosses slow links, replicate across them: recipes/shard_inside_machines.py.

Order: torchrun numbers the ranks machine by machine, and along the last dimension of a mesh they
follow each other. So "tp" is last, and its size divides the ranks of a machine. With 2 x 2 x 2,
ranks 0 and 1 are a tp group, 0 and 2 a pipeline, 0 and 4 replicas. On two machines of four ranks,
only dp crosses then. With "pp" first, as in torchtitan, only pp does. If "tp" stands before "dp",
clipping fails: "Invalid mesh_dim_names".
"""

import argparse
import contextlib
import gc
import logging
import os
import sys
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group  # private; to count bytes
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode  # private, too
from torch.utils._pytree import tree_leaves  # private, too

CONTEXT, VOCABULARY, WIDTH, HEADS, LAYERS = 16, 64, 32, 4, 4
BATCH, STEPS, WRONG_STEPS, MAX_NORM = 32, 10, 2, 0.3
MICRO_BATCHES = 4  # of each replica; 1F1B wants no fewer than stages
ACTIVATIONS = BATCH * CONTEXT * WIDTH * 8  # bytes of a batch's, after a block, in float64
# {ranks: meshes}. What goes wrong is shown on the last one.
MESHES = {
    8: [{"dp": 8, "pp": 1, "tp": 1}, {"dp": 1, "pp": 4, "tp": 2},
        {"replicate": 2, "dp": 2, "pp": 2, "tp": 1}, {"dp": 2, "pp": 2, "tp": 2}],
    4: [{"dp": 4, "pp": 1, "tp": 1}, {"dp": 2, "pp": 1, "tp": 2},
        {"replicate": 2, "dp": 1, "pp": 2, "tp": 1}, {"dp": 1, "pp": 2, "tp": 2}]}
# How often an exchange goes round a ring. (An exchange that is not listed is a KeyError.)
ROUNDS = {"allreduce_": 2, "all_reduce": 2, "_allgather_base_": 1, "all_gather_into_tensor": 1,
          "_reduce_scatter_base_": 1, "reduce_scatter_tensor": 1}
SEND_NOTHING = ("recv_", "wait_tensor", "_wrap_tensor_autograd")


def keep_stage(model, number, count):
    """Cut the model down to stage number of count, in place. What is left keeps its names."""
    if number > 0:
        model.characters = model.positions = None
    if number < count - 1:
        model.norm = model.head = None
    layers = len(model.blocks)
    for i in range(layers):
        if i * count // layers != number:
            del model.blocks[str(i)]
    return model


class Whole(ParallelStyle):
    """In a plan: a layer (of one input) that each rank of a tp group holds whole, and computes.

    Give every layer that has weights a place in the plan. Without one, it would train, too, but
    get_total_norm fails if some weights are DTensors on the tp mesh and others are not. (Or see
    clip_by_mesh in tensor_parallel.py.)
    """

    def _apply(self, module, device_mesh):
        return distribute_module(
            module, device_mesh, None,
            lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
            lambda _, output, mesh: output.to_local())


def plan_of(model):
    """How tp splits the layers of a stage. (Of a layer that is not there, torch would warn.)"""
    plan = {"blocks.*.norm?": Whole()}
    for columns, rows in (("qkv", "out"), ("up", "down")):  # see recipes/tensor_parallel.py
        plan |= {f"blocks.*.{columns}": ColwiseParallel(), f"blocks.*.{rows}": RowwiseParallel()}
    if model.characters is not None:
        plan |= {"characters": RowwiseParallel(input_layouts=Replicate()), "positions": Whole()}
    if model.head is not None:
        plan |= {"norm": Whole(), "head": ColwiseParallel(output_layouts=Replicate())}
    return plan


def data_mesh(mesh):
    """The dimensions along which ranks take other rows: "dp", and "replicate" if there is one."""
    return mesh["replicate", "dp"] if "replicate" in mesh.mesh_dim_names else mesh["dp"]


def split_and_shard(model, mesh):
    """The right way, for the model of a stage, in place: split it over tp, and shard it over dp."""
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], plan_of(model))
    if model.characters is not None and model.head is not None:  # both ends in one stage:
        model.head.weight = model.characters.weight  # parallelize_module unties them, silently
    for module in [*model.blocks.values(), model]:
        # By default, every micro-batch gathers the weights of the blocks anew.
        fully_shard(module, mesh=data_mesh(mesh), reshard_after_forward=False)
    return model


def rows_of_replica(rows, mesh):
    """The right rows: all ranks of a replica (its stages, and their tp groups) take the same."""
    ranks = data_mesh(mesh).mesh.flatten().tolist()  # one of each replica
    rows = rows[ranks.index(dist.get_rank())::len(ranks)]
    return rows.contiguous()  # torch 2.11 wants the inputs of a stage contiguous


def rows_of_tp_rank(rows, mesh):
    """Wrong: the ranks of a tp group take different rows."""
    return rows_of_replica(rows, mesh)[mesh["tp"].get_local_rank()::mesh["tp"].size()].contiguous()


def add_up_tied(model, mesh, ends):
    """Right: the first and the last stage have a copy of the tied weight, and add up its gradients.

    ends: the group of the two, from ends_of(mesh). None on a stage in between, or if there is only
    one stage: there, split_and_shard ties the two layers again.
    """
    if ends is not None:
        layer = model.characters if model.head is None else model.head
        dist.all_reduce(layer.weight.grad.to_local(), group=ends)


def leave_tied(model, mesh, ends):
    """Wrong: each stage trains its own copy, and the copies go apart."""


def average_over_tp(model, mesh, ends):
    """Wrong: an average over tp, too. Its ranks hold different parts of the gradients."""
    add_up_tied(model, mesh, ends)
    for p in model.parameters():
        dist.all_reduce(p.grad.to_local(), group=mesh.get_group("tp"))
        p.grad.to_local().div_(mesh["tp"].size())


def norm_of_model(model, mesh):
    """The right norm: over all stages, each number once. All ranks must call it."""
    # A DTensor knows what is in parts (over dp, over tp), and what each rank has whole.
    square = get_total_norm(gradients_once(model)).full_tensor() ** 2
    dist.all_reduce(square, group=mesh.get_group("pp"))
    return square.sqrt()


def norm_of_stage(model, mesh):
    """Wrong: as with clip_grad_norm_, each stage scales its gradients by a norm of its own."""
    return get_total_norm(gradients_once(model)).full_tensor()


def norm_of_ranks(model, mesh):
    """Wrong: what each rank of a tp group holds whole counts for each of them."""
    square = sum(gradient.to_local().square().sum() for gradient in gradients_once(model))
    for name in mesh.mesh_dim_names:
        dist.all_reduce(square, group=mesh.get_group(name))
    return square.sqrt()


def gradients_once(model):
    """The gradients of a stage; that of the tied weight in the first stage only."""
    copy = model.head.weight if model.head is not None and model.characters is None else None
    return [p.grad for p in model.parameters() if p is not copy and p.grad is not None]


WRONG = {
    "other rows on each rank of tp": {"share": rows_of_tp_rank},
    "averaged over dp x tp": {"finish": average_over_tp},
    "tied weights go apart": {"finish": leave_tied},
    "clipped by the norm of a stage": {"norm": norm_of_stage},
    "clipped, whole layers count twice": {"norm": norm_of_ranks},
}


def train(mesh, device, steps=STEPS, share=rows_of_replica, finish=add_up_tied, norm=norm_of_model):
    """Train on the mesh; return what this rank knows of it.

    (loss of the first step, None if this is not the last stage; gradients of the first step and
    weights after the last, whole, by name; bytes that are kept; bytes that are sent in a step).
    """
    pp = mesh["pp"]
    model = keep_stage(GPT(), pp.get_local_rank(), pp.size()).to(device)  # your model
    optimizer, scheduler = new_optimizer(split_and_shard(model, mesh))
    stage = PipelineStage(model, pp.get_local_rank(), pp.size(), device, group=pp.get_group())
    # schedule.step divides p.grad by the number of micro-batches: so loss_fn takes a mean. It would
    # divide the gradients of an earlier call once more. So take more micro-batches, not more calls
    # (or scale_grads=False, and divide yourself).
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn)
    ends = ends_of(mesh)
    sent = CountSent(mesh, ends)
    for step, (inputs, targets) in zip(range(steps), whole_batches(device)):
        losses = []
        first = [share(inputs, mesh)] if stage.is_first else []
        last = {"target": share(targets, mesh), "losses": losses} if stage.is_last else {}
        optimizer.zero_grad()
        # Not counted in the first step, when the stages also ask each other for shapes.
        with sent if step == 1 else contextlib.nullcontext():
            schedule.step(*first, **last)  # fully_shard averages over dp, after the last backward
            finish(model, mesh, ends)
            if step == 0:
                loss = torch.stack(losses).mean().item() if losses else None
                gradients = {name: p.grad.full_tensor().clone() for name, p in named(model)}
            clip_grads_with_norm_(model.parameters(), MAX_NORM, norm(model, mesh))
        optimizer.step()
        scheduler.step()
    weights = {name: p.detach().full_tensor() for name, p in named(model)}
    kept = [model.parameters(), [p.grad for p in model.parameters()],
            [value for state in optimizer.state.values() for value in state.values()]]
    return loss, gradients, weights, [local_bytes(tensors) for tensors in kept], sent.bytes


def ends_of(mesh):
    """Return the group of this rank and its counterpart at the other end of the pipeline, or None.

    For tied weights. All ranks must call it, those of the stages in between, too.
    """
    if mesh["pp"].size() == 1:
        return None
    stages = mesh.mesh.movedim(mesh.mesh_dim_names.index("pp"), -1).flatten(0, -2)
    return dist.new_subgroups_by_enumeration(stages[:, [0, -1]].tolist())[0]


def train_alone(device):
    """One process takes the whole batch. Return its loss, gradients, weights by step."""
    model = GPT().to(device)
    optimizer, scheduler = new_optimizer(model)
    weights = [{name: p.detach().clone() for name, p in named(model)}]  # before the first step
    for inputs, targets in whole_batches(device):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        if len(weights) == 1:
            found = loss.item(), {name: p.grad.clone() for name, p in named(model)}
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        weights.append({name: p.detach().clone() for name, p in named(model)})
    return *found, weights


class CountSent(TorchDispatchMode):
    """Counts in .bytes what this rank sends inside a "with", by dimension of the mesh.

    As if exchanges in a group of n ranks went round a ring: a rank sends (n - 1) / n of the whole
    tensor; twice that in an all-reduce, which is a reduce-scatter and an all-gather.
    """

    def __init__(self, mesh, ends):
        super().__init__()
        groups = [(mesh.get_group(name), name) for name in mesh.mesh_dim_names] + [(ends, "pp")]
        # By ranks: DTensor may use the group of an older mesh that has the same ranks.
        self.dimensions = {tuple(dist.get_process_group_ranks(group)): name
                           for group, name in groups if group}
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor calls this again, with its parts
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace in ("c10d", "_c10d_functional") and name not in SEND_NOTHING:
            # These get the name of their group, or the group itself, in a box.
            group = (_resolve_process_group(args[-1]) if "functional" in function.namespace
                     else dist.ProcessGroup.unbox(args[2 if "_base_" in name else 1]))
            ranks = tuple(dist.get_process_group_ranks(group))
            size = max(t.nbytes for t in tree_leaves((args, result)) if torch.is_tensor(t))
            part = 1 if name == "send" else ROUNDS[name] * (len(ranks) - 1) / len(ranks)
            self.bytes[self.dimensions[ranks]] += round(part * size)
        return result


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(minutes=2),
                            device_id=device if device.type != "cpu" else None)
    torch.set_default_dtype(torch.float64)  # so that an error cannot pass for rounding
    # A norm is added up over dp, then over tp. torch notes that: no harm. (This name is private.)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    compare(device)
    gc.collect()  # otherwise what is left of FSDP2 can abort the process at its exit
    dist.destroy_process_group()


def compare(device):
    alone, meshes = train_alone(device), MESHES[dist.get_world_size()]
    model = local_bytes(GPT().parameters())
    log(f"bytes in one process: weights {model}, a batch's activations after a block {ACTIVATIONS}")
    log("stage  ranks               weights gradients optimizer     sent: dp       tp       pp")
    for shape in meshes:
        mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        name = ", ".join(f"{name} {size}" for name, size in shape.items())
        loss, gradients, weights, *counted = train(mesh, device)
        losses = [value for value in gathered(loss) if value is not None]  # of the last stages
        off = [abs(sum(losses) / len(losses) / alone[0] - 1), furthest(gradients, alone[1], {}),
               furthest(weights, alone[2][-1], alone[2][0])]
        log("{} off by: loss {:.1e} gradients {:.1e} weights {:.1e}".format(name, *off))
        if not all(value < 1e-10 for value in off):
            raise RuntimeError(f"{name} does not train like one process")
        if not 1 <= show(mesh, *counted) / shape.get("replicate", 1) / model < 1.1:
            raise RuntimeError(f"{name}: the ranks do not share the weights out")

    log(f"{'wrong, on ' + name:<38}gradients   weights")
    for way, changed in WRONG.items():
        _, gradients, weights, *_ = train(mesh, device, WRONG_STEPS, **changed)
        off = [furthest(gradients, alone[1], {}),
               furthest(weights, alone[2][WRONG_STEPS], alone[2][0])]
        log(f"{way:<38}{off[0]:9.1e} {off[1]:9.1e}")
        if not (off[1] > 1e-4 and (off[0] < 1e-10 if "norm" in changed else off[0] > 0.1)):
            raise RuntimeError(f"{way}: off by {off}")
    log(f"{len(meshes)} meshes train like one process; {len(WRONG)} mistakes do not, and raise no"
        " error")


def show(mesh, kept, sent):
    """Print what the ranks keep and send. Return the bytes of the weights that all of them keep."""
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    lines = gathered((stage, *kept, sent["dp"] + sent["replicate"], sent["tp"], sent["pp"]))
    for line in sorted(set(lines)):
        ranks = " ".join(str(rank) for rank, other in enumerate(lines) if other == line)
        log("{:>5}  {:<17}{:>10}{:>10}{:>10}{:>13}{:>9}{:>9}".format(line[0], ranks, *line[1:]))
        # For each other rank of dp, its shard of the weights, and one of the gradients. Between
        # replicas, an all-reduce of the shard. tp and pp: of two ranks in a tp group, without dp.
        found = [line[4] / line[1], *(value / ACTIVATIONS for value in line[5:])]
        replicas = dict(zip(mesh.mesh_dim_names, mesh.shape)).get("replicate", 1)
        expected = [2 * (mesh["dp"].size() - 1) + 2 * (replicas - 1) / replicas, 4, 2]
        inner = 0 < line[0] < stages - 1  # a stage of one block
        if any(abs(a - b) > 0.02 for a, b in list(zip(found, expected))[:3 if inner else 1]):
            raise RuntimeError(f"stage {line[0]} sends {found} times its weights or activations")
    return sum(line[1] for line in lines)


def furthest(found, expected, start):
    """By how much the worst tensor of all stages is off, relative to its way from start."""
    worst = torch.stack([(tensor - expected[name]).norm()
                         / (expected[name] - start.get(name, 0)).norm()
                         for name, tensor in found.items()]).max().item()
    return torch.tensor(gathered(worst)).max().item()  # Python's max may lose a nan


# Your model, your data, your loss, your schedule


class TransformerBlock(nn.Module):
    """(rows, characters, WIDTH) to the same shape."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # (No bias: that of k has a gradient of 0, so its relative error would be noise.)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        # Trap: tp gives each rank consecutive outputs of qkv. So here they come head by head: q, k
        # and v of head 0, then of head 1, and so on. (Many pretrained weights have all q first,
        # then all k: put them in order.) -1: the heads of this rank, so tp must divide HEADS.
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3 * WIDTH // HEADS)).transpose(1, 2)
        mixed = scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT: characters, int64 (N, T), to logits (N, T, VOCABULARY), with tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same weights on all ranks
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict({str(i): TransformerBlock() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.characters.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, x):
        if self.characters is not None:
            x = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        # clone: of a model that returns a view, fully_shard warns.
        return x if self.head is None else self.head(self.norm(x)).clone()


def named(model):
    """[(name, parameter)], a tied one by both its names."""
    return list(model.named_parameters(remove_duplicate=False))


def new_optimizer(model):
    # fused: one call for all tensors. With DTensors, many calls take long.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(  # warm-up, then a cosine
        optimizer, max_lr=1e-2, total_steps=STEPS, cycle_momentum=False)


def whole_batches(device):
    """The whole batch of each step. All ranks make the same, and take their rows."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator).to(device)
        yield text[:, :-1], text[:, 1:]


def loss_fn(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- Helpers that are no part of the lesson ----


def local_bytes(tensors):
    """Bytes of what this rank has of them."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


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
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=8 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")
    if world_size not in MESHES:
        stop(f"{world_size} ranks: this has meshes of 8 or 4 ranks: use --nproc-per-node=8")


if __name__ == "__main__":
    main()
