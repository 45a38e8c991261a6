"""My sequence does not fit on one GPU: how do I deal it out over the ranks?

    inputs, targets, positions = deal_out(tokens)  # this rank's share of the whole sequence

    q, k = rotate(q, positions), rotate(k, positions)  # in your model
    out = ring_attention(q, k, v)  # replaces scaled_dot_product_attention(q, k, v, is_causal=True)

    scores = model(inputs, positions)  # model: in DistributedDataParallel
    counted = (targets != -100).sum()
    dist.all_reduce(counted)  # now the targets of all ranks (processes)
    loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss * dist.get_world_size() / counted).backward()  # DDP divides by the number of ranks

In a Transformer, only attention lets tokens see each other. All else works on each token alone, and
needs what data parallelism needs: a loss over the targets of all ranks, and gradients averaged over
the ranks, which DistributedDataParallel (DDP) does. For attention, each rank keeps the queries of
its own tokens, and the keys and values (K and V) travel around a ring: each rank passes them to the
next one while it computes. Each part of the keys gives a result by a softmax of its own. Its
log-sum-exp says how much the part weighs in the whole: by that, the results are joined.

    torchrun --standalone --nproc-per-node=4 recipes/context_parallel.py

    [rank 0/4] 384 tokens on 4 ranks: off by     output  queries     keys   values
    [rank 0/4] zig-zag shares                   5.2e-16  7.9e-16  7.9e-16  5.9e-16
    [rank 0/4] contiguous shares                5.2e-16  8.0e-16  8.1e-16  6.0e-16
    [rank 0/4] packed documents                 3.5e-16  6.0e-16  6.2e-16  4.6e-16
    [rank 0/4] documents see each other         8.6e-01  8.5e-01  8.7e-01  8.5e-01
    [rank 0/4] mask by numbers in the share     1.0e+00  1.0e+00  9.7e-01  1.0e+00
    [rank 0/4] mean without log-sum-exp         4.4e-01
    [rank 0/4] blocks of 48 x 48 on a rank: 3 to 15 with contiguous shares, 9 to 9 with zig-zag ones
    [rank 0/4] K and V: 73728 bytes of 294912 kept on a rank, 737280 sent, with their gradients
    [rank 0/4] all by the whole sequence       gradient of the weights off by 7.1e-16
    [rank 0/4] rotary by numbers in the share  gradient of the weights off by 5.2e-02
    [rank 0/4] shift after dealing out         gradient of the weights off by 1.3e-01
    [rank 0/4] mean of the ranks' means        gradient of the weights off by 2.6e-01
    [rank 0/4] 1/4 of the tokens on each rank, and the gradient of one process

"Off by" compares with one process that has the whole sequence, in float64: the output, and the
gradients. With causal attention, late tokens see more than early ones. If the first rank had the
first part, and so on (contiguous shares), the last rank would compute most, and all would wait for
it. So cut the sequence into 2 N chunks for N ranks, and give rank r the chunks r and 2 N - 1 - r
(zig-zag shares): all compute the same. For the backward pass, a rank keeps only its own K and V. In
it, they go around once more, and collect their gradients, which come from the losses of all ranks.

The wrong ways raise no error. All ranks that share a sequence must load the same one: a
DistributedSampler over all ranks gives each rank another. Masks and position embeddings must go by
the positions in the whole sequence, not by those in the share. A mean of the parts is wrong, since
their weights differ. Shift the targets before the sequence is cut, as deal_out() does: the last
token of a chunk predicts the first of the next chunk, mostly another rank's. A model that shifts
them by itself takes a wrong target there, and none at the end of the share. Ranks with different
numbers of targets (a prompt has none) must not average their means. And call backward() outside of
autocast.

Labels of your own, labels[:, i] that of token i, not shifted yet: targets = at(labels[:, 1:],
positions, fill=-100). Packed documents, by the number of each token's document:
ring_attention(q, k, v, at(documents[:, :-1], positions, fill=-1)). (The last token of a document
still predicts the first of the next: if it should not, give labels of your own.)

If a few ranks can hold a sequence, deal each one out over a group of ranks: give deal_out() and
ring_attention() the rank's group, and DistributedSampler the number of groups (num_replicas) and
that of this group (rank). DDP and the sum of counted stay with all ranks.

This is written to be read: attend() holds all scores of a block at once, which a fused kernel does
not. On GPUs, torch.distributed.tensor.experimental.context_parallel has such kernels, for code that
calls F.scaled_dot_product_attention (by another name, it would stay local, without an error). Take
it if it can do what your model needs. By default, each rank gathers K and V of all ranks in each
layer; after set_rotate_method("alltoall"), they travel. It is a prototype, and was not tried here:
its causal attention refuses a CPU.
"""

import argparse
import gc
import math
import os
import sys
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode  # private; only to count

CHUNK = 48  # tokens; each rank has two chunks
PROMPT = 40  # tokens at the beginning that the model reads, but does not learn to write
BATCH, HEADS, HEAD_SIZE, VOCABULARY = 2, 3, 8, 40
NO_TARGET = -100  # cross_entropy leaves out targets of this value (its ignore_index)


def zig_zag(rank, world_size):
    """The right shares: return which of the 2 * world_size chunks a rank has, in its order."""
    return rank, 2 * world_size - 1 - rank


def own_positions(length, device, group=None, chunks_of=zig_zag):
    """Return where this rank's tokens stand in a sequence of this length.

    If it cannot be cut into 2 * world_size equal chunks, some stand after its end. No token before
    sees them. (A table of position embeddings needs rows for them.)
    """
    world_size = dist.get_world_size(group)
    size = math.ceil(length / (2 * world_size))
    return torch.cat([torch.arange(number * size, (number + 1) * size, device=device)
                      for number in chunks_of(dist.get_rank(group), world_size)])


def at(values, positions, fill):
    """Return the columns of values, (batch, length), at these positions; after its end, fill."""
    return pad(values, (0, 1), value=fill)[:, positions.clamp(max=values.size(1))]


def deal_out(tokens, group=None):
    """The right way to shift and to share. tokens: (batch, length), the same on all ranks.

    Return this rank's inputs and targets, (batch, own tokens), and the positions of these tokens.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]  # before the cut: the next may be elsewhere
    positions = own_positions(inputs.size(1), tokens.device, group)
    return at(inputs, positions, fill=0), at(targets, positions, fill=NO_TARGET), positions


def ring_attention(q, k, v, documents=None, group=None, chunks_of=zig_zag):
    """The right way: causal attention over a sequence that is dealt out over the ranks of a group.

    q, k, v: (batch, heads, tokens, head size), of this rank's tokens, in the order of
    own_positions(); of one shape and dtype on all ranks. (If g heads share one of K and V:
    k.repeat_interleave(g, dim=1).) documents: (batch, tokens), integers: a token sees its own
    document only. Return this rank's part of the output. All ranks must call this, and go backward
    through it.

    ValueError: other shapes or dtypes, or an odd number of tokens.
    Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023.
    """
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype or q.size(2) % 2:
        raise ValueError("q, k and v need one shape, one dtype, and an even number of tokens:"
                         f" {[(tuple(x.shape), x.dtype) for x in (q, k, v)]}")
    if documents is not None:
        documents = documents.contiguous()
        of_ranks = [torch.empty_like(documents) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, documents, group=group)  # few bytes, beside K and V
        documents = torch.stack(of_ranks)
    with torch.autocast(q.device.type, enabled=False):  # call backward() outside of autocast, too
        return RingAttention.apply(q, k, v, documents, group, chunks_of)


class RingAttention(torch.autograd.Function):
    """Autograd does not follow a tensor to another rank: the backward() below does."""

    @staticmethod
    def forward(ctx, q, k, v, documents, group, chunks_of):
        kv = torch.stack([k, v])  # one message
        wide = torch.promote_types(q.dtype, torch.float32)  # for sums, and gradients that travel
        wide_q = q.to(wide)
        out = torch.zeros_like(wide_q)
        lse = torch.full_like(out[..., :1], -math.inf)  # no query has seen a key
        for source, share in around_ring(kv, group):
            k, v = share.to(wide)
            for rows, columns, hidden in blocks(q, source, documents, group, chunks_of):
                part = attend(wide_q[:, :, rows], k[:, :, columns], v[:, :, columns], hidden)
                out[:, :, rows], lse[:, :, rows] = join(out[:, :, rows], lse[:, :, rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse, documents)  # of K and V, the own share only
        ctx.group, ctx.chunks_of = group, chunks_of
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        q, kv, out, lse, documents = ctx.saved_tensors
        dtype, wide, scale = q.dtype, lse.dtype, q.size(-1) ** -0.5
        q, out, gradient = q.to(wide), out.to(wide), gradient.to(wide)
        # With g = gradient @ v.mT, softmax's gradient is weights * (g - the weighted sum of g).
        # This is that sum, over the keys of all ranks: out is already the weighted sum of v.
        g_sum = (gradient * out).sum(dim=-1, keepdim=True)
        dq, receive = torch.zeros_like(q), None
        for source, share in around_ring(kv, ctx.group):
            (k, v), d_kv = share.to(wide), torch.zeros_like(share, dtype=wide)
            for rows, columns, hidden in blocks(q, source, documents, ctx.group, ctx.chunks_of):
                q_part, k_part, g_part = q[:, :, rows], k[:, :, columns], gradient[:, :, rows]
                # By the log-sum-exp over all keys, these are the weights of the whole softmax.
                weights = (scores_of(q_part, k_part, hidden) - lse[:, :, rows]).exp()
                g = g_part @ v[:, :, columns].mT
                d_scores = weights * (g - g_sum[:, :, rows]) * scale
                dq[:, :, rows] += d_scores @ k_part
                d_kv[0][:, :, columns] += d_scores.mT @ q_part
                d_kv[1][:, :, columns] += weights.mT @ g_part
            # The gradients follow their K and V from rank to rank, and each rank adds its part.
            # One step more than K and V take brings them home.
            if receive:
                d_kv += receive()
            receive = pass_on(d_kv, torch.empty_like(d_kv), ctx.group)
        dk, dv = receive().to(dtype)
        return dq.to(dtype), dk, dv, None, None, None


def around_ring(kv, group):
    """Yield (rank, its K and V) of all ranks, the own first; the next ones travel meanwhile."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    buffers = [torch.empty_like(kv) for _ in range(min(2, world_size - 1))]
    for step in range(world_size - 1):
        receive = pass_on(kv, buffers[step % 2], group)  # one buffer is in use, one is filled
        yield (rank - step) % world_size, kv
        kv = receive()
    yield (rank + 1) % world_size, kv  # the last: nobody needs it any more


def pass_on(tensor, buffer, group):
    """Start to send to the next rank, and to receive. Return a function that waits for both."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return lambda: tensor
    operations = [  # both at once: if all sent first, all could wait
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % world_size),
        dist.P2POp(dist.irecv, buffer, group=group, group_peer=(rank - 1) % world_size)]
    works = dist.batch_isend_irecv(operations)

    def receive():
        for work in works:
            work.wait()
        return operations[1].tensor  # (operations also keeps what is sent alive until now)

    return receive


def blocks(q, source, documents, group, chunks_of):
    """Yield (rows, columns, hidden): a chunk of this rank's queries, and one of source's keys.

    Blocks that lie in the future are left out. hidden: what must not be seen, or None.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    size = q.size(2) // 2
    halves = slice(0, size), slice(size, None)
    for row, rows in zip(chunks_of(rank, world_size), halves, strict=True):
        for column, columns in zip(chunks_of(source, world_size), halves, strict=True):
            if column > row:
                continue
            hidden = None
            if column == row:  # the same chunk: each token sees itself, and those before it
                hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            if documents is not None:
                others = (documents[rank][:, None, rows, None]
                          != documents[source][:, None, None, columns])
                hidden = others if hidden is None else hidden | others
            yield rows, columns, hidden


def attend(q, k, v, hidden):
    """Return the attention over some of the keys, and its log-sum-exp: log(sum(exp(scores)))."""
    scores = scores_of(q, k, hidden)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def scores_of(q, k, hidden):
    scores = q @ k.mT * q.size(-1) ** -0.5
    # With -inf, a query that sees nothing in this block would get nan. With the lowest number, the
    # block's log-sum-exp is so low that join() gives it a weight of 0.
    return scores if hidden is None else scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


def join(out, lse, part, part_lse):
    """Return the attention over the keys of out and of part, and its log-sum-exp."""
    joined = torch.logaddexp(lse, part_lse)
    return out * (lse - joined).exp() + part * (part_lse - joined).exp(), joined


def contiguous(rank, world_size):
    """Slow: the right result, but the last rank computes most."""
    return 2 * rank, 2 * rank + 1


def numbered_locally(rank, world_size):
    """Wrong: the mask goes by the positions in the share."""
    return 0, 1


@torch.no_grad()
def mean_of_parts(q, k, v):
    """Wrong: a part with higher scores should weigh more."""
    out, parts = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for source, share in around_ring(torch.stack([k, v]), None):
        for rows, columns, hidden in blocks(q, source, None, None, zig_zag):
            part, _ = attend(q[:, :, rows], *share[..., columns, :], hidden)
            out[:, :, rows] += part
            parts[:, :, rows] += 1
    return out / parts


def deal_out_then_shift(tokens):
    """Wrong: each token's target is the next one in the share, as in a model that shifts them."""
    inputs, _, positions = deal_out(tokens)
    labels = at(tokens, positions, fill=NO_TARGET)
    return inputs, pad(labels[:, 1:], (0, 1), value=NO_TARGET), positions


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare_attention(device, dist.get_world_size())
    compare_model(device, dist.get_world_size())
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def compare_attention(device, world_size):
    length = 2 * world_size * CHUNK
    torch.manual_seed(0)  # every rank makes the whole sequence, and takes its share
    whole = torch.randn(4, BATCH, HEADS, length, HEAD_SIZE, dtype=torch.float64).to(device)
    documents = number_documents(length, device)
    plain, _ = results(partial(scaled_dot_product_attention, is_causal=True), *whole)
    packed, _ = results(partial(scaled_dot_product_attention, attn_mask=seen(documents)), *whole)
    own, in_turn = (own_positions(length, device, chunks_of=c) for c in (zig_zag, contiguous))

    log(f"{length} tokens on {world_size} ranks: off by     output  queries     keys   values")
    off, counts = {}, {}
    for name, expected, positions, attention in [
            ("zig-zag shares", plain, own, ring_attention),
            ("contiguous shares", plain, in_turn, partial(ring_attention, chunks_of=contiguous)),
            ("packed documents", packed, own, partial(ring_attention, documents=documents[:, own])),
            ("documents see each other", packed, own, ring_attention),
            ("mask by numbers in the share", plain, own,
             partial(ring_attention, chunks_of=numbered_locally)),
            ("mean without log-sum-exp", plain, own, mean_of_parts)]:
        found, counts[name] = results(attention, *whole[..., positions, :])
        off[name] = [off_by(x, y[:, :, positions]) for x, y in zip(found, expected, strict=False)]
        log(f"{name:<32} {'  '.join(f'{x:.1e}' for x in off[name])}")
    right = [x for name in list(off)[:3] for x in off.pop(name)]
    slow, even = (gathered(counts[f"{name} shares"].blocks) for name in ("contiguous", "zig-zag"))
    log(f"blocks of {CHUNK} x {CHUNK} on a rank: {min(slow)} to {max(slow)} with contiguous shares,"
        f" {min(even)} to {max(even)} with zig-zag ones")
    share, count = whole[1:3, ..., own, :].nbytes, counts["zig-zag shares"]
    log(f"K and V: {count.kept} bytes of {share * world_size} kept on a rank, {count.sent} sent,"
        " with their gradients")
    hold({
        "attention is that of one process": all(x <= 1e-12 for x in right),
        "the wrong ways are wrong": world_size == 1 or all(x > 0.01 for x, *_ in off.values()),
        "a rank keeps its own share": count.kept == share,
        "it is sent before a rank computes": count.ahead == share * (world_size > 1),
        # to world_size - 1 others, forward and backward; the gradients take a step more
        "the rest is sent": count.sent == (3 * world_size - 2) * share * (world_size > 1),
        "zig-zag shares are equal": even == [2 * world_size + 1] * world_size,
        "contiguous shares are not": slow == [4 * rank + 3 for rank in range(world_size)]})


def compare_model(device, world_size):
    """Compare the gradient of a model's weights, for packed documents whose end is filled up."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, 2 * world_size * CHUNK - 20)).to(device)
    documents = number_documents(tokens.size(1), device)[:, :-1]  # of the inputs
    model, positions = new_model(device), torch.arange(tokens.size(1) - 1, device=device)
    scores = model(tokens[:, :-1], positions,
                   partial(scaled_dot_product_attention, attn_mask=seen(documents)))
    # The last token of the prompt predicts the first one after it.
    targets = tokens[:, 1:].masked_fill(positions < PROMPT - 1, NO_TARGET)
    cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()  # one process
    expected, off = flat_gradient(model), {}
    for name, deal, changed in [("all by the whole sequence", deal_out, None),
                                ("rotary by numbers in the share", deal_out, "rotary"),
                                ("shift after dealing out", deal_out_then_shift, None),
                                ("mean of the ranks' means", deal_out, "mean")]:
        inputs, targets, positions = deal(tokens)
        targets = targets.masked_fill(positions < PROMPT - 1, NO_TARGET)
        own_documents = at(documents, positions, fill=-1)
        model, counted, factor = DDP(new_model(device)), (targets != NO_TARGET).sum(), 1
        if changed != "mean":
            dist.all_reduce(counted)
            factor = world_size  # by which DDP will divide
        if changed == "rotary":
            positions = torch.arange(len(positions), device=device)
        scores = model(inputs, positions, partial(ring_attention, documents=own_documents))
        loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss * factor / counted).backward()
        off[name] = ((flat_gradient(model) - expected).norm() / expected.norm()).item()
        log(f"{name:<31} gradient of the weights off by {off[name]:.1e}")
    right, *wrong = off.values()
    hold({"the model's gradient is that of one process": right <= 1e-12,
          "the model's wrong ways are wrong": world_size == 1 or min(wrong) > 0.01})
    log(f"1/{world_size} of the tokens on each rank, and the gradient of one process")


def number_documents(length, device):
    """Return the number of each token's document: (BATCH, length), some 50 tokens in each."""
    return (torch.rand(BATCH, length) < 0.02).cumsum(dim=1).to(device)


def seen(documents):
    """The mask of one process: True where a token (row) sees another one (column)."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def results(attention, q, k, v, gradient):
    """Return [the output, the gradients of q, k and v], and what was counted."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with Count() as count, torch.autograd.graph.saved_tensors_hooks(count.keep, lambda x: x):
        out = attention(*leaves)
        if not out.requires_grad:
            return [out], count
        out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)], count


class Count(TorchDispatchMode):
    """Counts the bytes sent (ahead: before the first block), K and V that are kept, and blocks."""

    def __init__(self):
        super().__init__()
        self.sent = self.ahead = self.kept = self.blocks = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() == "c10d::send":
            self.sent += sum(tensor.nbytes for tensor in args[0])
        self.ahead = self.ahead if self.blocks else self.sent
        self.blocks += function.name() == "aten::logsumexp"
        return function(*args, **(kwargs or {}))

    def keep(self, tensor):
        self.kept += tensor.nbytes if tensor.ndim == 5 else 0  # K and V in one
        return tensor


def off_by(found, expected):
    """The distance over all ranks, relative to the length of what one process computes."""
    squares = torch.stack([(found - expected).square().sum(), expected.square().sum()])
    dist.all_reduce(squares)
    return (squares[0] / squares[1]).sqrt().item()


def hold(claims):
    if not all(claims.values()):
        raise RuntimeError(f"not so: {', '.join(c for c, holds in claims.items() if not holds)}")


class Model(nn.Module):
    """Your model. Only its attention needs the other ranks."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_SIZE
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width)) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, inputs, positions, attention):
        x = self.embedding(inputs)
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
            out = attention(rotate(q, positions), rotate(k, positions), v)
            x = x + out.transpose(1, 2).flatten(2)
        return self.head(x)


def rotate(x, positions):
    """Rotary embedding of x: (batch, heads, tokens, head size), by the positions of its tokens."""
    half = x.size(-1) // 2
    # In float32, the angles of far positions would be rough.
    powers = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = positions[:, None] / 10000 ** powers
    a, b, cos, sin = *x.chunk(2, dim=-1), angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def new_model(device):
    torch.manual_seed(2)
    return Model().to(device, torch.float64)


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# ---- Helpers that are no part of the lesson ----


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
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:  # a single rank is enough, but it needs a launcher
        stop(f"start it with: torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
