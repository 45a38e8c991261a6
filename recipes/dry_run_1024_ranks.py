"""What would each of 1,024 GPUs keep and send in my job, before I pay for them?

    dist.init_process_group("fake", rank=0, world_size=1024)
    mesh = init_device_mesh("cpu", (1024,))
    with FakeTensorMode() as fake:
        model = YourModel()  # its tensors have shapes, and no memory
    shard(model, mesh)  # as in your job: fully_shard() for each block, then for the model
    with fake, CountCollectives() as step:
        train_one_step(model)  # nothing is computed, and nothing is sent
    print(step.calls, step.bytes, local_bytes(model.parameters()))

One process plays one rank of the job. It runs your training step on a CPU, and counts. Make its
inputs inside "with fake", too, but meshes outside: torch reads their numbers. The step must not ask
for a value: no loss.item(). CountCollectives and local_bytes stand below. FakeTensorMode is private
in torch: it may change. For DDP (DistributedDataParallel), see with_ddp(). For a pipeline, build
the blocks of one stage, and see train_in_a_pipeline().

    python recipes/dry_run_1024_ranks.py

    [rank 0/12] bytes    kept: real      dry     calls: real           dry
    [rank 0/12] DDP         3345456  3345456       1: 836352     1: 836352
    [rank 0/12] FSDP2        291504   291504      18: 2623104    18: 2623104
    [rank 0/12] root only    291504   291504       2: 1748736     2: 1748736
    [rank 0/12] FSDP2 x TP   278832   278832      29: 1289376    29: 1289376
    [rank 0/12] 3D           278800   278800      19: 326304    19: 326304
    [rank 8/1024] MB             kept  all-reduce  all-gather reduce-scatter        send  at once
    [rank 8/1024] DDP         17179.9   1: 4295.0   0:    0.0      0:    0.0   0:    0.0      0.0
    [rank 8/1024] FSDP2          16.8   0:    0.0  16: 8589.9      8: 4295.0   0:    0.0    536.9
    [rank 8/1024] root only      16.8   0:    0.0   1: 4295.0      1: 4295.0   0:    0.0   4295.0
    [rank 8/1024] FSDP2 x TP     16.8  15: 8053.1  16: 1073.7      8:  536.9   0:    0.0     67.1
    [rank 8/1024] 3D             16.8  16: 8589.9   2:  134.2      2:  134.2   8: 4295.0    134.2
    [rank 8/1024] MB kept: 17179.9 with DDP; 16.8 with FSDP2, and one gathered block of 536.9

First, 12 real ranks on CPUs, with a tiny model, match their dry runs, byte for byte. Then one
process plays rank 8 of 1,024. "Kept" is what stays between steps: weights, gradients and two
numbers of Adam for each weight. Activations are not counted, and are often the most: for FSDP2, see
torch.distributed._tools.fsdp2_mem_tracker (private). The other cells are "calls: bytes", those of
the first table in all, receives included. A call counts with its larger side: the result of an
all-gather, the input of a reduce-scatter. On the network, an all-reduce moves about twice its size,
the others once. All is float32 here. With MixedPrecisionPolicy(param_dtype=torch.bfloat16), FSDP2
sends half as much, and keeps as much.
With DDP, each rank keeps the whole model. FSDP2 (fully_shard) keeps a shard (a part) of each tensor
on a rank, and gathers block after block. With TP (tensor parallel), 8 ranks compute each block
together, on the same rows. Their all-reduces carry activations: one for each block forward, and one
backward, but for the first block, whose inputs need no gradient.
"3D" adds a pipeline. The blocks are dealt out over 4 stages, 2 for each. A batch goes from stage to
stage in 4 parts (micro-batches), and the gradients of each part come back: this rank sends 8 times.
A first or a last stage sends half as often: change RANK to see it. Each stage gathers its blocks
once, and keeps them for the step. (If it freed a block after each forward, it would
gather 10 times, not 2: each block for each of 4 micro-batches, and once for backward.)

"root only" is a mistake: fully_shard() for the whole model (the root) alone, and not for its
blocks. The shards are as small, but each step gathers the whole model "at once". Dividing the
memory by the number of ranks does not show this. "At once" is the largest gather; in 3D, it is all
blocks of a stage. The peak is higher: FSDP2 may hold two gathered blocks and the whole gradients of
two, 3D the gradients of its stage. DDP's line shows a first step. Later ones send the same bytes,
in several buckets.
"""

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
import torch.multiprocessing as mp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode  # private
from torch.utils._pytree import tree_leaves  # private

# Your job. rows: tokens of a rank in a step. tensor: how many ranks compute a block together.
# pipeline: how many stages there are. With these, rank 8 is in the second stage.
RANKS, RANK = 1024, 8
JOB = {"width": 4096, "blocks": 8, "rows": 4096, "tensor": 8, "pipeline": 4}
# Real processes, to compare with. Width 66 on 12 ranks: some have smaller shards than others.
REAL_RANKS, REAL_JOB = 12, {"width": 66, "blocks": 6, "rows": 6, "tensor": 2, "pipeline": 3}
KINDS = {"allreduce_": "all-reduce", "all_reduce": "all-reduce",
         "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
         "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
         "broadcast_": "broadcast", "send": "send", "recv_": "recv"}
SEND_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class CountCollectives(TorchDispatchMode):
    """Counts the collectives inside a "with": .calls, .bytes and .largest, each by kind.

    The public torch.distributed.tensor.debug.CommDebugMode counts calls, but no bytes.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.largest = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor handles it, and calls this again with its shards
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in SEND_NOTHING:
            if name not in KINDS:  # never pass over a collective in silence
                raise RuntimeError(f"{name} is not counted: add it to KINDS")
            # What goes in, and what comes out: the larger one is the whole tensor. (For a call with
            # a list of tensors, add up those of each side.)
            size = max(t.nbytes for t in tree_leaves((args, result)) if torch.is_tensor(t))
            kind = KINDS[name]
            self.calls[kind] += 1
            self.bytes[kind] += size
            self.largest[kind] = max(self.largest[kind], size)
        return result


def with_ddp(model, fake, mesh):
    """Each rank keeps the whole model. fake: a FakeTensorMode, or a context that does nothing."""
    dry = dist.get_backend() == "fake"
    with fake:  # DDP makes its buckets here
        # init_sync would compare and copy real numbers, which a fake model does not have. Without
        # gradient_as_bucket_view, the buckets are a second copy of the gradients, not counted here.
        model = DDP(model, init_sync=not dry, gradient_as_bucket_view=True)
    if dry:  # DDP's own all-reduce fails: it needs a result, and the fake group gives none
        model.register_comm_hook(None, all_reduce_in_place)
    return model


def all_reduce_in_place(state, bucket):
    """Make the call that is counted, and give the bucket itself as the result. (No average.)"""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def with_fsdp2(model, fake, mesh):
    """Each rank keeps its shard of each block, and gathers a block when it needs it."""
    # In a pipeline, each micro-batch would gather it again: so there, it stays for the step.
    in_a_pipeline = mesh["pipeline"].size() > 1
    for block in model:
        fully_shard(block, mesh=mesh["data"], reshard_after_forward=not in_a_pipeline)
    return fully_shard(model, mesh=mesh["data"])


def with_fsdp2_root_only(model, fake, mesh):
    """Wrong: without fully_shard() for each block, the whole model is gathered at once."""
    return fully_shard(model, mesh=mesh["data"])


def with_fsdp2_and_tp(model, fake, mesh):
    """Some ranks compute each block together, on the same rows. FSDP2 shards what each has."""
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(),
                                                   "down": RowwiseParallel()})
    return with_fsdp2(model, fake, mesh)


# Name: (function, do ranks compute a block together, is there a pipeline)
WAYS = {"DDP": (with_ddp, False, False), "FSDP2": (with_fsdp2, False, False),
        "root only": (with_fsdp2_root_only, False, False),
        "FSDP2 x TP": (with_fsdp2_and_tp, True, False), "3D": (with_fsdp2_and_tp, True, True)}


def train_and_count(way, width, blocks, rows, tensor, pipeline, steps=1):
    """Train with the group that there is, a fake or a real one.

    Returns ({what: bytes that this rank keeps}, [a CountCollectives for each step]).
    """
    split, has_tensor, has_pipeline = WAYS[way]
    tensor, pipeline = tensor if has_tensor else 1, pipeline if has_pipeline else 1
    # Make meshes outside of "with fake": a mesh is an array of ranks, and torch reads its numbers.
    # Neighbours are in one "tensor" group. In your job, leave out dimensions of size 1.
    mesh = init_device_mesh("cpu", (dist.get_world_size() // pipeline // tensor, pipeline, tensor),
                            mesh_dim_names=("data", "pipeline", "tensor"))
    fake = FakeTensorMode() if dist.get_backend() == "fake" else contextlib.nullcontext()
    with fake:  # your model, or one stage of it
        model = nn.Sequential(*[FeedForward(width) for _ in range(blocks // pipeline)])
    model = split(model, fake, mesh)
    rows *= tensor * pipeline  # so many ranks share a batch; that of the whole job is the same
    traffic = []
    with fake:
        optimizer = torch.optim.AdamW(model.parameters())
        forward_backward = (
            train_in_a_pipeline(model, mesh["pipeline"], rows, width) if pipeline > 1 else
            lambda inputs, targets: loss_fn(model(inputs), targets).backward())
        for _ in range(steps):
            optimizer.zero_grad()
            inputs, targets = torch.randn(2, rows, width)  # your data
            with CountCollectives() as step:
                forward_backward(inputs, targets)
                optimizer.step()
            traffic.append(step)
    parameters = list(model.parameters())
    kept = {"weights": parameters, "grads": [p.grad for p in parameters if p.grad is not None],
            "Adam": [value for state in optimizer.state.values() for value in state.values()]}
    return {what: local_bytes(tensors) for what, tensors in kept.items()}, traffic


def train_in_a_pipeline(model, pp, rows, width):
    """Return a function that trains on a batch (inputs, targets), in micro-batches.

    model: the blocks of this rank's stage, inside fully_shard(). pp: the mesh of the ranks that
    have the stages of one pipeline. rows: of a batch. Call it in "with fake". It trains one step
    itself: clear the gradients before yours. recipes/three_dimensions.py trains in this way, and
    checks the result.
    """
    # A micro-batch, as it goes from stage to stage: its shape, dtype and device. (Real stages could
    # ask each other.) A wrong dtype would not show here: the fake group compares nothing.
    example = torch.randn(rows // pp.size(), width, requires_grad=True)
    stage = PipelineStage(model, pp.get_local_rank(), pp.size(), example.device,
                          input_args=example, output_args=example.clone(), group=pp.get_group())
    # The fewest micro-batches that it takes. With more, ranks are idle for less time.
    schedule = Schedule1F1B(stage, n_microbatches=pp.size(), loss_fn=loss_fn)

    def forward_backward(inputs, targets):
        first = [inputs] if stage.is_first else []
        last = {"target": targets} if stage.is_last else {}
        schedule.step(*first, **last)

    # The first call also opens connections, with a few bytes: it is not counted.
    forward_backward(torch.randn(rows, width), torch.randn(rows, width))
    return forward_backward


def loss_fn(outputs, targets):
    return mse_loss(outputs, targets)  # your loss


def local_bytes(tensors):
    """Bytes of what this rank has of them."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


class FeedForward(nn.Module):
    """width -> 4 * width -> width, added to the inputs."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, inputs):
        return inputs + self.down(gelu(self.up(inputs)))


def main():
    parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # The processes meet through a file. forkserver: torch is imported once for all of them.
        mp.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
        mp.start_processes(compare_with_real, args=(f"file://{folder}/meet",), nprocs=REAL_RANKS,
                           start_method="forkserver")
    dist.init_process_group("fake", rank=RANK, world_size=RANKS)
    predict()
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_with_real(rank, meeting_point):
    """In each of REAL_RANKS processes: train three real steps, then play this rank, and compare."""
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=REAL_RANKS,
                            timeout=timedelta(seconds=60))
    real = {way: train_and_count(way, **REAL_JOB, steps=3) for way in WAYS}
    gc.collect()
    dist.destroy_process_group()

    dist.init_process_group("fake", rank=rank, world_size=REAL_RANKS)
    log(f"{'bytes':<7} {'kept: real':>11} {'dry':>8}   {'calls: real':>13} {'dry':>13}")
    for way, (kept, [first, _, third]) in real.items():  # in step 2, DDP changes its buckets
        dry_kept, [dry] = train_and_count(way, **REAL_JOB)
        log(f"{way:<10} {sum(kept.values()):>8} {sum(dry_kept.values()):>8}  "
            f" {first.calls.total():>5}: {first.bytes.total():>6}"
            f" {dry.calls.total():>5}: {dry.bytes.total():>6}")
        if (kept, vars(first)) != (dry_kept, vars(dry)):
            raise RuntimeError(f"{way}: rank {rank} has {kept}, {vars(first)}; its dry run says"
                               f" {dry_kept}, {vars(dry)}")
        if first.bytes != third.bytes:
            raise RuntimeError(f"{way}: {first.bytes} in step 1, but {third.bytes} in step 3")
    gc.collect()
    dist.destroy_process_group()


def predict():
    """The dry run of JOB: print a line for each way, and check what the docstring says of them.

    (Your own model may have layers outside of its blocks: then change the checks, too.)
    """
    columns = {"all-reduce": 12, "all-gather": 12, "reduce-scatter": 15, "send": 12}
    header = "".join(f"{kind:>{width}}" for kind, width in columns.items())
    log(f"{'MB':<10}     kept{header}  at once", every_rank=True)
    kept, step, at_once = {}, {}, {}
    for way in WAYS:
        kept[way], [step[way]] = train_and_count(way, **JOB)
        # In 3D, all the gathered blocks of a stage stay until the end of the step.
        gathered = step[way].bytes if way == "3D" else step[way].largest
        at_once[way] = gathered["all-gather"]
        cells = [f"{sum(kept[way].values()) / 1e6:9.1f}"]
        for kind, width in columns.items():
            cell = f"{step[way].calls[kind]}: {step[way].bytes[kind] / 1e6:6.1f}"
            cells.append(f"{cell:>{width}}")
        log(f"{way:<10}{''.join(cells)}{at_once[way] / 1e6:9.1f}", every_rank=True)

    model, blocks, stages = kept["DDP"]["weights"], JOB["blocks"], JOB["pipeline"]
    even = JOB["width"] % RANKS == 0  # otherwise shards differ, and gathers are padded
    if even and any(kept[way]["weights"] * RANKS != model for way in WAYS if way != "DDP"):
        raise RuntimeError(f"FSDP2 does not keep 1/{RANKS} of the model")
    if (even and at_once["FSDP2"] * blocks != model
            or step["FSDP2"].calls["all-gather"] != 2 * blocks):
        raise RuntimeError("FSDP2 does not gather one block at a time, forward and backward")
    outer = RANK // JOB["tensor"] % stages in (0, stages - 1)  # a first or last stage: one way only
    sends = stages * (1 if outer else 2)
    if (step["3D"].calls["all-gather"], step["3D"].calls["send"]) != (blocks // stages, sends):
        raise RuntimeError("3D does not gather a block once, or send each micro-batch on and back")
    if even and (kept["root only"] != kept["FSDP2"] or at_once["root only"] != model):
        raise RuntimeError("the mistake does not show: small shards, and all gathered at once")
    log(f"MB kept: {sum(kept['DDP'].values()) / 1e6:.1f} with DDP;"
        f" {sum(kept['FSDP2'].values()) / 1e6:.1f} with FSDP2, and one gathered block of"
        f" {at_once['FSDP2'] / 1e6:.1f}", every_rank=True)


# ---- Helpers that are no part of the lesson ----


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if "RANK" in os.environ:
        stop(f"it starts its processes itself; start it with: python {sys.argv[0]}")
    parts, stages = JOB["tensor"] * JOB["pipeline"], JOB["pipeline"]
    if RANKS % parts or RANKS == parts or stages < 2 or JOB["blocks"] % stages:
        stop("in JOB, pipeline must be 2 or more and divide blocks; RANKS must be 2 or more times"
             " tensor x pipeline")


if __name__ == "__main__":
    main()
