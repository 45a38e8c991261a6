"""How ranks exchange tensors: the operations under DistributedDataParallel and its relatives.

    torchrun --standalone --nproc-per-node=4 04_collectives.py          # CPU, 4 processes
    torchrun --standalone --nproc-per-node=gpu 04_collectives.py        # one per GPU, 2 or more
    torchrun --standalone --nproc-per-node=4 04_collectives.py --only ring ddp
    torchrun --standalone --nproc-per-node=4 04_collectives.py --bench  # how fast is each?

Each process has a number, its rank. Each section says what an operation is for, shows every rank's
tensor before and after, and checks the result. Rank r begins with [10 r + 1, 10 r + 2, ...]: this
shows where a number comes from.

    [rank 0/4] == reduce_scatter
    [rank 0/4] All tensors are summed up, and each rank gets one chunk of the sum. [...]
    [rank 0/4]            before          its chunk   all_gather
    [rank 0/4]   rank 0   [1 2 3 4]       [64]        [64 68 72 76]
    [rank 0/4]   rank 1   [11 12 13 14]   [68]        [64 68 72 76]
    [rank 0/4]   rank 2   [21 22 23 24]   [72]        [64 68 72 76]
    [rank 0/4]   rank 3   [31 32 33 34]   [76]        [64 68 72 76]

The last two sections build something from these operations: a ring, which is one way to all_reduce
large tensors, and a DistributedDataParallel (DDP). DDP keeps a copy of the model (a replica) on
each rank, and sends gradients while the backward pass still computes.

New here: collectives (calls that all ranks must make, or the others wait), point to point,
async_op, groups. Read 02 before this; skip what is below the first divider ("# ----"). Now
write it yourself: exercises/README.md. Next: template/README.md, for your own job.
"""

import argparse
import contextlib
import copy
import functools
import gc
import inspect
import os
import re
import socket
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported by DDP, after step 2, it would keep the group open
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing import assert_close

TIMEOUT = timedelta(minutes=2)  # how long ranks wait for each other; default: NCCL 10, Gloo 30


@record  # passes an exception's traceback to torchrun; without it, torchrun's report shows none
def main():
    args = parse_args()
    # Step 1: start. As in 02: each process learns who it is, and takes its device.
    if "LOCAL_WORLD_SIZE" not in os.environ:
        stop("this script needs a launcher:"
             " torchrun --standalone --nproc-per-node=4 04_collectives.py")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if world_size == 1:
        stop("one rank has nobody to talk to: every result would be its own tensor. Use"
             " --nproc-per-node=4 (with one GPU, on the CPU: CUDA_VISIBLE_DEVICES= in front)")
    gpus = count_gpus()
    if 0 < gpus < local_world_size:
        stop(f"{local_world_size} processes want a GPU each and there are {gpus}:"
             f" use --nproc-per-node={gpus}, or the CPU with CUDA_VISIBLE_DEVICES= in front")
    device, backend = pick_device(local_rank)
    share_cores(local_world_size)
    if local_world_size == world_size:  # the whole job is on this machine
        listen_locally()
    # Step 2: meet. device_id names this process's GPU. With Gloo, device_id makes later calls fail.
    dist.init_process_group(
        backend, timeout=TIMEOUT, device_id=device if device.type != "cpu" else None)
    log(f"pid {os.getpid()}, {device}, {backend}", every_rank=True)
    if args.bench:
        benchmark(args.only or BENCHMARKS, device)
    else:
        show_sections(args.only or list(SECTIONS), device)
    # Step 6: leave. First free DDP, whose threads can abort a process that ends while they run. Not
    # in a "finally": after an error, NCCL would wait here for ranks that never come.
    gc.collect()
    dist.destroy_process_group()


def show_sections(names, device):
    """Run sections, each with its sentence in front. An error in one of them ends the job."""
    for name in names:
        for line in [f"== {name}", *inspect.getdoc(SECTIONS[name]).splitlines()]:
            log(line)
        SECTIONS[name](dist.get_rank(), dist.get_world_size(), device)
    gathered(None)  # all wait here: if a check fails on a rank, rank 0 does not report success
    log(f"{len(names)} of {len(names)} sections passed their checks on"
        f" {dist.get_world_size()} ranks")


# Collectives: every rank of the group must make the call, or the others wait. A collective works
# in place, or fills a tensor that you provide. Shapes and dtypes must be the same on all ranks.
# Otherwise the result can be wrong, and nothing reports it.
# (A section prints its docstring, so that you can read the output without this file.)


def broadcast(rank, world_size, device):
    """One rank's tensor goes to all. DDP begins with it: all replicas get rank 0's weights."""
    tensor = tensor_of(rank, device)
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    table({"before": before, "after": tensor})
    assert_close(tensor, tensor_of(0, device))


def tensor_of(rank, device, length=2):
    """Return what a rank begins with: [10 rank + 1, 10 rank + 2, ...], float32 (length,).

    Each rank can compute this for every other rank, and so check what it gets.
    """
    return 10.0 * rank + torch.arange(1, length + 1, device=device)


def scatter(rank, world_size, device):
    """One rank has a list, and sends each rank one tensor of it: data that one rank reads, say."""
    tensor = torch.zeros(2, device=device)
    tensors = [tensor_of(r, device) for r in range(world_size)] if rank == 0 else None
    dist.scatter(tensor, tensors, src=0)
    table({"list on rank 0": tensors, "after": tensor})
    assert_close(tensor, tensor_of(rank, device))


def gather(rank, world_size, device):
    """The opposite of scatter: one rank gets all tensors, to write them into a file, say."""
    tensor = tensor_of(rank, device)
    tensors = [torch.zeros(2, device=device) for _ in range(world_size)] if rank == 0 else None
    dist.gather(tensor, tensors, dst=0)
    table({"before": tensor, "after": tensors})
    if rank == 0:
        assert_close(tensors, [tensor_of(r, device) for r in range(world_size)])


def reduce(rank, world_size, device):
    """The sum of all tensors, on one rank: a loss, say, that rank 0 writes into its log.
    Do not use what the other ranks hold afterwards: with Gloo, sums over some of the ranks."""
    tensor = tensor_of(rank, device)
    before = tensor.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    table({"before": before, "after": tensor})
    if rank == 0:
        assert_close(tensor, sum(tensor_of(r, device) for r in range(world_size)))


def all_reduce(rank, world_size, device):
    """The sum (or mean, or maximum) of all tensors, on every rank: how DDP averages gradients."""
    results = {}
    for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        results[op] = tensor_of(rank, device)
        dist.all_reduce(results[op], op=getattr(dist.ReduceOp, op))
    table({"before": tensor_of(rank, device), **results})
    everyone = torch.stack([tensor_of(r, device) for r in range(world_size)])
    assert_close(results, {"SUM": everyone.sum(0), "AVG": everyone.mean(0), "MIN": everyone.amin(0),
                           "MAX": everyone.amax(0), "PRODUCT": everyone.prod(0)})


def all_gather(rank, world_size, device):
    """All ranks' tensors, on every rank: in a list, or, faster, in one tensor. In sharded
    training (ZeRO, FSDP), each rank keeps a part of each layer, and gathers the rest."""
    tensor = tensor_of(rank, device)
    as_list = [torch.zeros(2, device=device) for _ in range(world_size)]
    dist.all_gather(as_list, tensor)
    # torch 2.15 prefers the names all_gather_single and reduce_scatter_single, which 2.11 lacks.
    as_tensor = torch.zeros(2 * world_size, device=device)
    dist.all_gather_into_tensor(as_tensor, tensor)
    table({"before": tensor, "all_gather": as_list, "all_gather_into_tensor": as_tensor})
    expected = [tensor_of(r, device) for r in range(world_size)]
    assert_close((as_list, as_tensor), (expected, torch.cat(expected)))


def reduce_scatter(rank, world_size, device):
    """All tensors are summed up, and each rank gets one chunk of the sum. In sharded training,
    a rank updates its part of the weights, and needs the gradients of that part alone.
    reduce_scatter and all_gather together are an all_reduce."""
    tensor = tensor_of(rank, device, length=world_size)
    chunk = torch.zeros(1, device=device)
    dist.reduce_scatter_tensor(chunk, tensor)
    whole = torch.zeros(world_size, device=device)
    dist.all_gather_into_tensor(whole, chunk)
    table({"before": tensor, "its chunk": chunk, "all_gather": whole})
    expected = sum(tensor_of(r, device, length=world_size) for r in range(world_size))
    assert_close((chunk, whole), (expected[rank : rank + 1], expected))


def all_to_all(rank, world_size, device):
    """Chunk j of every rank goes to rank j: rows become columns. In a mixture of experts, each
    rank has some experts (parts of a layer), and a token travels to its expert, and back."""
    tensor = tensor_of(rank, device, length=world_size)
    received = torch.zeros(world_size, device=device)
    dist.all_to_all_single(received, tensor)
    table({"before": tensor, "after": received})
    rows = torch.stack([tensor_of(r, device, length=world_size) for r in range(world_size)])
    assert_close(received, rows[:, rank])


def barrier(rank, world_size, device):
    """No rank goes on before all have come: the others wait while rank 0 prepares data, say.
    Rarely needed: a collective with a result from all ranks waits for all of them anyway."""
    # The others wait no longer than the timeout. If rank 0 needs more time, set a longer one.
    time.sleep(0.1 * rank)  # each rank comes a little later than the one before
    came = time.time()
    dist.barrier()
    times = gathered((came, time.time()))
    first, last = min(came for came, _ in times), max(came for came, _ in times)
    came, left = times[rank]
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:  # several machines, and clocks
        table({"waits": f"{left - came:.3f} s"})
        return
    table({"comes at": f"{came - first:.3f} s", "goes on at": f"{left - first:.3f} s"})
    if min(left for _, left in times) < last:
        raise RuntimeError("a rank went on before the last one had come")


def monitored_barrier(rank, world_size, device):
    """A barrier that says who is missing: here the last rank, on purpose. Only Gloo has it;
    with NCCL, make a Gloo group, as here. (torch itself prints the error on stderr, too.)"""
    # A new group does not take over the first group's timeout: give it one, or it has the default.
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    reason = "stays away"
    dist.barrier()  # so that no other rank is late
    if rank != world_size - 1:
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=1))
            reason = "no error"
        except RuntimeError as error:
            reason = re.sub(r"^\[Rank \d+\]: ", "", str(error).strip().partition("\n")[0])
    log(f"  rank 0 after a second: {reason}")
    if rank == 0 and not reason.startswith(f"Rank {world_size - 1} failed"):
        raise RuntimeError(f"monitored_barrier did not name rank {world_size - 1}: {reason}")


# Point to point: one rank sends, another receives. In pipeline parallelism, each rank has some of
# the model's layers, and passes their output on like this.


def send_recv(rank, world_size, device):
    """Rank 0 sends, rank 1 receives. Each call returns when the tensor is sent, or received;
    with NCCL, as soon as the GPU has the work in its queue."""
    tensor = tensor_of(rank, device)
    before = tensor.clone()
    # Trap: if both ranks called send first, each would wait for the other's recv. (With Gloo,
    # send returns when the other side has received, however small the tensor is.)
    if rank == 0:
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    table({"before": before, "after": tensor})
    assert_close(tensor, tensor_of(0 if rank == 1 else rank, device))


def isend_irecv(rank, world_size, device):
    """i for immediate: the calls return at once. Ranks 0 and 1 swap their tensors. Each could
    compute in the meantime. After wait(), the tensors may be used again."""
    tensor, received = tensor_of(rank, device), torch.zeros(2, device=device)
    work = []
    if rank == 0:
        work = [dist.isend(tensor, dst=1), dist.irecv(received, src=1)]
    elif rank == 1:
        work = [dist.irecv(received, src=0), dist.isend(tensor, dst=0)]
    # Before wait(), do not write to the tensor that is sent, and do not use the one that arrives.
    for one in work:
        one.wait()
    table({"before": tensor, "received": received})
    assert_close(received, tensor_of(1 - rank, device) if rank < 2 else torch.zeros_like(received))


def batch_isend_irecv(rank, world_size, device):
    """Every rank sends to the next and receives from the one before, all at the same time.
    Sends and receives that go as one batch do not block each other, whatever their order."""
    tensor, received = tensor_of(rank, device), torch.zeros(2, device=device)
    exchange(tensor, received)
    table({"before": tensor, "received": received})
    assert_close(received, tensor_of((rank - 1) % world_size, device))


def exchange(outgoing, incoming):
    """Send a tensor to the next rank on the ring, and receive one from the rank before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # With Gloo, a separate isend and irecv would do. With NCCL, both can be in one queue. Then each
    # send waits for a receive that is queued behind another rank's send, and all ranks hang.
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size)]):
        work.wait()


# Three variations: in the background, among some of the ranks, and with objects instead of tensors.


def async_op(rank, world_size, device):
    """With async_op=True a collective runs while the rank computes. Before wait(), its tensor
    holds old numbers, new ones or a mixture, and no error says so. (With NCCL, all calls
    return at once, and wait() holds up the GPU's queue, not the CPU.)"""
    tensor = tensor_of(rank, device).repeat(500_000)  # 4 MB, so that it takes a while
    before, matrix, products = tensor[:2].clone(), torch.eye(128, device=device), 0
    work = dist.all_reduce(tensor, async_op=True)
    too_early = tensor[:2].clone()  # the bug
    while not work.is_completed():  # in DDP: the backward pass of earlier layers
        matrix = matrix @ matrix
        products += 1
    work.wait()
    table({"before": before, "read too early": too_early, "after wait()": tensor[:2],
           "matrix products meanwhile": products})
    expected = sum(tensor_of(r, device) for r in range(world_size))
    assert_close(tensor, expected.repeat(500_000))


def groups(rank, world_size, device):
    """Some ranks exchange tensors among themselves, for pipeline parallelism, say (06). In a
    group, a rank has a second number. But src and dst are the numbers in the whole job."""
    # Every rank must make every group, in the same order, also those that it is not in. Groups are
    # numbered as they are made: if a rank skips a call, another group hangs later.
    even, odd = (dist.new_group(list(range(first, world_size, 2)), timeout=TIMEOUT)
                 for first in (0, 1))
    group = odd if rank % 2 else even
    members = dist.get_process_group_ranks(group)
    total, from_first = tensor_of(rank, device), tensor_of(rank, device)
    dist.all_reduce(total, group=group)
    dist.broadcast(from_first, src=members[0], group=group)  # or group_src=0
    table({"group": members, "group rank": dist.get_rank(group), "before": tensor_of(rank, device),
           "all_reduce": total, "broadcast from group rank 0": from_first})
    assert_close(total, sum(tensor_of(r, device) for r in range(rank % 2, world_size, 2)))
    assert_close(from_first, tensor_of(rank % 2, device))


def objects(rank, world_size, device):
    """Anything that pickle takes can travel: settings, names, a list of results. This is slow.
    Unpickling can run any code: use this only among processes that you trust."""
    settings = [{"lr": 0.03}] if rank == 0 else [None]
    received, everyone = settings.copy(), [None] * world_size
    dist.broadcast_object_list(received, src=0)
    dist.all_gather_object(everyone, f"of {rank}")
    table({"before": settings, "broadcast_object_list": received, "all_gather_object": everyone})
    if received != [{"lr": 0.03}] or everyone != [f"of {r}" for r in range(world_size)]:
        raise RuntimeError("other objects arrived than were sent")


# Two things built from these operations.


def ring(rank, world_size, device):
    """The all_reduce by hand. Every rank sends to the next one only, so that all links are
    equally busy. First the chunks go round and are summed up, as in reduce_scatter. Then
    each rank has one finished chunk, and the finished chunks go round, as in all_gather."""
    tensor = tensor_of(rank, device, length=world_size)  # chunks of one number each
    steps = [tensor.clone()]
    ring_all_reduce(tensor, steps)
    names = ["start", *(f"step {n}" for n in range(1, 2 * world_size - 1))]
    width = max(1, 20 // world_size)  # columns that fit on a line
    for first in range(0, len(steps), width):
        table(dict(list(zip(names, steps, strict=True))[first : first + width]))
    assert_close(tensor, sum(tensor_of(r, device, length=world_size) for r in range(world_size)))

    mine = torch.randn(1024 * world_size, device=device)
    theirs = mine.clone()
    sent = ring_all_reduce(mine)
    dist.all_reduce(theirs)
    assert_close(mine, theirs)
    log(f"  on {mine.numel()} random numbers: equal to dist.all_reduce up to"
        f" {(mine - theirs).abs().max():.1e}")
    log(f"  sent by each rank: {sent} bytes, {sent / mine.nbytes:g} times the tensor;"
        f" 2 (N - 1) / N is {2 * (world_size - 1) / world_size:g}")
    if sent * world_size != 2 * (world_size - 1) * mine.nbytes:
        raise RuntimeError(f"sent {sent} bytes, not 2 (N - 1) / N of {mine.nbytes}")


def ring_all_reduce(tensor, steps=None):
    """Sum a contiguous tensor of any shape over all ranks, in place; return the bytes sent.

    Each of N ranks sends 2 (N - 1) / N of the tensor. That is the least possible: Patarasuk and
    Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009. But a ring
    takes 2 (N - 1) steps. For a small tensor a tree is better, because it takes fewer.
    steps: a list to which a copy of the tensor is added after each step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(world_size)  # views: writing to them is in place
    sent = 0
    for step in range(2 * (world_size - 1)):
        # Each rank first sends the chunk of its own number, and then passes on what it got last.
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


def ddp(rank, world_size, device):
    """DistributedDataParallel by hand. Backward goes from the last layer to the first. When a
    bucket of gradients is complete, its all_reduce starts, while backward goes on."""
    torch.manual_seed(rank)  # other weights and another batch on each rank
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers).to(device)
    batch, target = torch.randn(2, 256, 512, device=device)
    theirs = DDP(copy.deepcopy(model), gradient_as_bucket_view=True)
    alone = copy.deepcopy(theirs.module)  # for comparison: the same weights, no exchange
    ours = BucketedDDP(model, bucket_bytes=2 * 2**20)
    for replica in (theirs, alone, ours):
        mse_loss(replica(batch), target).backward()
    ours.wait()
    expected, own, by_hand = (torch.cat([p.grad.flatten() for p in replica.parameters()])
                              for replica in (theirs, alone, ours))
    own_off, off = ((g - expected).abs().max() / expected.abs().max() for g in (own, by_hand))
    log("  gradients, compared with those of DistributedDataParallel:")
    log(f"    without an exchange: off by {own_off:.1e} of the largest entry")
    log(f"    averaged by hand: off by {off:.1e}")
    if not off < 1e-5 < own_off:
        raise RuntimeError("the gradients by hand are not those of DistributedDataParallel")

    show_overlap(ours, batch, target)


class BucketedDDP(nn.Module):
    """Average the gradients of a module over all ranks, in buckets, while backward still runs.

    A bucket is some gradients that are sent as one tensor. It is full when it has bucket_bytes.
    module: its parameters must be on their device already. Call wait() after every backward(),
    before the optimizer's step. It raises RuntimeError if a parameter got no gradient.
    DDP can do more: parameters without a gradient, gradients that stay in the buckets, buffers (of
    BatchNorm), several backward passes before a step. Li et al., PyTorch Distributed, VLDB 2020.
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
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self.gradient_is_there, len(self.buckets) - 1))
        self.reset()

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients still to come
        self.pending, self.started = [], []

    def forward(self, *inputs):
        self.reset()
        return self.module(*inputs)

    def gradient_is_there(self, index, parameter):
        self.missing[index] -= 1
        if self.missing[index] == 0:
            bucket = self.buckets[index]
            # Send them as one tensor: many small calls cost more than a large one.
            flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
            # All ranks must send their buckets in the same order. Otherwise one rank's first is
            # added to another's second. Here the layers are the same; DDP enforces the order.
            self.pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
            self.started.append((time.perf_counter(), sum(self.missing)))

    def wait(self):
        if any(self.missing):  # a bucket was never sent: the replicas would silently drift apart
            raise RuntimeError("not every parameter got one gradient since the last forward")
        for work, flat, bucket in self.pending:
            work.wait()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(mean.view_as(p))


def show_overlap(model, batch, target):
    """Log when the all_reduces of one backward pass start, as rank 0's CPU sees it."""
    model.zero_grad()
    loss = mse_loss(model(batch), target)
    start = time.perf_counter()
    loss.backward()
    end, back = time.perf_counter(), sum(work.is_completed() for work, _, _ in model.pending)
    model.wait()  # optimizer.step() would come after this
    if batch.device.type != "cpu":
        torch.accelerator.synchronize()
    waited = time.perf_counter()
    log("  a second backward pass, as the CPU of rank 0 sees it:")
    for index, (moment, missing) in enumerate(model.started):
        log(f"    {1000 * (moment - start):6.2f} ms  bucket {index} is complete, its all_reduce"
            f" starts; gradients still to come: {missing}")
    log(f"    {1000 * (end - start):6.2f} ms  backward ends; buckets back by now: {back}")
    log(f"    {1000 * (waited - start):6.2f} ms  after wait(): all of them are back")
    if model.started[0][1] == 0:
        raise RuntimeError("no all_reduce started before the last gradient had come")


SECTIONS = {function.__name__: function for function in (
    broadcast, scatter, gather, reduce, all_reduce, all_gather, reduce_scatter, all_to_all, barrier,
    monitored_barrier, send_recv, isend_irecv, batch_isend_irecv, async_op, groups, objects, ring,
    ddp)}
BENCHMARKS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "ring")


# ---- How fast they are: --bench ----


def benchmark(names, device):
    """Print time and bandwidths of the operations, from 4 KiB to 64 MiB.

    Algorithm bandwidth is size / time. Bus bandwidth is algorithm bandwidth times the bytes that a
    rank has to send for each byte of the tensor. Compare bus bandwidth with the speed of the link
    between ranks, whatever their number. Definitions: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    log("size: of the whole tensor. time: until the slowest rank is done, median of 11 after 3 to")
    log("warm up. algbw: size / time. busbw: algbw x factor, which is defined as in nccl-tests.")
    for name in names:
        factor = bus_factor(name)
        log(f"== {name}, factor {factor:g}")
        log(f"{'size':>10} {'time':>14} {'algbw':>14} {'busbw':>14}")
        for size in (4096 * 4**k for k in range(8)):
            nbytes, call = prepare(name, size, device)
            seconds = measure(call, device)
            algbw = nbytes / seconds / 1e9
            label = f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
            log(f"{label:>10} {1000 * seconds:11.3f} ms {algbw:9.3f} GB/s"
                f" {algbw * factor:9.3f} GB/s")


def bus_factor(name):
    """Return how many bytes a rank has to send, at least, for each byte of the whole tensor."""
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    return {"all_reduce": 2 * share, "ring": 2 * share, "all_gather": share,
            "reduce_scatter": share, "broadcast": 1}[name]


def prepare(name, size, device):
    """Return (bytes of the whole tensor: size, or a little less to make equal chunks; the call)."""
    length = size // 4 // dist.get_world_size()
    chunk = torch.zeros(length, device=device)
    whole = torch.zeros(length * dist.get_world_size(), device=device)
    calls = {"all_reduce": lambda: dist.all_reduce(whole),
             "all_gather": lambda: dist.all_gather_into_tensor(whole, chunk),
             "reduce_scatter": lambda: dist.reduce_scatter_tensor(chunk, whole),
             "broadcast": lambda: dist.broadcast(whole, src=0),
             "ring": lambda: ring_all_reduce(whole)}
    return whole.nbytes, calls[name]


def measure(call, device):
    """Return the median seconds of a call, each counted until the slowest rank is done."""
    seconds = torch.zeros(14, device=device)
    for n in range(len(seconds)):
        dist.barrier()  # start together: otherwise a rank's time includes its wait for the others
        # On a GPU the call returns at once, and so the GPU measures. For small tensors its figure
        # includes the CPU's time to launch the call (nccl-tests leaves that out).
        if device.type != "cpu":
            start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            seconds[n] = start.elapsed_time(end) / 1000
        else:
            start = time.perf_counter()
            call()
            seconds[n] = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return statistics.median(seconds[3:].tolist())


# ---- Helpers that are no part of the lesson ----


def table(columns):
    """Log a row for each rank. All ranks must call it, each with its own {heading: value}."""
    rows = gathered([text(value) for value in columns.values()])
    lines = [["", *columns], *([f"rank {rank}", *row] for rank, row in enumerate(rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        log(("  " + "   ".join(cells)).rstrip())


def text(value):
    """Return a value as it appears in the table: a tensor as [1 2.5], a list of them in a row."""
    if isinstance(value, torch.Tensor):
        return "[" + " ".join(f"{number:g}" for number in value.tolist()) + "]"
    if isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value):
        return " ".join(text(item) for item in value)
    return "-" if value is None else str(value)


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


def share_cores(local_world_size):
    """Divide this machine's cores among its processes."""
    # By default each process uses all cores (or, under torchrun, only one).
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world_size))
    # Linux: run as a batch job. Otherwise Gloo's threads preempt each other.
    if not count_gpus():
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a container forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def listen_locally():
    """Let Gloo listen on this machine only: by default, anyone on its network can connect."""
    # Interface 1 is the loopback interface: lo on Linux, lo0 on a Mac.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SECTIONS,
                        help=f"sections to run: {', '.join(SECTIONS)}")
    parser.add_argument("--bench", action="store_true",
                        help=f"measure instead: {', '.join(BENCHMARKS)}")
    args = parser.parse_args()
    if args.bench and (wrong := set(args.only or []) - set(BENCHMARKS)):
        stop(f"--bench has no {', '.join(sorted(wrong))}: give some of {', '.join(BENCHMARKS)}")
    return args


if __name__ == "__main__":
    main()
