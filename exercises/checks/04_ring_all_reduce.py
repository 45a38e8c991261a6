"""The check of exercises/04_ring_all_reduce.py."""

import json
import math
from itertools import zip_longest

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, expect, kind_of


def trial():
    world_size = dist.get_world_size()
    for length, dtype, unit in (  # halves show a buffer of integers; the last three are small
        (1001, torch.float64, 0.5),
        (world_size + 1, torch.int64, 2**40 + 1),
        (max(2, world_size - 1), torch.int32, 1),
        (1, torch.float64, 0.5),
    ):
        places = unit * torch.arange(1, length + 1, dtype=dtype)
        tensor = places * 100 ** dist.get_rank()  # the digits of a sum tell what was added
        place, own = tensor.data_ptr(), tensor.clone()
        total = places * sum(100**r for r in range(world_size))
        with Sends() as sends:
            answer.ring_all_reduce(tensor)
        told = f"with {length} elements"
        check_calls(told, sends)
        expect(
            tensor.data_ptr() == place,
            "the sum is not where the tensor was: tensor.data was replaced",
            "views of the tensor look at the old place: write into it, by copy_()",
        )
        check_sum(told, tensor, own, total, unit)
        sent, chunk = sends.bytes_sent(), -(-length // world_size) * tensor.itemsize
        most = 2 * (world_size - 1) * chunk
        expect(
            sent <= most,
            f"{told}, {sent} bytes were sent, and 2 (N - 1) chunks have {most}",
            "send one chunk in each step, and there are 2 (N - 1) steps",
            "N - 1 steps sum up: then each rank has one finished chunk; N - 1 more pass it on",
        )
        expect(sends.sent, f"{told}, the sum is right, but nothing was sent", "use isend and irecv")
        if length == 1001:
            figures = (
                f"{sent} bytes sent by rank 0, {sent / tensor.nbytes:.2f} times the tensor,"
                f" by {len(sends.calls)} sends" + drawn(sends.sent, unit)
            )
    return f"the sum is exact, {figures}"


def check_calls(told, sends):
    others = ", ".join(sorted(sends.others))
    expect(not others, f"{others}, a collective, was called", "use point to point calls only")
    neighbour = (dist.get_rank() + 1) % dist.get_world_size()
    strangers = [to for to, _ in sends.sent if to != neighbour]
    expect(
        not strangers,
        f"it sent to rank {sum(strangers[:1])}, and its neighbour is rank {neighbour}",
        "each rank passes chunks on to the next one, which passes them on",
    )
    waited, begun = len(sends.waited), sends.messages
    expect(
        waited >= begun,
        f"{told}, wait() was called for {waited} of {begun} messages",
        "isend and irecv return at once: keep what they return, and call its wait()",
    )


def check_sum(told, tensor, own, total, unit):
    length, world_size, right = len(tensor), dist.get_world_size(), tensor == total
    if right.all():
        return
    expect(
        not torch.equal(tensor, own),
        f"{told}, the tensor is still the rank's own",
        "write into the tensor itself: chunks that are views of it, and +=",
    )
    off = (tensor.double() - total.double()).abs().nan_to_num(math.inf)
    rounded = (off / total.double()).max().item()
    expect(
        rounded > 1e-5 and (length < 1000 or off.max() >= world_size),
        f"{told} of {tensor.dtype}, the sum is off by {rounded:.0e} of its value",
        "which dtype has a tensor into which you receive?",
        "torch.empty_like(chunk) has the dtype of the chunk, torch.zeros(n) has not",
    )
    first = right.int().argmin().item()
    times = contents(tensor[first].item() / (first + 1) / unit)
    held = "counts " + ", ".join(f"rank {r} {count} times" for r, count in enumerate(times))
    told += f", {right.sum()} hold the sum. Element {first} " + (
        held if times else "holds what belongs elsewhere"
    )
    expect(
        first < length - (length > world_size) * (length % world_size),
        told,
        "only the last elements are wrong: into which chunk does the rest go?",
        "tensor_split makes N chunks of all elements; some have one more",
    )
    expect(
        any(times),
        told,
        "is a tensor used before its wait(), or a chunk put into the place of another one?",
    )
    expect(
        False,
        told,
        "first the chunks go round and are summed up; then the finished chunks go round,"
        " and replace what is there",
        "in step s, rank r sends chunk (r - s) % N. It always"
        " receives the one before that. tensor_split makes N chunks, also empty ones",
    )


def contents(number):
    """Say how often each rank is in a number, which is divided by what rank 0 has there."""
    times = [
        int(number // 100**r % 100) if math.isfinite(number) else -1
        for r in range(dist.get_world_size())
    ]
    return times if sum(count * 100**r for r, count in enumerate(times)) == number else []


class Sends(Exchanges):
    """Keeps what is sent, too: (to which rank, a copy). And for how many messages wait() came."""

    def __init__(self):
        super().__init__()
        self.sent, self.messages, self.waited, self.others = [], 0, {}, set()
        wait = dist.Work.wait
        dist.Work.wait = lambda work, *args: (
            self.waited.update({id(work): work}),
            wait(work, *args),
        )[1]

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        message = kind_of(call) in ("send", "recv")
        self.messages += message
        if call.namespace in ("c10d", "_c10d_functional") and not message:
            self.others.add(call._opname.strip("_"))
        if kind_of(call) == "send":
            self.sent.append((args[2], args[0][0].clone()))
        return super().__torch_dispatch__(call, types, args, kwargs)


def drawn(sent, unit):
    """Return a table of what each rank has sent."""
    world_size, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    names = [named(one.flatten() / unit) for _, one in sent]
    store.set(f"{dist.get_rank()}", json.dumps(names))
    each = [json.loads(store.get(f"{r}")) for r in range(world_size)]
    if world_size > 4 or max(map(len, each)) > 12:
        return ""  # too large to look at
    lines = ["\nElements that were sent, and whose sum they are:"]
    columns = [[f"rank {r} to {(r + 1) % world_size}", *each[r]] for r in range(world_size)]
    for number, line in enumerate(zip_longest(*columns, fillvalue="")):
        lines.append(f"{number or 'step':<6}" + "  ".join(f"{one:<17}" for one in line).rstrip())
    return "\n".join(lines)


def named(chunk):
    """Say which elements these are, and the sum of which ranks: the numbers tell it."""
    distance = (chunk[1] - chunk[0]).item() if len(chunk) > 1 else 0
    stride = next((times for times in contents(distance) if times > 0), 0)
    ranks = contents(distance / stride) if stride else []
    if not ranks or set(ranks) > {0, 1} or (chunk.diff() != distance).any():
        return f"{len(chunk)} elements"
    first = round(chunk[0].item() * stride / distance) - 1
    return (
        f"{first}-{first + stride * (len(chunk) - 1)}{f' by {stride}' * (stride > 1)}: "
        + "+".join(f"{r}" for r, times in enumerate(ranks) if times)
    )
