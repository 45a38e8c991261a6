"""How ranks exchange tensors: the operations under DistributedDataParallel and its relatives.

    torchrun --standalone --nproc-per-node=4 04_collectives.py         # no GPU: 4 processes
    torchrun --standalone --nproc-per-node=gpu 04_collectives.py       # one for each GPU, 2 or more
    torchrun --standalone --nproc-per-node=4 04_collectives.py --only broadcast all_reduce \
        all_gather reduce_scatter send_recv isend_irecv batch_isend_irecv async_op ring ddp

DDP is made of the sections named after --only. Each section says what an operation is for, shows
every rank's tensor before and after, and checks the result. Rank r begins with
[10 r + 1, 10 r + 2, ...]: this shows where a number comes from.

    [rank 0/4] == reduce_scatter
    [rank 0/4] All tensors are summed up, and each rank gets one chunk of the sum: [...]
    [rank 0/4]            before          its chunk   all_gather
    [rank 0/4]   rank 0   [1 2 3 4]       [64]        [64 68 72 76]
    [rank 0/4]   rank 1   [11 12 13 14]   [68]        [64 68 72 76]
    [rank 0/4]   rank 2   [21 22 23 24]   [72]        [64 68 72 76]
    [rank 0/4]   rank 3   [31 32 33 34]   [76]        [64 68 72 76]
    ...
    [rank 0/4] 18 sections passed their checks on 4 ranks, by gloo

The last two, an all_reduce and DistributedDataParallel (DDP), are built from the others. Now write
such things yourself. Next: exercises/ 4 to 21.
"""

import argparse
import contextlib
import copy
import functools
import gc
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; without it, torch 2.11 to 2.15 may abort at the end
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing import assert_close


@record  # when a process fails, torchrun's report shows its traceback
def main():
    names = parse_args().only
    # Part 1: start. torchrun has started this file once for each process, as in 02.
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback: this machine
    torch.set_default_device(device)  # all tensors and layers are made there

    # Part 2: meet.
    my_gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend, device_id=my_gpu)  # NCCL sends from this GPU

    for name in names:  # each section first prints its docstring
        for line in f"== {name}\n{SECTIONS[name].__doc__}".splitlines():
            log(line.strip())
        SECTIONS[name](dist.get_rank(), dist.get_world_size())
    gathered(None)  # rank 0 waits here: it reports success only if no rank has failed
    log(f"{len(names)} sections passed their checks on {dist.get_world_size()} ranks, by {backend}")

    # Parts 3 to 5 are those of a training. Part 6: leave. Free DDP. Then close the connections.
    gc.collect()
    dist.destroy_process_group()


# Collectives: every rank must make the call, or the others wait. A collective works in place, or
# fills a tensor that you provide. Shapes and dtypes must be the same on all ranks: else the result
# can be wrong without an error.


def broadcast(rank, world_size):
    """One rank's tensor goes to all. DDP begins with it: all replicas get rank 0's weights."""
    tensor = tensor_of(rank)
    dist.broadcast(tensor, src=0)
    table({"before": tensor_of(rank), "after": tensor})
    assert_close(tensor, tensor_of(0))


def tensor_of(rank, length=2):
    """Return [10 rank + 1, 10 rank + 2, ...]: so every rank can check what it gets from others."""
    return 10.0 * rank + torch.arange(1, length + 1)


def scatter(rank, world_size):
    """One rank has a list, and sends each rank one tensor of it: data that one rank reads, say."""
    tensor = torch.zeros(2)
    tensors = [tensor_of(r) for r in range(world_size)] if rank == 0 else None
    dist.scatter(tensor, tensors, src=0)
    table({"list on rank 0": tensors, "after": tensor})
    assert_close(tensor, tensor_of(rank))


def gather(rank, world_size):
    """The opposite of scatter: one rank gets all tensors, to write them into a file, say."""
    tensor = tensor_of(rank)
    tensors = [torch.zeros(2) for _ in range(world_size)] if rank == 0 else None
    dist.gather(tensor, tensors, dst=0)
    table({"before": tensor, "after": tensors})
    if rank == 0:
        assert_close(tensors, [tensor_of(r) for r in range(world_size)])


def reduce(rank, world_size):
    """The sum of all tensors, on one rank: a loss, say, that rank 0 writes into its log.
    Do not use what the other ranks hold afterwards: with Gloo, partial sums."""
    tensor = tensor_of(rank)
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    table({"before": tensor_of(rank), "after": tensor})
    if rank == 0:
        assert_close(tensor, sum(tensor_of(r) for r in range(world_size)))


def all_reduce(rank, world_size):
    """The sum (or mean, or maximum) of all tensors, on every rank: how DDP averages gradients."""
    results = {}
    for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        results[op] = tensor_of(rank)
        dist.all_reduce(results[op], op=getattr(dist.ReduceOp, op))
    table({"before": tensor_of(rank), **results})
    everyone = torch.stack([tensor_of(r) for r in range(world_size)])
    assert_close(
        results,
        {
            "SUM": everyone.sum(0),
            "AVG": everyone.mean(0),
            "MIN": everyone.amin(0),
            "MAX": everyone.amax(0),
            "PRODUCT": everyone.prod(0),
        },
    )


def all_gather(rank, world_size):
    """All ranks' tensors, on every rank: in a list or in one tensor. In sharded training
    (docs/which_parallelism.md), each rank keeps a part of each layer, and gathers the rest."""
    tensor = tensor_of(rank)
    as_list, as_tensor = [torch.zeros(2) for _ in range(world_size)], torch.zeros(2 * world_size)
    dist.all_gather(as_list, tensor)
    all_gather_single(as_tensor, tensor)
    table({"before": tensor, "all_gather": as_list, "all_gather_single": as_tensor})
    expected = [tensor_of(r) for r in range(world_size)]
    assert_close((as_list, as_tensor), (expected, torch.cat(expected)))


def reduce_scatter(rank, world_size):
    """All tensors are summed up, and each rank gets one chunk of the sum: in sharded training, the
    gradients of its own weights. reduce_scatter and all_gather together are an all_reduce."""
    tensor = tensor_of(rank, length=world_size)
    chunk, whole = torch.zeros(1), torch.zeros(world_size)
    reduce_scatter_single(chunk, tensor)
    all_gather_single(whole, chunk)
    table({"before": tensor, "its chunk": chunk, "all_gather": whole})
    expected = sum(tensor_of(r, length=world_size) for r in range(world_size))
    assert_close((chunk, whole), (expected[rank : rank + 1], expected))


def all_to_all(rank, world_size):
    """Chunk j of every rank goes to rank j: rows become columns. In a mixture of experts, each
    rank has some experts (parts of a layer), and a token travels to its expert, and back."""
    tensor, received = tensor_of(rank, length=world_size), torch.zeros(world_size)
    dist.all_to_all_single(received, tensor)
    table({"before": tensor, "after": received})
    rows = torch.stack([tensor_of(r, length=world_size) for r in range(world_size)])
    assert_close(received, rows[:, rank])


def barrier(rank, world_size):
    """No rank goes on before all have come: the others wait while rank 0 prepares data, say.
    Rarely needed: whatever uses the result of an all_reduce waits for all ranks anyway."""
    time.sleep(0.1 * rank)  # each rank comes a little later than the one before
    came = time.time()
    dist.barrier()
    left = time.time()
    first, *_, last = sorted(gathered(came))
    table({"comes at": f"{came - first:.3f} s", "goes on at": f"{left - first:.3f} s"})
    if left < last:
        raise RuntimeError("this rank went on before the last one had come")


def monitored_barrier(rank, world_size):
    """A barrier that says who is missing: here the last rank, on purpose. Only Gloo has it;
    with NCCL, make a Gloo group, as here. (torch itself prints the error on stderr, too.)"""
    group = dist.new_group(backend="gloo")
    dist.barrier()  # so that no other rank is late
    said = "no error"
    try:
        if rank != world_size - 1:
            dist.monitored_barrier(group, timeout=timedelta(seconds=1))
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0]
    log(f"  after a second: {said}")
    if rank == 0 and f"Rank {world_size - 1} failed to pass" not in said:
        raise RuntimeError(f"monitored_barrier did not name rank {world_size - 1}: {said}")


# Point to point: one rank sends, another receives. In pipeline parallelism, each rank has some of
# the model's layers, and passes their output on like this.


def send_recv(rank, world_size):
    """Rank 0 sends, rank 1 receives. On a CPU, each call waits for the other rank's."""
    tensor = tensor_of(rank)
    # Trap: if both ranks called send first, each would wait for the other's recv.
    if rank == 0:
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    table({"before": tensor_of(rank), "after": tensor})
    assert_close(tensor, tensor_of(0 if rank == 1 else rank))


def isend_irecv(rank, world_size):
    """i for immediate: the calls return at once, and the rank can compute. Before wait(), do not
    write to the tensor that is sent, nor use the one that arrives. Here ranks 0 and 1 swap."""
    tensor, received = tensor_of(rank), torch.zeros(2)
    work = []
    if rank == 0:
        work = [dist.isend(tensor, dst=1), dist.irecv(received, src=1)]
    elif rank == 1:
        work = [dist.irecv(received, src=0), dist.isend(tensor, dst=0)]  # why so: see exchange
    for one in work:
        one.wait()
    table({"before": tensor, "received": received})
    assert_close(received, tensor_of(1 - rank) if rank < 2 else torch.zeros(2))


def batch_isend_irecv(rank, world_size):
    """Every rank sends to the next and receives from the one before, all at the same time.
    Sends and receives that go as one batch do not block each other, whatever their order."""
    tensor, received = tensor_of(rank), torch.zeros(2)
    exchange(tensor, received)
    table({"before": tensor, "received": received})
    assert_close(received, tensor_of((rank - 1) % world_size))


def exchange(outgoing, incoming):
    """Send a tensor to the next rank on the ring, and receive one from the rank before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Not isend and irecv one after the other: NCCL may queue them. If all ranks queue the send
    # first, no rank comes to its receive, and all wait for ever.
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size),
        ]
    ):
        work.wait()


# Collectives while the rank computes, in groups, and for objects. Then two of them by hand.
def async_op(rank, world_size):
    """With async_op=True a collective runs while the rank computes. Before wait(), its tensor
    holds old numbers, new ones or a mixture, and no error says so."""
    tensor = tensor_of(rank).repeat(500_000)  # 4 MB, so that it takes a while
    matrix, products = torch.eye(128), 0
    work = dist.all_reduce(tensor, async_op=True)
    too_early = tensor[:2].clone()  # the bug
    while not work.is_completed():  # in DDP: the backward pass of earlier layers
        matrix = matrix @ matrix
        products += 1
    work.wait()
    table(
        {
            "before": tensor_of(rank),
            "read too early": too_early,
            "after wait()": tensor[:2],
            "matrix products meanwhile": products,
        }
    )
    expected = sum(tensor_of(r) for r in range(world_size))
    assert_close(tensor, expected.repeat(500_000))


def groups(rank, world_size):
    """Some ranks exchange tensors among themselves, for pipeline parallelism, say (06). In a
    group, a rank has a second number. But src and dst are the numbers in the whole job."""
    # Every rank must make every group, in the same order, also those that it is not in. Groups are
    # numbered as they are made: if a rank skips a call, another group hangs later.
    even, odd = (dist.new_group(list(range(first, world_size, 2))) for first in (0, 1))
    group = odd if rank % 2 else even
    members = dist.get_process_group_ranks(group)
    total, from_first = tensor_of(rank), tensor_of(rank)
    dist.all_reduce(total, group=group)
    dist.broadcast(from_first, src=members[0], group=group)  # or group_src=0
    table(
        {
            "group": members,
            "group rank": dist.get_rank(group),
            "before": tensor_of(rank),
            "all_reduce": total,
            "broadcast from group rank 0": from_first,
        }
    )
    assert_close(total, sum(tensor_of(r) for r in range(rank % 2, world_size, 2)))
    assert_close(from_first, tensor_of(rank % 2))


def objects(rank, world_size):
    """Anything that pickle takes can travel: settings, names, a list of results. This is slow.
    Unpickling can run any code: use this only among processes that you trust."""
    everyone, settings = [None] * world_size, [{"lr": 0.03} if rank == 0 else None]
    dist.broadcast_object_list(settings, src=0)
    dist.all_gather_object(everyone, {"rank": rank})
    table({"broadcast_object_list": settings, "all_gather_object": everyone})
    if settings != [{"lr": 0.03}] or everyone != [{"rank": r} for r in range(world_size)]:
        raise RuntimeError("other objects arrived than were sent")


def ring(rank, world_size):
    """The all_reduce by hand. Every rank sends to the next one only, so that all links are
    equally busy. First the chunks go round and are summed up, as in reduce_scatter. Then
    each rank has one finished chunk, and the finished chunks go round, as in all_gather."""
    tensor = tensor_of(rank, length=world_size)  # chunks of one number each
    steps = [tensor.clone()]
    sent = ring_all_reduce(tensor, steps)
    columns = [(f"step {n}" if n else "start", step) for n, step in enumerate(steps)]
    for first in range(0, len(columns), 4):  # four fit on a line
        table(dict(columns[first : first + 4]))
    assert_close(tensor, sum(tensor_of(r, length=world_size) for r in range(world_size)))
    least = 2 * (world_size - 1) * tensor.nbytes // world_size
    if sent != least:
        raise RuntimeError(f"this rank sent {sent} bytes, not {least}")
    log(f"  each of N ranks sent {sent} bytes, 2 (N - 1) / N times the tensor's {tensor.nbytes}")


def ring_all_reduce(tensor, steps=None):
    """Sum a contiguous tensor of any shape over all ranks, in place; return the bytes sent.

    Each of N ranks sends 2 (N - 1) / N of the tensor, the least possible (Patarasuk and Yuan,
    2009). But it takes 2 (N - 1) steps (picture: docs/how_a_job_starts.md): for a small tensor, a
    tree takes fewer. steps: a list to which a copy of the tensor is added after each step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(world_size)  # views: writing to them is in place
    sent = 0
    for step in range(2 * (world_size - 1)):
        # Each rank first sends the chunk of its own number, then the one that it changed last.
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        exchange(outgoing, incoming)
        if step < world_size - 1:
            target += incoming  # reduce_scatter: after N - 1 steps a chunk has been at every rank
        else:
            target.copy_(incoming)  # all_gather: finished chunks replace partial sums
        sent += outgoing.nbytes
        if steps is not None:
            steps.append(tensor.clone())
    return sent


def ddp(rank, world_size):
    """DistributedDataParallel by hand. Backward goes from the last layer to the first. When a
    bucket of gradients is complete, its all_reduce starts, while backward goes on."""
    torch.manual_seed(rank)  # other weights and another batch on each rank
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])
    batch, target = torch.randn(2, 256, 512)
    theirs = DDP(copy.deepcopy(model))
    alone = copy.deepcopy(theirs.module)  # for comparison: the same weights, no exchange
    ours = BucketedDDP(model, bucket_bytes=2 * 2**20)  # two layers fill a bucket
    for replica in (theirs, alone):
        nn.functional.mse_loss(replica(batch), target).backward()
    loss = nn.functional.mse_loss(ours(batch), target)
    start = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    ours.wait()  # optimizer.step() would come after this
    back = time.perf_counter()
    log("  the backward pass by hand, as the CPU of rank 0 sees it:")
    for index, (moment, missing) in enumerate(ours.started):
        log(
            f"    {1000 * (moment - start):6.2f} ms  bucket {index} is complete, its all_reduce"
            f" starts; gradients still to come: {missing}"
        )
    log(f"    {1000 * (end - start):6.2f} ms  backward ends")
    log(f"    {1000 * (back - start):6.2f} ms  after wait(): all buckets are back")
    if ours.started[0][1] == 0:
        raise RuntimeError("no all_reduce started before the last gradient had come")

    expected, own, by_hand = (
        torch.cat([p.grad.flatten() for p in replica.parameters()])
        for replica in (theirs, alone, ours)
    )
    own_off, off = ((g - expected).abs().max() / expected.abs().max() for g in (own, by_hand))
    log(f"  relative to DDP's, gradients are off by {off:.1e}; without exchange, by {own_off:.1e}")
    if not off < 1e-5 < own_off:
        raise RuntimeError("the gradients by hand are not those of DDP")


class BucketedDDP(nn.Module):
    """Average the gradients of a module over all ranks, in buckets, while backward still runs.

    A bucket is some gradients that are sent as one tensor. It is full at bucket_bytes or above.
    Call wait() after every backward(), before the optimizer's step. DDP can do more: parameters
    without a gradient, buffers, several backward passes before a step (Li et al., VLDB 2020).
    """

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module, self.buckets = module, [[]]
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)  # the same start everywhere
        # From the last parameter to the first: in this order backward finishes the gradients.
        for parameter in reversed(list(module.parameters())):
            if sum(p.nbytes for p in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(  # torch calls it when p.grad is complete
                functools.partial(self.gradient_is_there, len(self.buckets) - 1)
            )

    def forward(self, *inputs):
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients still to come
        self.pending, self.started = [], []
        return self.module(*inputs)

    def gradient_is_there(self, index, parameter):
        self.missing[index] -= 1
        if self.missing[index] == 0:
            bucket = self.buckets[index]
            # Send them as one tensor: many small calls cost more than a large one.
            flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
            # All ranks must send their buckets in the same order, else one rank's first is added
            # to another's second. Here the layers are the same; DDP enforces the order.
            self.pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
            self.started.append((time.perf_counter(), sum(self.missing)))

    def wait(self):
        if any(self.missing):  # a bucket was never sent: the replicas would silently drift apart
            raise RuntimeError("not every parameter got one gradient since the last forward")
        for work, flat, bucket in self.pending:
            work.wait()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(mean.view_as(p))


# ---- The lesson ends here. Below: what all scripts share. ----

# New names: older versions of torch, and most texts, have the old ones alone.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SECTIONS = {
    function.__name__: function
    for function in (
        broadcast,
        scatter,
        gather,
        reduce,
        all_reduce,
        all_gather,
        reduce_scatter,
        all_to_all,
        barrier,
        monitored_barrier,
        send_recv,
        isend_irecv,
        batch_isend_irecv,
        async_op,
        groups,
        objects,
        ring,
        ddp,
    )
}


def table(columns):
    """Log a row for each rank. All ranks must call it, each with its own {heading: value}."""
    rows = gathered([text(value) for value in columns.values()])
    lines = [["", *columns], *([f"rank {rank}", *row] for rank, row in enumerate(rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        log(f"  {'   '.join(map(str.ljust, line, widths))}".rstrip())


def text(value):
    """Return a tensor as [1 2.5], a list's items in a row, and anything else as it prints."""
    if isinstance(value, list):
        return " ".join(map(text, value))
    if isinstance(value, torch.Tensor):
        return "[" + " ".join(f"{number:g}" for number in value.tolist()) + "]"
    return str(value)


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def pick_device(local_rank):
    """Return (device, backend): GPU number local_rank with its backend, or the CPU with Gloo."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    backend = dist.get_default_backend_for_device(gpu or "cpu")
    if backend != "gloo":
        if local_rank >= torch.accelerator.device_count():
            raise SystemExit("each process needs a GPU: start fewer, or set CUDA_VISIBLE_DEVICES=")
        torch.accelerator.set_device_index(local_rank)  # without it, all take memory of GPU 0, too
        return torch.device(gpu.type, local_rank), backend
    # The CPU, also on a Mac: Gloo cannot send tensors of its GPU. One thread for each process:
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # often faster
    return torch.device("cpu"), "gloo"


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=SECTIONS,
        default=list(SECTIONS),
        help=f"sections to run: {', '.join(SECTIONS)}",
    )
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        parser.error("start it with: torchrun --standalone --nproc-per-node=4 04_collectives.py")
    return args


if __name__ == "__main__":
    main()
