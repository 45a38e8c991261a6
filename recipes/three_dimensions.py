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
    tied, ends = tied_weight(model), ends_of(mesh)

    rows = slice(dp.get_local_rank(), None, dp.size())  # by dp alone
    first = [inputs[rows].contiguous()] if stage.is_first else []
    last = {"target": targets[rows]} if stage.is_last else {}
    optimizer.zero_grad()
    schedule.step(*first, **last)  # forward and backward
    add_up_tied(tied, ends)
    norm = norm_of_model(model, mesh, tied)  # clip_grad_norm_ knows no stages
    clip_grads_with_norm_(model.parameters(), max_norm, norm)
    optimizer.step()

A mesh is a table of ranks (processes), with a dimension for each way to split a training. Along
"tp" (tensor parallel), each rank has a part of every large layer; along "pp" (pipeline), a stage,
some of the layers. Along "dp" (data parallel), each takes other rows, and keeps a shard of the
stage's weights, gradients and optimizer state (FSDP2; within a step, it holds the stage's weights
and gradients whole). Start from the same weights on all ranks. keep_stage, plan_of, tied_weight and
loss_fn are yours: below are a small GPT's. Copy the rest: the norm over all stages (norm_of_model),
a weight of the first and the last stage (ends_of, add_up_tied), layers that tp does not split
(Whole).

    torchrun --standalone --nproc-per-node=8 recipes/three_dimensions.py

    [rank 0/8] dp 1, pp 4, tp 2 off by: loss 0.0e+00 gradients 1.3e-15 weights 9.5e-15
    [rank 0/8] dp 1, pp 4, tp 2 keeps 51200 to 63488 of 424448 bytes of weights on a rank
    [rank 0/8] dp 2, pp 2, tp 2 off by: loss 2.2e-16 gradients 1.3e-15 weights 5.9e-15
    [rank 0/8] dp 2, pp 2, tp 2 keeps 55552 to 57344 of 424448 bytes of weights on a rank
    [rank 0/8] wrong, on dp 2, pp 2, tp 2            gradients   weights
    [rank 0/8] other rows on each rank of tp           1.8e-01   4.9e-01
    [rank 0/8] tied weights go apart                   1.0e+00   1.4e+00
    [rank 0/8] norm of a stage                         1.3e-15   8.6e-03
    [rank 0/8] tied weight twice                       1.3e-15   9.2e-03
    [rank 0/8] both meshes train like one process; 4 mistakes do not, and raise no error

"Off by" compares with one process that takes the whole batch, in float64: loss and gradients of the
first step, before clipping; the weights after 10 steps (2 for what is wrong). It is the worst
tensor: the norm of the difference, divided by that of the gradient, or of the weight's way so far.
How large to make each dimension: docs/which_parallelism.md.

The mistakes raise no error. All stages of a replica, with their tp groups, need the same rows:
DistributedSampler(data, num_replicas=dp.size(), rank=dp.get_local_rank()), and the same random
augmentation. Dropout that is seeded by rank breaks tp, too: see seed_of_group in
recipes/tensor_parallel.py. All micro-batches, of all ranks and in all steps, need equally many rows
(drop_last=True), and equally many targets that count. AdamW hides a wrong scale of the gradients.
The last stage has the losses, one for each micro-batch of its replica: average them over dp, too.

Take many more micro-batches than stages. ScheduleInterleaved1F1B, with several stages on each rank,
idles less. The zero-bubble schedules (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble) compute
gradients of weights where others wait. SequenceParallel, in place of Whole, splits the activations
between the layers over tp. (Not tried here.)

torchrun numbers the ranks machine by machine, and along the last dimension of a mesh they follow
each other. So "tp" is last, and its size divides the ranks of a machine. If "tp" stands before
"dp", clipping fails: "Invalid mesh_dim_names". With one stage, tie the two layers again after
parallelize_module, which unties them without an error. To save: checkpoint_any_world_size.py.
"""

import gc
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

CONTEXT, VOCABULARY, WIDTH, HEADS, LAYERS = 16, 64, 32, 4, 4
BATCH, STEPS, WRONG_STEPS, MAX_NORM, LEARNING_RATE = 32, 10, 2, 0.3, 1e-2


def keep_stage(model, number, count):
    """Yours: cut the model down to stage number of count, in place. What is left keeps its name."""
    if number > 0:
        model.characters = model.positions = None
    if number < count - 1:
        model.norm = model.head = None
    kept = [name for i, name in enumerate(model.blocks) if i * count // len(model.blocks) == number]
    model.blocks = nn.ModuleDict({name: model.blocks[name] for name in kept})
    return model


class Whole(ParallelStyle):
    """In a plan: a layer (of one input) that each rank of a tp group holds whole, and computes.

    Give every layer with weights a place in the plan (or see by_mesh in tensor_parallel.py).
    """

    def _apply(self, module, device_mesh):
        return distribute_module(
            module,
            device_mesh,
            None,
            lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
            lambda _, output, mesh: output.to_local(),
        )


def plan_of(model):
    """Yours: how tp splits the layers of a stage. (Of a layer that is not there, torch warns.)"""
    plan = {"blocks.*.norm?": Whole()}
    for columns, rows in (("qkv", "out"), ("up", "down")):  # see recipes/tensor_parallel.py
        plan |= {f"blocks.*.{columns}": ColwiseParallel(), f"blocks.*.{rows}": RowwiseParallel()}
    if model.characters is not None:
        plan |= {"characters": RowwiseParallel(input_layouts=Replicate()), "positions": Whole()}
    if model.head is not None:
        plan |= {"norm": Whole(), "head": ColwiseParallel(output_layouts=Replicate())}
    return plan


def tied_weight(model):
    """Yours: this stage's copy of the weight that the first and the last share, or None."""
    layer = model.characters or model.head
    return layer and layer.weight


def ends_of(mesh):
    """Return the group of this rank and its counterpart at the other end of the pipeline, or None.

    For add_up_tied. All ranks must call it, those of the stages in between, too.
    """
    if mesh["pp"].size() == 1:
        return None
    stages = mesh.mesh.movedim(mesh.mesh_dim_names.index("pp"), -1).flatten(0, -2)
    return dist.new_subgroups_by_enumeration(stages[:, [0, -1]].tolist())[0]


def add_up_tied(tied, ends):
    """Right: the first and the last stage have a copy of the tied weight, and add up its gradients.

    tied: tied_weight(model); ends: ends_of(mesh). Train both copies, or none. Let tp split both
    along one dimension: RowwiseParallel for an embedding, with ColwiseParallel for the head.
    """
    if ends is not None and tied is not None and tied.grad is not None:
        dist.all_reduce(tied.grad.to_local(), group=ends)


def norm_of_model(model, mesh, tied=None):
    """The right norm: of the gradients of all stages, each number once. All ranks must call it.

    tied: tied_weight(model), after add_up_tied. The first stage counts it. Returns a tensor.
    """
    first = mesh["pp"].get_local_rank() == 0
    trained = [p for p in model.parameters() if p.grad is not None and (first or p is not tied)]
    square = torch.zeros((), device=mesh.device_type)
    if trained:  # a DTensor knows what is in parts (over dp, over tp), and what each rank has
        square += get_total_norm([p.grad for p in trained]).full_tensor() ** 2
    dist.all_reduce(square, group=mesh.get_group("pp"))
    return square.sqrt()


def whole_batches(mesh=None):
    """The whole batch of each step. All ranks make the same, and take their rows."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
        yield text[:, :-1], text[:, 1:]


def other_rows(mesh):
    """Wrong: the ranks of a tp group take different rows."""
    for batch in whole_batches():
        yield [rows.roll(mesh["tp"].get_local_rank(), 0) for rows in batch]


def norm_of_stage(model, mesh, tied):
    """Wrong: as with clip_grad_norm_, each stage scales its gradients by a norm of its own."""
    return get_total_norm([p.grad for _, p in trained(model)]).full_tensor()


def train(
    mesh, steps=STEPS, batches=whole_batches, add_up_tied=add_up_tied, norm_of_model=norm_of_model
):
    """The right way: the answer. The wrong ways give it other functions of these names.

    Return the first step's loss (on a last stage), its gradients, the weights after the last step
    (both whole, by name, of this stage), and the bytes of weights on this rank.
    """
    device, model, max_norm = torch.device("cpu"), GPT(), MAX_NORM
    dp, pp, tp = mesh["dp"], mesh["pp"], mesh["tp"]
    model = keep_stage(model, pp.get_local_rank(), pp.size())
    parallelize_module(model, tp, plan_of(model))
    for module in [*model.blocks.values(), model]:
        fully_shard(module, mesh=dp, reshard_after_forward=False)  # else: a gather a micro-batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    stage = PipelineStage(model, pp.get_local_rank(), pp.size(), device, group=pp.get_group())
    # schedule.step divides p.grad by the number of micro-batches: so loss_fn takes a mean. It would
    # divide the gradients of an earlier call once more: take more micro-batches, not more calls.
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    tied, ends = tied_weight(model), ends_of(mesh)
    for step, (inputs, targets) in zip(range(steps), batches(mesh)):
        rows, losses = slice(dp.get_local_rank(), None, dp.size()), []
        first = [inputs[rows].contiguous()] if stage.is_first else []  # torch 2.11 wants contiguous
        last = {"target": targets[rows], "losses": losses} if stage.is_last else {}
        optimizer.zero_grad()
        schedule.step(*first, **last)  # fully_shard averages over dp, after the last backward
        add_up_tied(tied, ends)
        norm = norm_of_model(model, mesh, tied)
        if step == 0:
            loss = torch.stack(losses).mean().item() if losses else None
            gradients = {name: p.grad.full_tensor().clone() for name, p in trained(model)}
        clip_grads_with_norm_(model.parameters(), max_norm, norm)
        optimizer.step()
    weights = {name: p.detach().full_tensor() for name, p in trained(model)}
    return loss, gradients, weights, sum(p.to_local().nbytes for p in model.parameters())


WRONG = {
    "other rows on each rank of tp": {"batches": other_rows},
    "tied weights go apart": {"add_up_tied": lambda tied, ends: None},
    "norm of a stage": {"norm_of_model": norm_of_stage},
    "tied weight twice": {"norm_of_model": lambda model, mesh, _: norm_of_model(model, mesh)},
}


def main():
    if os.environ.get("WORLD_SIZE") not in ("4", "8"):
        raise SystemExit("start it with: torchrun --standalone --nproc-per-node=8 (or 4) ...")
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)  # so that an error cannot pass for rounding
    # A norm is added up over dp, then over tp. torch notes that: no harm. (This name is private.)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    loss_alone, gradients_alone, weights_alone = train_alone()
    ranks, whole = dist.get_world_size(), sum(p.nbytes for p in GPT().parameters())
    for sizes in [(1, 4, ranks // 4), (ranks // 4, 2, 2)]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
        name = "dp {}, pp {}, tp {}".format(*sizes)
        loss, gradients, weights, kept = train(mesh)
        losses = [value for value in gathered(loss) if value is not None]  # of the last stages
        off = [
            abs(sum(losses) / len(losses) / loss_alone - 1),
            furthest(gradients, gradients_alone, {}),
            furthest(weights, weights_alone[-1], weights_alone[0]),
        ]
        log("{} off by: loss {:.1e} gradients {:.1e} weights {:.1e}".format(name, *off))
        kept = gathered(kept)
        log(f"{name} keeps {min(kept)} to {max(kept)} of {whole} bytes of weights on a rank")
        if not (all(value < 1e-10 for value in off) and 1 <= sum(kept) / whole < 1.1):
            raise RuntimeError(f"{name} does not train like one process, or keeps other shares")
    log(f"{'wrong, on ' + name:<38}gradients   weights")
    for way, changed in WRONG.items():
        _, gradients, weights, _ = train(mesh, WRONG_STEPS, **changed)
        off = [
            furthest(gradients, gradients_alone, {}),
            furthest(weights, weights_alone[WRONG_STEPS], weights_alone[0]),
        ]
        log(f"{way:<38}{off[0]:9.1e} {off[1]:9.1e}")
        if not (off[1] > 1e-4 and (off[0] < 1e-10 if "norm_of_model" in changed else off[0] > 0.1)):
            raise RuntimeError(f"{way}: off by {off}")
    log(f"both meshes train like one process; {len(WRONG)} mistakes do not, and raise no error")
    gc.collect()  # otherwise what is left of FSDP2 can abort the process at its exit
    dist.destroy_process_group()


def train_alone():
    """One process takes the whole batch. Return its loss, gradients, weights by step."""
    model, weights, found = GPT(), [], None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for inputs, targets in whole_batches():
        weights.append({name: p.detach().clone() for name, p in trained(model)})  # before the step
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        found = found or (loss.item(), {name: p.grad.clone() for name, p in trained(model)})
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return *found, [*weights, {name: p.detach() for name, p in trained(model)}]


def furthest(found, expected, start):
    """By how much the worst tensor of all stages is off, relative to its way from start."""
    worst = (
        torch.stack(
            [
                (tensor - expected[name]).norm() / (expected[name] - start.get(name, 0)).norm()
                for name, tensor in found.items()
            ]
        )
        .max()
        .item()
    )
    return torch.tensor(gathered(worst)).max().item()  # Python's max may lose a nan


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # (No bias: that of k has a gradient of 0, so its relative error would be noise.)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        # Trap: tp gives each rank consecutive outputs of qkv. So they come head by head: q, k, v of
        # head 0, then of head 1. (Many pretrained weights have all q first.) tp must divide HEADS.
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
        self.positions.requires_grad_(False)  # frozen, as in fine-tuning

    def forward(self, x):
        if self.characters is not None:
            x = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x)).clone()  # of a view, FSDP2 warns


def trained(model):
    """[(name, parameter)] of what is not frozen, a tied one by both its names."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, p) for name, p in named if p.requires_grad]


def loss_fn(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
