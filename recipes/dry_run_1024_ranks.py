"""What would each of 1,024 GPUs keep and send in my job, before I pay for them?

    dist.init_process_group("fake", rank=0, world_size=1024)
    mesh = init_device_mesh("cpu", (1024,))
    with FakeTensorMode() as fake:
        model = YourModel()  # its tensors have shapes, and no memory
    shard(model, mesh)  # as in your job: fully_shard() for each block, then for the model
    with fake, CountCollectives() as step:
        train_one_step(model)  # nothing is computed, and nothing is sent

One process plays one rank of the job. It runs your training step on a CPU, and counts. Make its
inputs inside "with fake", too. The step must not ask for a value: no loss.item(). CountCollectives
stands below. FakeTensorMode is private in torch: it may change. For DDP (DistributedDataParallel),
see with_ddp().

    python recipes/dry_run_1024_ranks.py

    [rank 0/4] bytes    kept: real      dry     calls: real           dry
    [rank 0/4] DDP         1115152  1115152       1: 278784     1: 278784
    [rank 0/4] FSDP2        283024   283024       6: 849024     6: 849024
    [rank 0/4] root only    283024   283024       2: 566016     2: 566016
    [rank 0/4] FSDP2 x TP   278800   278800       9: 430848     9: 430848
    [rank 0/1024] MB         weights   grads    Adam  all-reduce  all-gather reduce-scatter at once
    [rank 0/1024] DDP         4295.0  4295.0  8589.9   1: 4295.0   0:    0.0      0:    0.0     0.0
    [rank 0/1024] FSDP2          4.2     4.2     8.4   0:    0.0  16: 8589.9      8: 4295.0   536.9
    [rank 0/1024] root only      4.2     4.2     8.4   0:    0.0   1: 4295.0      1: 4295.0  4295.0
    [rank 0/1024] FSDP2 x TP     4.2     4.2     8.4  15: 8053.1  16: 1073.7      8:  536.9    67.1
    [rank 0/1024] MB kept: 17179.9 with DDP; 16.8 with FSDP2, and one gathered block of 536.9

First, 4 real ranks on CPUs, with a tiny model, match their dry runs, byte for byte. Then one
process plays rank 0 of 1,024. "Kept" is what stays between steps: activations are not counted,
and are often the most. A call counts with its larger side: the result of an all-gather, the input
of a reduce-scatter. On the network, an all-reduce moves about twice its size, the others once.
FSDP2 (fully_shard) keeps a shard (a part) of each tensor on a rank, and gathers block after block.
With TP (tensor parallel), 8 ranks compute each block together: their all-reduces carry activations.

"root only" is a mistake: fully_shard() for the model alone, and not for its blocks. The shards are
as small, but each step gathers the whole model "at once". Dividing the memory by the number of
ranks does not show this. "At once" is the largest all-gather: two blocks, and their gradients, can
be there. DDP's line shows a first step. Later ones send the same bytes, in several buckets.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode  # private
from torch.utils._pytree import tree_leaves  # private

# rows: tokens a step, for each rank. tensor_parallel: how many ranks compute a block together.
RANKS, JOB = 1024, {"width": 4096, "blocks": 8, "rows": 4096, "tensor_parallel": 8}
# Real processes, to compare with. Width 66 on 4 ranks: some have smaller shards than others.
REAL_RANKS, REAL_JOB = 4, {"width": 66, "blocks": 2, "rows": 8, "tensor_parallel": 2}
KINDS = {"allreduce_": "all-reduce", "all_reduce": "all-reduce",
         "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
         "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
         "broadcast_": "broadcast"}
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


def with_ddp(model, fake, tensor_parallel):
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
    """Make the call that is counted, and give the bucket itself as the result."""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def with_fsdp2(model, fake, tensor_parallel):
    """Each rank keeps its shard of each block, and gathers a block when it needs it.

    Make meshes outside of "with fake": a mesh is an array of ranks, and torch reads its numbers.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_fsdp2_root_only(model, fake, tensor_parallel):
    """Wrong: without fully_shard() for each block, the whole model is gathered at once."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def with_fsdp2_and_tp(model, fake, tensor_parallel):
    """Some ranks compute each block together, on the same rows. FSDP2 shards what each has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor_parallel, tensor_parallel),
                            mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        fully_shard(parallelize_module(block, mesh["tensor"], plan), mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


WAYS = {"DDP": with_ddp, "FSDP2": with_fsdp2, "root only": with_fsdp2_root_only,
        "FSDP2 x TP": with_fsdp2_and_tp}


def train_and_count(way, width, blocks, rows, tensor_parallel, steps=1):
    """Train with the group that there is, a fake or a real one.

    Returns ({what: bytes that this rank keeps}, [a CountCollectives for each step]).
    torch.distributed._tools.fsdp2_mem_tracker (private) tracks activations, too, for FSDP2.
    """
    fake = FakeTensorMode() if dist.get_backend() == "fake" else contextlib.nullcontext()
    with fake:
        model = nn.Sequential(*[FeedForward(width) for _ in range(blocks)])  # your model
    model = WAYS[way](model, fake, tensor_parallel)
    if way == "FSDP2 x TP":
        rows *= tensor_parallel  # ranks share rows: so the batch of the whole job stays the same
    traffic = []
    with fake:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(rows, width)  # your data
            with CountCollectives() as step:
                model(inputs).square().mean().backward()  # your loss
                optimizer.step()
            traffic.append(step)
    parameters = list(model.parameters())
    kept = {"weights": parameters, "grads": [p.grad for p in parameters],
            "Adam": [value for state in optimizer.state.values() for value in state.values()]}
    return {what: local_bytes(tensors) for what, tensors in kept.items()}, traffic


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
    dist.init_process_group("fake", rank=0, world_size=RANKS)
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
    for way, (kept, [first, _, third]) in real.items():
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
    """The dry run of JOB: print a line for each way, and check what the docstring says of them."""
    log(f"{'MB':<10} weights   grads    Adam  all-reduce  all-gather reduce-scatter at once")
    kept, step, at_once = {}, {}, {}
    for way in WAYS:
        kept[way], [step[way]] = train_and_count(way, **JOB)
        at_once[way] = step[way].largest["all-gather"]
        cells = [f"{size / 1e6:8.1f}" for size in kept[way].values()]
        for kind, width in (("all-reduce", 12), ("all-gather", 12), ("reduce-scatter", 15)):
            cell = f"{step[way].calls[kind]}: {step[way].bytes[kind] / 1e6:6.1f}"
            cells.append(f"{cell:>{width}}")
        log(f"{way:<10}{''.join(cells)}{at_once[way] / 1e6:8.1f}")

    model = kept["DDP"]["weights"]
    if kept["FSDP2"]["weights"] * RANKS != model or at_once["FSDP2"] * JOB["blocks"] != model:
        raise RuntimeError(f"FSDP2 does not keep 1/{RANKS} of the model, and gather one block")
    if kept["root only"] != kept["FSDP2"] or at_once["root only"] != model:
        raise RuntimeError("the mistake does not show: small shards, and all gathered at once")
    log(f"MB kept: {sum(kept['DDP'].values()) / 1e6:.1f} with DDP;"
        f" {sum(kept['FSDP2'].values()) / 1e6:.1f} with FSDP2, and one gathered block of"
        f" {at_once['FSDP2'] / 1e6:.1f}")


# ---- Helpers that are no part of the lesson ----


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if "RANK" in os.environ:
        stop(f"it starts its processes itself; start it with: python {sys.argv[0]}")


if __name__ == "__main__":
    main()
