"""How do I train a model whose weights, gradients and optimizer state do not fit on one GPU?

    mesh = init_device_mesh(device.type, (world_size,))  # all ranks, in one row
    for block in model.blocks:  # the layers of your model
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the rest: an embedding, a head
    optimizer = torch.optim.AdamW(model.parameters())  # after sharding

With DistributedDataParallel (DDP), each rank (process) holds everything. fully_shard (FSDP2, fully
sharded data parallel) takes the place of DDP(model): each rank holds a shard, its part of each
tensor. All ranks gather a block's whole weights before it runs, and free them after. The training
loop stays as with DDP: each rank takes rows of its own.

    torchrun --standalone --nproc-per-node=2 recipes/shard_with_fsdp2.py

    [rank 0/2] bytes on one rank       weights gradients    AdamW  blocks whole   off by
    [rank 0/2] DDP                      594432    594432  1188864
    [rank 0/2] FSDP2                    297216    297216   594432        1 of 4  4.6e-07
    [rank 0/2] FSDP2, 2 micro-batches   297216    297216   594432        1 of 4  3.3e-06
    [rank 0/2] only the root            297216    297216   594432        4 of 4  4.6e-07
    [rank 0/2] optimizer first          891648    297216        0        1 of 4  1.0e+00
    [rank 0/2] FSDP2, the blocks that are whole, forward and backward: 0 1 2 3 3 2 1 0
    [rank 0/2] whole_state(): 594432 bytes; loads, off by 4.4e-07
    [rank 0/2] state_dict():  297216 bytes; does not load
    [rank 0/2] start_in_shards(): 445824 bytes of weights at most, not 594432; off by 4.4e-07
    [rank 0/2] FSDP2: 50% of DDP's bytes, 1 of 4 blocks whole, DDP's weights up to rounding

The bytes are those kept between two steps. "Blocks whole" is the most blocks that were gathered at
one moment. Leave room for activations, and for two whole blocks, since torch may gather the next
one early. "Off by" is the distance from DDP after 10 AdamW steps, relative
to how far the weights moved. "Only the root" is fully_shard(model) alone: the whole model is one
block. An optimizer made first keeps the old whole weights and trains nothing, without an error.
Rank 0's state_dict() has only its shards, which do not load into a plain model. A model too large
even to be built starts on the "meta" device, which has no memory: see start_in_shards(). To save
and resume, see checkpoint_any_world_size.py.
"""

import argparse
import gc
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # else DDP imports it later, which keeps the group alive to the end
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BLOCKS, WIDTH, STEPS, ROWS = 4, 96, 10, 16  # ROWS on each rank
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
    for block in model.children():  # take your own list of blocks: model.blocks, say
        fully_shard(block, mesh=mesh, **options)  # gathered and freed as one
    fully_shard(model, mesh=mesh, **options)  # what belongs to no block: here nothing


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

    Return (model, most). The weights are those of new_model() in a single process. most: the
    bytes of weights on this rank when it held most, its shards and a whole block.
    """
    with torch.device("meta"):  # names and shapes, no memory
        model = new_model()
    shard(model, mesh)
    model.to_empty(device=device)  # memory for the shards, without values
    # Below, the blocks get theirs. Buffers, and weights outside of the blocks, would need some too.
    most = 0
    torch.manual_seed(1)  # one seed for all ranks: each draws all numbers, and keeps its shards
    for block in model.children():
        whole = new_block().to(device)
        most = max(most, count_bytes(model.parameters()) + count_bytes(whole.parameters()))
        for p, full in zip(block.parameters(), whole.parameters(), strict=True):
            # src_data_rank=None: no exchange, because all ranks have the same numbers.
            shards = distribute_tensor(full.detach(), mesh, p.placements, src_data_rank=None)
            p.detach().copy_(shards)
        del whole, full, shards  # otherwise two blocks are whole while the next one is built
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
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if backend == "nccl" else None)
    compare(device)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    torch.manual_seed(0)  # every rank makes the same rows, and takes its own ones
    rows = torch.randn(STEPS, 2, ROWS * world_size, WIDTH).to(device)
    batches = [tuple(batch[:, rank::world_size]) for batch in rows]
    log("bytes on one rank       weights gradients    AdamW  blocks whole   off by")
    ddp = new_model().to(device)
    optimizer = new_optimizer(ddp)
    ddp_average = train_ddp(DDP(ddp), optimizer, batches)
    everything = bytes_held(ddp, optimizer)
    log("DDP                    {:>8} {:>9} {:>8}".format(*everything))

    for name, way, micro_batches in [
            ("FSDP2", shard, 1), ("FSDP2, 2 micro-batches", shard, 2),
            ("only the root", shard_root_only, 1), ("optimizer first", optimizer_first, 1)]:
        model = new_model().to(device)
        optimizer = way(model, mesh) or new_optimizer(model)  # only optimizer_first returns one
        average = train(model, optimizer, batches, micro_batches)
        off = max(off_by(model, ddp), off_by(average, ddp_average))  # the worse
        held, whole = bytes_held(model, optimizer), blocks_whole(model, *batches[0])
        most = max(map(len, whole))
        log("{:<22} {:>8} {:>9} {:>8} {:>8} of {}  {:.1e}".format(name, *held, most, BLOCKS, off))
        trains, at_once = way is not optimizer_first, BLOCKS if way is shard_root_only else 1
        if (off < 1e-3) != trains or most != at_once:
            raise RuntimeError(f"{name}: this is not what this file says")
        if name == "FSDP2":
            sharded, trace = model, " ".join(whole)
            share = max(ours / total for ours, total in zip(held, everything, strict=True))
    if share > 1.1 / world_size:
        raise RuntimeError(f"a rank holds {share:.0%} of what it holds with DDP")
    log(f"FSDP2, the blocks that are whole, forward and backward: {trace}")
    check_saved(whole_state(sharded), sharded.state_dict(), ddp)
    check_start(device, mesh, batches, ddp)
    log(f"FSDP2: {share:.0%} of DDP's bytes, 1 of {BLOCKS} blocks whole, DDP's weights up to"
        " rounding")


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


def blocks_whole(model, inputs, targets):
    """Return which blocks are whole in the middle of each block, in forward and backward."""
    seen = []

    def look(*_):  # the weights of a block in shards are DTensors, those of a whole one are not
        seen.append("".join(str(i) for i, block in enumerate(model.children())
                            if not isinstance(next(block.parameters()), DTensor)))

    def look_in_both(layer, inputs, output):
        look()
        output.register_hook(look)  # called in backward

    for block in model.children():
        block[1].register_forward_hook(look_in_both)
    mse_loss(model(inputs), targets).backward()
    return seen


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
    whole = flat(new_model())
    if not torch.equal(flat(model), whole):
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
    """Return the weights, of a model or in a list, as one tensor on the CPU, whole.

    Shards are gathered: then all ranks must call it.
    """
    tensors = weights.parameters() if isinstance(weights, nn.Module) else weights
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole]).cpu()


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(*[new_block() for _ in range(BLOCKS)])


def new_block():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# ---- Helpers that are no part of the lesson ----


def pick_device(local_rank):
    """Return (device, backend): for each process a GPU and NCCL, or the CPU and Gloo."""
    if not torch.cuda.is_available():
        if torch.cuda.device_count() and local_rank == 0:  # the driver counts GPUs, torch has none
            print("note: torch cannot use the GPU of this machine, and takes the CPU: is its driver"
                  f" too old for CUDA {torch.version.cuda}?\n", end="", flush=True)
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)  # otherwise every process also takes memory on GPU 0
    torch.backends.cudnn.allow_tf32 = False  # TF32 is too coarse to compare runs
    return torch.device("cuda", local_rank), "nccl"


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
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node=gpu, or the CPU"
             " with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
