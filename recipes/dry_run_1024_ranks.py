"""What would each of 1,024 GPUs keep and send in my job, before I pay for them?

    dist.init_process_group("fake", rank=0, world_size=1024)
    mesh = init_device_mesh("cpu", (1024,))
    with FakeTensorMode() as fake:
        model = YourModel()  # its tensors have shapes, and no memory
    shard(model, mesh)  # as in your job: fully_shard() for each block, then for the model
    with fake:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on a GPU
        train_one_step(model, optimizer)  # nothing is computed, and nothing is sent
        with FSDPMemTracker(model, optimizer) as memory, CountCollectives() as sent:
            train_one_step(model, optimizer)  # the second: now AdamW has its averages
    print(memory.get_tracker_snapshot("current"))  # what stays between steps
    print(sent.calls, sent.bytes, memory.get_tracker_snapshot("peak"))

One process plays one rank of the job, on a CPU. Make the inputs inside "with fake", too, but meshes
outside: torch reads their numbers. The step must not ask for a value: no loss.item(). It has one
forward pass: between micro-batches, call memory.reset_mod_stats(). It counts shards of FSDP2, not
DDP. CountCollectives stands below. FakeTensorMode and FSDPMemTracker are private in torch: they may
change. With torch 2.11, pass foreach=False: otherwise the peak counts whole weights that no rank
holds. In a pipeline, build one stage: PipelineStage() needs input_args= and output_args=, then.

    python recipes/dry_run_1024_ranks.py

    [rank 0/4] bytes       kept: real     dry  peak: real     dry  calls: real          dry
    [rank 0/4] FSDP2           566048  566048     1087716 1086136    12: 1698048  12: 1698048
    [rank 0/4] checkpoints     566048  566048     1075044 1073464    12: 1698048  12: 1698048
    [rank 0/4] root only       566048  566048     1772532 1618352     2: 1132032   2: 1132032
    [rank 0/4] FSDP2 x TP      557600  557600      804708  801544    19:  858528  19:  858528
    [rank 8/1024] MB           kept     peak     all-reduce     all-gather reduce-scatter
    [rank 8/1024] FSDP2        16.8   6589.3      0:    0.0     16: 8589.9      8: 4295.0
    [rank 8/1024] checkpoints  16.8   3301.4      0:    0.0     16: 8589.9      8: 4295.0
    [rank 8/1024] root only    16.8  13635.7      0:    0.0      1: 4295.0      1: 4295.0
    [rank 8/1024] FSDP2 x TP   16.8  10347.3     15: 8053.1     16: 1073.7      8:  536.9
    [rank 8/1024] MB at the peak: 6589.3 with FSDP2, 4764.7 of them activations

First, 4 real ranks with a tiny model match their dry runs: what they keep and send, byte for byte,
and the peak up to a tenth. Then one process plays rank 8 of 1,024. "Kept" is what stays between
steps: weights, gradients and two numbers of Adam for each weight. "Peak" is the most that the rank
holds at a moment of a step, mostly activations, which the forward pass keeps for backward(). What
CUDA, NCCL and fragmented memory take comes on top. The other cells are "calls: bytes". A call
counts with its larger side: the result of an all-gather, the input of a reduce-scatter. On the
network, an all-reduce moves about twice its size, the others once. All is float32 here. With
MixedPrecisionPolicy(param_dtype=torch.bfloat16), FSDP2 sends half as much up to torch 2.14, and two
thirds from 2.15 on: gradients travel in float32, unless you pass reduce_dtype, too.

FSDP2 (fully_shard) keeps a shard (a part) of each tensor on a rank, and gathers block after block.
"Root only" is a mistake that "kept" does not show: without fully_shard() for each block, it gathers
the whole model. With TP (tensor parallel), 8 ranks compute a block, and all-reduce its activations.
"""

import gc
import tempfile
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # private
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss
from torch.utils._python_dispatch import TorchDispatchMode  # private
from torch.utils._pytree import tree_leaves  # private

RANKS, RANK = 1024, 8
# Your job. rows: tokens of a rank in a step. tensor: how many ranks compute a block together.
JOB = {"width": 4096, "blocks": 8, "rows": 4096, "tensor": 8}
# Real processes, to compare with. Width 66 on 4 ranks: some have smaller shards than others.
REAL_RANKS, REAL_JOB = 4, {"width": 66, "blocks": 4, "rows": 6, "tensor": 2}
KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
}
SEND_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class CountCollectives(TorchDispatchMode):
    """Counts .calls and .bytes by kind. (torch's public CommDebugMode counts calls alone.)"""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor handles it, and calls this again with its shards
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in SEND_NOTHING:
            if name not in KINDS:  # never pass over a collective in silence
                raise RuntimeError(f"{name} is not counted: add it to KINDS")
            # What goes in, and what comes out: the larger one is the whole tensor.
            size = max(t.nbytes for t in tree_leaves((args, result)) if torch.is_tensor(t))
            self.calls[KINDS[name]] += 1
            self.bytes[KINDS[name]] += size
        return result


def with_fsdp2(model, mesh):
    """Each rank keeps its shard of each block, and gathers a block when it needs it."""
    for block in model:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def with_checkpoints(model, mesh):
    """The same, and each block keeps its input only: see checkpoint_activations.py."""
    return with_fsdp2(nn.Sequential(*map(checkpoint_wrapper, model)), mesh)


def with_fsdp2_root_only(model, mesh):
    """Wrong: the whole model is gathered at once."""
    return fully_shard(model, mesh=mesh["data"])


def with_fsdp2_and_tp(model, mesh):
    """Some ranks compute each block together, on the same rows. FSDP2 shards what each has."""
    for block in model:
        parallelize_module(
            block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return with_fsdp2(model, mesh)


WAYS = {
    "FSDP2": with_fsdp2,
    "checkpoints": with_checkpoints,
    "root only": with_fsdp2_root_only,
    "FSDP2 x TP": with_fsdp2_and_tp,
}


def train_and_count(way, width, blocks, rows, tensor):
    """Train with the group that there is, a fake or a real one.

    Returns (bytes that this rank keeps between steps, {what: bytes at the peak of a step}, the
    CountCollectives of the step).
    """
    tensor = tensor if way == "FSDP2 x TP" else 1
    # Neighbours are in one "tensor" group. In your job, leave out a dimension of size 1.
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor")
    )
    fake = FakeTensorMode() if dist.get_backend() == "fake" else nullcontext()
    with fake:
        model = nn.Sequential(*[FeedForward(width) for _ in range(blocks)])  # your model
    model = WAYS[way](model, mesh)
    rows *= tensor  # so many ranks share a batch; that of the whole job is the same
    with fake:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=torch.__version__ >= "2.12")
        inputs, targets = torch.randn(2, rows, width)  # your data

        def train_one_step():
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()

        train_one_step()
        with FSDPMemTracker(model, optimizer) as memory, CountCollectives() as sent:
            memory.track_inputs((inputs, targets))
            train_one_step()
    kept, peak = (
        {
            getattr(what, "value", what): size
            for what, size in memory.get_tracker_snapshot(when)[torch.device("cpu")].items()
        }
        for when in ("current", "peak")
    )
    return kept["Total"] - kept["Inputs"] - kept["Temp"], peak, sent  # Gloo may still hold a "Temp"


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, inputs):
        return inputs + self.down(gelu(self.up(inputs)))


def main():
    with tempfile.TemporaryDirectory() as folder:
        # The processes meet through a file. forkserver: torch is imported once for all of them.
        mp.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
        mp.start_processes(
            compare_with_real,
            args=(f"file://{folder}/meet",),
            nprocs=REAL_RANKS,
            start_method="forkserver",
        )
    dist.init_process_group("fake", rank=RANK, world_size=RANKS)
    predict()
    dist.destroy_process_group()


def compare_with_real(rank, meeting_point):
    """In each of REAL_RANKS processes: train real steps, then play this rank, and compare."""
    dist.init_process_group(
        "gloo",
        init_method=meeting_point,
        rank=rank,
        world_size=REAL_RANKS,
        timeout=timedelta(seconds=60),
    )
    real = {way: train_and_count(way, **REAL_JOB) for way in WAYS}
    gc.collect()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=REAL_RANKS)
    log("bytes       kept: real     dry  peak: real     dry  calls: real          dry")
    for way, (kept, peak, sent) in real.items():
        dry_kept, dry_peak, dry = train_and_count(way, **REAL_JOB)
        log(
            f"{way:<11} {kept:>10} {dry_kept:>7} {peak['Total']:>11} {dry_peak['Total']:>7}"
            f"  {sent.calls.total():>4}: {sent.bytes.total():>7}"
            f" {dry.calls.total():>3}: {dry.bytes.total():>7}"
        )
        near = abs(peak["Total"] - dry_peak["Total"]) < peak["Total"] / 10
        if (kept, vars(sent)) != (dry_kept, vars(dry)) or not near:
            raise RuntimeError(
                f"{way}: rank {rank} has {kept}, {peak}, {vars(sent)}; its dry run"
                f" says {dry_kept}, {dry_peak}, {vars(dry)}"
            )
    gc.collect()
    dist.destroy_process_group()


def predict():
    """The dry run of JOB: log a line for each way, and check what the docstring says of them."""
    log("MB           kept     peak     all-reduce     all-gather reduce-scatter", every_rank=True)
    kept, peak, sent = {}, {}, {}
    for way in WAYS:
        kept[way], peak[way], sent[way] = train_and_count(way, **JOB)
        cells = [
            f"{sent[way].calls[kind]:>6}: {sent[way].bytes[kind] / 1e6:6.1f}"
            for kind in ("all-reduce", "all-gather", "reduce-scatter")
        ]
        log(
            f"{way:<11} {kept[way] / 1e6:5.1f} {peak[way]['Total'] / 1e6:8.1f} {' '.join(cells)}",
            every_rank=True,
        )
    blocks = JOB["blocks"]
    model = 4 * blocks * 8 * JOB["width"] ** 2  # bytes of weights
    activations = 4 * JOB["rows"] * JOB["width"] * (9 * blocks - 1)  # x, 4x and 4x in each block
    claims = {
        "each keeps a part of the model": all(  # weights, gradients and two numbers of Adam
            0 <= kept[way] - 4 * model / RANKS < 200 for way in WAYS
        ),  # Adam counts its steps
        "FSDP2 gathers each block twice": sent["FSDP2"].calls["all-gather"] == 2 * blocks,
        "its peak has all activations": 0
        <= (peak["FSDP2"]["Activation"] - activations)
        < 1000,  # the loss comes on top
        "checkpoints make it smaller": peak["checkpoints"]["Total"] < peak["FSDP2"]["Total"],
        "root only gathers all at once": peak["root only"]["All Gather"] == model,
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")
    log(
        f"MB at the peak: {peak['FSDP2']['Total'] / 1e6:.1f} with FSDP2,"
        f" {activations / 1e6:.1f} of them activations",
        every_rank=True,
    )


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    main()
