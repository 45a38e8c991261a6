"""The check of exercises/04_ring_all_reduce.py."""

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for length, dtype, unit in (  # the last two: fewer than N chunks have elements
            (1001, torch.float64, 1), (world_size + 1, torch.int64, 2**30 + 1),
            (1, torch.float64, 1)):
        places = unit * torch.arange(1, length + 1, dtype=dtype)
        tensor = places * 100**rank  # the digits of a wrong sum tell what was added, how often
        own, total = tensor.clone(), places * sum(100**r for r in range(world_size))
        with Sends() as exchanges:
            answer.ring_all_reduce(tensor)
        others = {kind for kind, _ in exchanges.calls} - {"send"}
        expect(not others, f"{', '.join(sorted(others))}, a collective, was called",
               "use point to point calls only")
        strangers = exchanges.receivers - {(rank + 1) % world_size}
        expect(not strangers, f"it sent to rank {min(strangers, default='')},"
               f" and its neighbour is rank {(rank + 1) % world_size}",
               "each rank passes chunks on to the next one, which passes them on again")
        right = tensor == total
        expect(right.all() or not torch.equal(tensor, own),
               f"with {length} elements, the tensor is still the rank's own",
               "write into the tensor itself: chunks that are views of it, and +=")
        rounded = (tensor.double() / total.double() - 1).abs().max().item()
        expect(right.all() or rounded > 1e-5, f"with {length} elements of {dtype}, the sum is off"
               f" by {rounded:.0e} of its value",
               "which dtype has a tensor into which you receive?",
               "torch.empty_like(chunk) has the dtype of the chunk, torch.zeros(n) has not")
        first = right.int().argmin().item()
        held = contents(tensor[first].item() / (first + 1) / unit, world_size)
        told = f"with {length} elements, {right.sum()} hold the sum. Element {first} {held}"
        rest = length % world_size if length > world_size else 0
        expect(right.all() or first < length - rest, told,
               "only the last elements are wrong: into which chunk does the rest go?",
               "tensor_split makes N chunks of all elements; some have one more")
        expect(right.all() or "counts" in held, told,
               "is a tensor used before its wait(), or a chunk put into the place of another one?",
               "until wait(), what is received may be anything")
        expect(right.all(), told,
               "first the chunks go round and are summed up; then the finished chunks go round,"
               " and replace what is there",
               "in step 0, rank r sends chunk r; in step s, chunk (r - s) % N. It always receives"
               " the chunk with the number before. tensor_split makes N chunks, also empty ones")
        sent, chunk = exchanges.bytes_sent(), -(-length // world_size) * tensor.itemsize
        expect(sent <= 2 * (world_size - 1) * chunk,
               f"with {length} elements, {sent} bytes were sent,"
               f" and 2 (N - 1) chunks have {2 * (world_size - 1) * chunk}",
               "send one chunk in each step, and there are 2 (N - 1) steps",
               "N - 1 steps sum up, so that each rank has one finished chunk; N - 1 more pass the"
               " finished chunks on")
        if length == 1001:
            figures = (f"{sent} bytes sent by rank 0, {sent / tensor.nbytes:.2f} times the tensor,"
                       f" by {len(exchanges.calls)} sends")
    return f"the sum is exact, {figures}"


class Sends(Exchanges):
    """Keeps the ranks to which this one sends, too."""

    def __init__(self):
        super().__init__()
        self.receivers = set()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if call._opname == "send":
            self.receivers.add(args[2])
        return super().__torch_dispatch__(call, types, args, kwargs)


def contents(number, world_size):
    """Say what an element holds: its number, divided by what rank 0 has there, tells it."""
    times = [int(number // 100**r % 100) for r in range(world_size)]
    if sum(count * 100**r for r, count in enumerate(times)) != number:
        return "holds what belongs elsewhere"
    return "counts " + ", ".join(f"rank {r} {count} times" for r, count in enumerate(times))
