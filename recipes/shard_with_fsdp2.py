"""How do I train a model whose weights, gradients and optimizer state do not fit on one GPU?

    mesh = init_device_mesh(device.type, (world_size,))  # all ranks, in one row
    for block in model.blocks:  # the layers of your model
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the rest: an embedding, a head
    optimizer = torch.optim.AdamW(model.parameters())  # after sharding

With DistributedDataParallel (DDP), each rank (process) holds everything. fully_shard (FSDP2, fully
sharded data parallel) takes the place of DDP(model): each rank holds a shard, its part of each
tensor. All ranks gather a block's whole weights before it runs, and free them after. The training
loop stays as with DDP: each rank takes rows of its own. The evaluation does not, nor does any
method but forward(): see evaluate_with_shards.py. DDP sends rank 0's weights at the start, and its
BatchNorm statistics (buffers) before each forward pass. FSDP2 sends neither: start from the same
weights on all ranks, and share the buffers before you evaluate or save.

    torchrun --standalone --nproc-per-node=2 recipes/shard_with_fsdp2.py

    [rank 0/2] bytes on one rank       weights gradients    AdamW    whole   off by
    [rank 0/2] DDP                     1226112   1226112  2452224
    [rank 0/2] FSDP2                    613056    613056  1226112   334464  4.8e-07
    [rank 0/2] FSDP2, 2 micro-batches   613056    613056  1226112   334464  8.5e-07
    [rank 0/2] only the root            613056    613056  1226112  2452224  4.8e-07
    [rank 0/2] optimizer first         1839168    613056        0   334464  1.0e+00
    [rank 0/2] whole_state(): 1226112 bytes; loads, off by 4.0e-07
    [rank 0/2] state_dict():  613056 bytes; does not load
    [rank 0/2] start_in_shards(): 761664 bytes of weights at most, not 1226112; off by 4.0e-07
    [rank 0/2] FSDP2: 50% of the bytes, 27% of the weights whole at once, DDP's up to rounding

The bytes are those kept between two steps. "Whole" is the most that a rank held of whole weights at
one moment of a step. With FSDP2, those are the weights of a block, those that the next gather has
fetched, and the head. The gradients of a block, whole for a moment, and activations come on top.
"Off by" is the distance from DDP after 10 AdamW steps, relative to how far the weights moved. "Only
the root" is fully_shard(model) alone: the whole model is one block. An optimizer made first keeps
the old whole weights and trains nothing, without an error. Rank 0's state_dict() has only its
shards, which do not load into a plain model. A model too large even to be built starts on the
"meta" device, which has no memory: see start_in_shards(). To start from a file, see
pretrained_to_shards.py; to save and resume, checkpoint_any_world_size.py.

Now write it yourself: exercises/14_zero_3.py.
"""

import gc
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import mse_loss, relu
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

BLOCKS, WIDTH, STEPS, ROWS = 8, 96, 10, 16  # ROWS on each rank
MAX_NORM = 0.02  # clips in every step here
DECAY = 0.9  # of the average of the weights; 0.999 or more for a real training


def shard(model, mesh, **options):
    """Shard a model block by block: the right way. Make the optimizer after this.

    model: with the same weights on all ranks, as fully_shard takes each rank's own. It may be on
    the CPU: torch moves each block to the mesh's devices when it shards it.
    options: to compute in bfloat16, pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32). Weights and gradients stay in float32. The model then returns
    bfloat16: compute the loss from model(x).float().
    """
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)  # gathered and freed as one
    fully_shard(model, mesh=mesh, **options)  # what belongs to no block: here the head


def train(model, optimizer, batches, micro_batches=1):
    """Train as without shards; return the average of the weights (EMA), itself in shards.

    batches: [(inputs, targets), ...] of this rank, each to be cut into so many micro-batches.
    """
    average = [p.detach().clone() for p in model.parameters()]  # AveragedModel cannot copy shards
    for inputs, targets in batches:
        optimizer.zero_grad()
        parts = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        for i, (x, y) in enumerate(parts):
            # Exchange gradients in the last backward() only. Until then, each rank keeps its own
            # ones whole, which costs memory. Leave this line out to exchange them each time.
            model.set_requires_gradient_sync(i == len(parts) - 1)
            (mse_loss(model(x), y) / len(parts)).backward()
        # This returns the norm as a DTensor. To log it, norm.full_tensor(): all ranks must call it.
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()  # each rank updates its own shards
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 1 - DECAY)  # and averages them, without an exchange
    return average


def start_in_shards(device, mesh):
    """Right, too, and for models that do not fit on one rank even before training.

    Return (model, most). The weights are those of Stack() in a single process. most: the bytes of
    weights on this rank when it held most, its shards and a whole block.
    """
    with torch.device("meta"):  # names and shapes, no memory
        model = Stack()
    shard(model, mesh)
    model.to_empty(device=device)  # memory for shards and buffers, without values: they come below
    most, filled = 0, set()
    torch.manual_seed(1)  # one seed for all ranks: each draws all numbers, and keeps its shards
    for part, build in [*((block, Layer) for block in model.blocks), (model.head, new_head)]:
        whole = build().to(device)
        most = max(most, count_bytes(model.parameters()) + count_bytes(whole.parameters()))
        for p, full in zip(part.parameters(), whole.parameters(), strict=True):
            # src_data_rank=None: no exchange, because all ranks have the same numbers.
            shards = distribute_tensor(full.detach(), mesh, p.placements, src_data_rank=None)
            p.detach().copy_(shards)
        for buffer, full in zip(part.buffers(), whole.buffers(), strict=True):
            buffer.copy_(full)  # no checkpoint has those with persistent=False
        filled.update([*part.parameters(), *part.buffers()])
        del whole, full, shards  # otherwise two blocks are whole while the next one is built
    empty = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor not in filled
    ]
    if empty:
        raise RuntimeError(f"without values: {', '.join(empty)}")
    return model, most


def whole_state(model):
    """Return the weights to save, on rank 0, in the CPU's memory; {} on the others.

    All ranks must call it. Inside "if rank == 0", it hangs.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def shard_root_only(model, mesh):
    """Wrong: the whole model is one block, gathered at once and kept to the end of backward()."""
    fully_shard(model, mesh=mesh)


def optimizer_first(model, mesh):
    """Wrong: the optimizer holds the old weights, which never get gradients. No error."""
    optimizer = new_optimizer(model)
    shard(model, mesh)
    return optimizer


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if WIDTH % dist.get_world_size():  # FSDP2 would fill up the shards: other bytes
        raise SystemExit("start it with: torchrun --standalone --nproc-per-node=2, 3 or 4")
    compare(torch.device("cpu"))
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    torch.manual_seed(0)  # every rank makes the same rows, and takes its own ones
    rows = torch.randn(STEPS, 2, ROWS * world_size, WIDTH)
    batches = [tuple(batch[:, rank::world_size]) for batch in rows]
    log("bytes on one rank       weights gradients    AdamW    whole   off by")
    ddp = new_model()
    optimizer = new_optimizer(ddp)
    ddp_average = train_ddp(DDP(ddp), optimizer, batches)
    everything = bytes_held(ddp, optimizer)
    log("DDP                    {:>8} {:>9} {:>8}".format(*everything))
    for name, way, micro_batches in [
        ("FSDP2", shard, 1),
        ("FSDP2, 2 micro-batches", shard, 2),
        ("only the root", shard_root_only, 1),
        ("optimizer first", optimizer_first, 1),
    ]:
        model = new_model()
        optimizer = way(model, mesh) or new_optimizer(model)  # only optimizer_first returns one
        average = train(model, optimizer, batches, micro_batches)
        off = max(off_by(model, ddp), off_by(average, ddp_average))  # the worse
        held, most = bytes_held(model, optimizer), most_gathered(model, *batches[0])
        log("{:<22} {:>8} {:>9} {:>8} {:>8}  {:.1e}".format(name, *held, most, off))
        trains, by_blocks = way is not optimizer_first, way is not shard_root_only
        few = 2 * count_bytes(Layer().parameters()) + count_bytes(new_head().parameters())
        if (off < 1e-3) != trains or (most <= few) != by_blocks:
            raise RuntimeError(f"{name}: this is not what this file says")
        if name == "FSDP2":
            sharded, at_once = model, most / everything[0]
            share = max(ours / total for ours, total in zip(held, everything, strict=True))
    if share > 1.1 / world_size:
        raise RuntimeError(f"a rank holds {share:.0%} of what it holds with DDP")
    check_saved(whole_state(sharded), sharded.state_dict(), ddp)
    check_start(device, mesh, batches, ddp)
    log(
        f"FSDP2: {share:.0%} of the bytes, {at_once:.0%} of the weights whole at once, DDP's up to"
        " rounding"
    )


def train_ddp(model, optimizer, batches):
    """What FSDP2 is compared with: DDP, and torch's own average of the weights."""
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model.module)  # the first call copies
    for inputs, targets in batches:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        averaged.update_parameters(model.module)
    return list(averaged.parameters())


def most_gathered(model, inputs, targets):
    """Return the most bytes of whole weights in a step, those in use and those fetched early."""
    results, most = [], 0

    def look(*_):
        nonlocal most
        waiting = [tensor for result in results if (tensor := result()) is not None]
        # The weights of a block in shards are DTensors, those of a whole one are not.
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        most = max(most, sum(t.untyped_storage().nbytes() for t in waiting + whole))

    class Gather:  # what fully_shard() calls to gather; this one takes note of the results
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            results.append(weakref.ref(output_tensor))
            look()
            whole = torch.empty_like(output_tensor)  # not counted. Gloo's thread lets go of it late
            all_gather_single(whole, input_tensor.clone(), group)
            output_tensor.copy_(whole)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
    for block in model.blocks:
        block.up.register_forward_hook(look)
    mse_loss(model(inputs), targets).backward()
    return most


def check_saved(state, shards, ddp):
    """A single process can load whole_state(), and not the state_dict() of rank 0."""
    if dist.get_rank() == 0:
        loaded = new_model()
        loaded.load_state_dict(state)
        off = off_by(loaded, ddp)
        log(f"whole_state(): {count_bytes(state.values())} bytes; loads, off by {off:.1e}")
        try:
            new_model().load_state_dict(shards)
            outcome = "loads"
        except RuntimeError:  # "got mixed torch.Tensor and DTensor"
            outcome = "does not load"
        log(f"state_dict():  {count_bytes(shards.values())} bytes; {outcome}")
        if not (off < 1e-3 and outcome == "does not load"):
            raise RuntimeError("what is saved is not what this file says")
    dist.barrier()  # the others wait here for rank 0


def check_start(device, mesh, batches, ddp):
    """It gives the weights of one process, bit for bit, and trains like any other model."""
    model, most = start_in_shards(device, mesh)
    single, whole = new_model(), flat(new_model())
    buffers = torch.stack([*model.buffers()]), torch.stack([*single.buffers()])
    if not (torch.equal(flat(model), whole) and torch.equal(*buffers)):
        raise RuntimeError("start_in_shards() does not give the weights of one process")
    train(model, new_optimizer(model), batches)
    off = off_by(model, ddp)
    log(f"start_in_shards(): {most} bytes of weights at most, not {whole.nbytes}; off by {off:.1e}")
    if not (most < whole.nbytes and off < 1e-3):
        raise RuntimeError("start_in_shards() does not do what this file says")


def bytes_held(model, optimizer):
    """Return the bytes on this rank: weights of both, gradients, AdamW's two averages."""
    weights = {*model.parameters(), *(p for g in optimizer.param_groups for p in g["params"])}
    state = [t for values in optimizer.state.values() for t in values.values() if t.ndim]
    return [count_bytes(part) for part in (weights, [p.grad for p in model.parameters()], state)]


def count_bytes(tensors):
    """Return the bytes on this rank: of a DTensor, those of its shard."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def off_by(trained, expected):
    """Return the distance between two sets of weights, relative to how far training moved them."""
    trained, expected, start = flat(trained), flat(expected), flat(new_model())
    return ((trained - expected).norm() / (expected - start).norm()).item()


def flat(weights):
    """Return the weights, of a model or in a list, as one tensor, whole. All ranks must call it."""
    tensors = weights.parameters() if isinstance(weights, nn.Module) else weights
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        # Not in the state_dict(). In your model, the table of a rotary embedding, say.
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)

    def forward(self, inputs):
        return inputs + self.factor * self.down(relu(self.up(inputs)))


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


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
