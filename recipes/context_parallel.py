"""My sequence does not fit on one GPU: how do I deal it out over the ranks?

    inputs, targets, positions = deal_out(tokens)  # this rank's share of the whole sequence

    out = ring_attention(q, k, v)  # replaces scaled_dot_product_attention(q, k, v, is_causal=True)

    scores = model(inputs, positions)  # model: in DistributedDataParallel
    counted = (targets != -100).sum()
    dist.all_reduce(counted)  # now the targets of all ranks (processes)
    loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss * dist.get_world_size() / counted).backward()  # DDP divides by the number of ranks

This runs on CPUs, and shows how it works. On GPUs, take torch's own for the first two parts:

    from torch.distributed.tensor.experimental import context_parallel
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # changed in place
    positions = torch.arange(inputs.size(1), device=device)
    with context_parallel(mesh, buffers=[inputs, targets, positions], buffer_seq_dims=[1, 1, 0]):
        ...  # here, the three are this rank's shares: the third part, as above

Inside, F.scaled_dot_product_attention(q, k, v, is_causal=True) sees the whole sequence. (By another
name, it stays local.) Each rank gathers K and V of all ranks in each layer, or passes them on after
experimental._attention.set_rotate_method("alltoall"). For N ranks, 2 N should divide the length: if
N alone does, the shares are contiguous, without an error. Only its shares are compared here (CPU).

Only attention lets tokens see each other. All else needs what data parallelism needs: a loss over
the targets of all ranks, and averaged gradients. Each rank keeps its queries. Keys and values (K
and V) travel around a ring. Each part of the keys gives a result by a softmax of its own. Its
log-sum-exp says how much it weighs in the whole: by that, the results are joined. A fused kernel
computes each block, and holds no scores.

    torchrun --standalone --nproc-per-node=4 recipes/context_parallel.py

    [rank 0/4] gradient of a model's weights, 2028 tokens on 4 ranks
    [rank 0/4] all by the whole sequence     off by 4.1e-16
    [rank 0/4] mask by numbers in the share  off by 5.9e-02
    [rank 0/4] positions in the share        off by 4.5e-01
    [rank 0/4] shift after dealing out       off by 3.2e-02
    [rank 0/4] mean of the ranks' means      off by 4.4e-02
    [rank 0/4] blocks of 256 x 256 on a rank: 3 to 15 with contiguous shares, 9 to 9 with zig-zag
    [rank 0/4] attention: 3538944 bytes held at once in one process, 2076672 on a rank
    [rank 0/4] 1/4 of the tokens on each rank, and the gradient of one process

"Off by" compares with one process, in float64. With causal attention, late tokens see more than
early ones: with one piece a rank (contiguous shares), the last would compute most. So cut 2 N
chunks, and give rank r the chunks r and 2 N - 1 - r (zig-zag shares). In the backward pass, K and V
go around once more, and collect their gradients, which come from the losses of all ranks.

One process holds 9 tensors as large as q at once, forward and backward. A rank holds up to 22 as
large as its own q (more in bfloat16), as K, V and their gradients travel in copies. (Without a
kernel's own buffers.) So two ranks save nothing, 4 ranks 41 %, and N ranks need 22 / (9 N) of it.

The wrong ways raise no error. All ranks that share a sequence must load the same one. Masks, rotary
and other position embeddings go by the positions in the whole sequence (their table needs up to 2 N
more rows). Shift the targets before the cut, as deal_out() does: the last token of a chunk predicts
the first of the next, mostly another rank's. Ranks with different numbers of targets (a prompt has
none) must not average their means. Call backward() outside of autocast. Packed documents see each
other.

To deal each sequence out over a few ranks, give deal_out() and ring_attention() their group, and
DistributedSampler the groups' number and this one's. DDP and counted stay with all ranks.
"""

import gc
import math
import os
import weakref
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count
from torch.utils._pytree import tree_leaves  # private, too

CHUNK = 256  # tokens; each rank has two chunks
PROMPT = 100  # tokens at the beginning that the model reads, but does not learn to write
BATCH, HEADS, HEAD_SIZE, VOCABULARY = 2, 3, 8, 40
NO_TARGET = -100  # cross_entropy leaves out targets of this value (its ignore_index)
# Attention that also returns the log-sum-exp of the scores, and its gradient. (Private. On GPUs:
# _scaled_dot_product_flash_attention and its backward, with other arguments.)
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def zig_zag(rank, world_size):
    """The right shares: return which of the 2 * world_size chunks a rank has, in its order."""
    return rank, 2 * world_size - 1 - rank


def own_positions(length, device, group=None):
    """Return where this rank's tokens stand in a sequence of this length (some after its end)."""
    world_size = dist.get_world_size(group)
    size = math.ceil(length / (2 * world_size))
    return torch.cat(
        [
            torch.arange(number * size, (number + 1) * size, device=device)
            for number in zig_zag(dist.get_rank(group), world_size)
        ]
    )


def deal_out(tokens, group=None):
    """The right way to shift and to share. tokens: (batch, length), the same on all ranks.

    Return this rank's inputs and targets, (batch, own tokens), and the positions of these tokens.
    """
    positions = own_positions(tokens.size(1) - 1, tokens.device, group)
    beyond = 0, 2 * dist.get_world_size(group)  # more than is needed to fill up the last chunk
    # Shifted before the cut: the next token may be on another rank.
    inputs, targets = pad(tokens[:, :-1], beyond), pad(tokens[:, 1:], beyond, value=NO_TARGET)
    return inputs[:, positions], targets[:, positions], positions


def ring_attention(q, k, v, group=None, chunks_of=zig_zag):
    """The right way: causal attention over a sequence that is dealt out over the ranks of a group.

    q, k, v: (batch, heads, tokens, head size), of this rank's tokens, in the order of
    own_positions(); of one shape and dtype on all ranks. (If g heads share one of K and V:
    k.repeat_interleave(g, dim=1).) Return this rank's part of the output. All ranks must call this,
    and go backward through it.

    ValueError: other shapes, or an odd number of tokens.
    Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023.
    """
    if not q.shape == k.shape == v.shape or q.size(2) % 2:
        raise ValueError("q, k and v need one shape, and an even number of tokens")
    with torch.autocast(q.device.type, enabled=False):  # call backward() outside of autocast, too
        return RingAttention.apply(q.contiguous(), k, v, group, chunks_of)  # else wrong, silently


class RingAttention(torch.autograd.Function):
    """Autograd does not follow a tensor to another rank: the backward() below does."""

    @staticmethod
    def forward(ctx, q, k, v, group, chunks_of):
        kv = torch.stack([k, v])  # one message
        wide = torch.promote_types(q.dtype, torch.float32)  # for sums, and gradients that travel
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)  # none has seen a key
        for source, share in around_ring(kv, group):
            for rows, columns, causal in blocks(q.size(2), source, group, chunks_of):
                part = KERNEL(q[:, :, rows], *share[..., columns, :], 0.0, causal)
                out[:, :, rows], lse[:, :, rows] = join(out[:, :, rows], lse[:, :, rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)  # of K and V, the own share only
        ctx.group, ctx.chunks_of = group, chunks_of
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        q, kv, out, lse = ctx.saved_tensors
        dq, receive = torch.zeros_like(q, dtype=lse.dtype), None
        for source, share in around_ring(kv, ctx.group):
            d_kv = torch.zeros_like(kv, dtype=lse.dtype)
            for rows, columns, causal in blocks(q.size(2), source, ctx.group, ctx.chunks_of):
                # By out and the log-sum-exp over all keys, these are parts of the whole gradients.
                dq_part, dk_part, dv_part = KERNEL_BACKWARD(
                    gradient[:, :, rows],
                    q[:, :, rows],
                    *share[..., columns, :],
                    out[:, :, rows],
                    lse[:, :, rows],
                    0.0,
                    causal,
                )
                dq[:, :, rows] += dq_part
                d_kv[0][:, :, columns] += dk_part
                d_kv[1][:, :, columns] += dv_part
            # The gradients follow their K and V from rank to rank, and each rank adds its part.
            # One step more than K and V take brings them home.
            if receive:
                d_kv += receive()
                receive = None  # frees what was sent
            receive = pass_on(d_kv, ctx.group)
        dk, dv = receive().to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def around_ring(kv, group):
    """Yield (rank, its K and V) of all ranks, the own first; the next ones travel meanwhile."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world_size - 1):
        receive = pass_on(kv, group)
        yield (rank - step) % world_size, kv
        kv = receive()
    yield (rank + 1) % world_size, kv  # the last: nobody needs it any more


def pass_on(tensor, group):
    """Start to send to the next rank, and to receive. Return a function that waits for both."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return lambda: tensor
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [  # both at once: if all sent first, all could wait
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % world_size),
        ]
    )

    def receive(sent=tensor):  # kept alive until now
        for work in works:
            work.wait()
        return received

    return receive


def blocks(own, source, group, chunks_of):
    """Yield (rows, columns, causal): a chunk of this rank's own tokens, and one of source's."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    halves = slice(0, own // 2), slice(own // 2, None)
    for row, rows in zip(chunks_of(rank, world_size), halves, strict=True):
        for column, columns in zip(chunks_of(source, world_size), halves, strict=True):
            if column <= row:  # otherwise, the keys are in the future
                yield rows, columns, column == row


def join(out, lse, part, part_lse):
    """Return the attention over the keys of out and of part, and its log-sum-exp."""
    joined = torch.logaddexp(lse, part_lse)
    weights = [(x - joined).exp().unsqueeze(-1) for x in (lse, part_lse)]
    return out * weights[0] + part * weights[1], joined


def main():
    if "RANK" not in os.environ:
        raise SystemExit("start it with: torchrun --standalone --nproc-per-node=4 ...")
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(1)  # every rank makes the whole sequences, and takes its share
    tokens = torch.randint(VOCABULARY, (BATCH, 2 * world_size * CHUNK - 20))  # the end is filled up
    log(f"gradient of a model's weights, {tokens.size(1)} tokens on {world_size} ranks")
    right = off_by(tokens, "all by the whole sequence")
    wrong = [
        off_by(tokens, "mask by numbers in the share", chunks_of=lambda rank, ranks: (0, 1)),
        off_by(tokens, "positions in the share", numbered=True),
        off_by(tokens, "shift after dealing out", late=True),
        off_by(tokens, "mean of the ranks' means", mean=True),
    ]
    claims = compare_work(world_size) | {
        "the model's gradient is that of one process": right <= 1e-12,
        "the wrong ways are wrong": world_size == 1 or min(wrong) > 0.01,
    }
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")
    log(f"1/{world_size} of the tokens on each rank, and the gradient of one process")
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def off_by(tokens, name, chunks_of=zig_zag, numbered=False, late=False, mean=False):
    """How far a model's gradient is from that of one process, which has the whole sequence."""
    whole, positions = Model().double(), torch.arange(tokens.size(1) - 1)
    scores = whole(tokens[:, :-1], positions, partial(scaled_dot_product_attention, is_causal=True))
    # The last token of the prompt predicts the first one after it.
    targets = tokens[:, 1:].masked_fill(positions < PROMPT - 1, NO_TARGET)
    cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
    model = DDP(Model().double())
    inputs, targets, positions = deal_out(tokens)
    if late:  # shifted in the share, as in a model that shifts its labels
        labels = inputs.masked_fill(targets == NO_TARGET, NO_TARGET)
        targets = pad(labels[:, 1:], (0, 1), value=NO_TARGET)
    targets = targets.masked_fill(positions < PROMPT - 1, NO_TARGET)
    if numbered:
        positions = torch.arange(len(positions))
    scores = model(inputs, positions, partial(ring_attention, chunks_of=chunks_of))
    counted, factor = (targets != NO_TARGET).sum(), 1
    if not mean:
        dist.all_reduce(counted)
        factor = dist.get_world_size()
    loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss * factor / counted).backward()
    found, expected = (
        torch.cat([p.grad.flatten() for p in net.parameters()]) for net in (model, whole)
    )
    off = ((found - expected).norm() / expected.norm()).item()
    log(f"{name:<29} off by {off:.1e}")
    return off


def compare_work(world_size):
    """Compare what attention alone computes, and holds at once, forward and backward."""
    whole = torch.randn(4, BATCH, HEADS, 2 * world_size * CHUNK, HEAD_SIZE)
    own, positions = own_positions(whole.size(3), "cpu"), torch.arange(whole.size(3))
    even, slow = (
        gathered(sum(len([*blocks(len(own), i, None, way)]) for i in range(world_size)))
        for way in (zig_zag, lambda rank, ranks: (2 * rank, 2 * rank + 1))
    )
    log(
        f"blocks of {CHUNK} x {CHUNK} on a rank: {min(slow)} to {max(slow)} with contiguous shares,"
        f" {min(even)} to {max(even)} with zig-zag"
    )
    alone = Held(partial(scaled_dot_product_attention, is_causal=True), *whole).most
    most = max(gathered(Held(ring_attention, *whole[..., own, :]).most))
    log(f"attention: {alone} bytes held at once in one process, {most} on a rank")
    with context_parallel(
        init_device_mesh("cpu", (world_size,)), buffers=[positions], buffer_seq_dims=[0]
    ):
        same = positions.equal(own)
    return {
        "zig-zag shares are equal": even == [2 * world_size + 1] * world_size,
        "contiguous shares are not": slow == [4 * rank + 3 for rank in range(world_size)],
        "a rank holds 22 shares at most": most <= 22 * whole[0, :, :, own].nbytes,
        "torch deals out the same shares": same,
    }


class Held(TorchDispatchMode):
    """Runs an attention, forward and backward. most: the most bytes that tensors hold at once."""

    def __init__(self, attention, q, k, v, gradient):
        super().__init__()
        self.now, self.most, self.known = 0, 0, weakref.WeakSet()
        with self:
            out = attention(*(x.clone().requires_grad_() for x in (q, k, v)))
            out.backward(gradient.clone())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in [x.untyped_storage() for x in tree_leaves(result) if torch.is_tensor(x)]:
            if storage not in self.known:
                self.known.add(storage)
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        return result

    def count(self, nbytes):
        self.now += nbytes
        self.most = max(self.most, self.now)


class Model(nn.Module):  # yours: only its attention needs the other ranks
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        width = HEADS * HEAD_SIZE
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(4096, width)
        self.blocks = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, inputs, positions, attention):
        x = self.tokens(inputs) + self.places(positions)
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
            x = x + attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x)


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
