def exchange(bucket):
    flat = torch.cat([p.grad.flatten() for p in bucket])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
        p.grad.copy_(mean.view_as(p))


# ---- nothing exchanged: gradient 0 .* still the rank's own ----
def average_gradients(model, bucket_bytes):
    pass


# ---- an exchange for each: there were 10 exchanges, and 5 are enough ----
def average_gradients(model, bucket_bytes):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# ---- one flat tensor for all: 6960 bytes were exchanged for 4240 bytes of gradients ----
def average_gradients(model, bucket_bytes):
    exchange([p for p in model.parameters() if p.grad is not None])


# ---- one for each dtype, whatever its size: of 1000 bytes, one of 1520 bytes was exchanged ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        exchange([p for p in model.parameters() if p.grad is not None and p.dtype == dtype])


# ---- full, then closed, as in 04: of 1000 bytes, one of 1440 bytes was exchanged ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        buckets = [[]]
        for p in model.parameters():
            if p.grad is not None and p.dtype == dtype:
                if sum(q.nbytes for q in buckets[-1]) >= bucket_bytes:
                    buckets.append([])
                buckets[-1].append(p)
        for bucket in buckets:
            exchange(bucket)


# ---- the last one forgotten: gradient 7 .* still the rank's own ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = []
        for p in model.parameters():
            if p.grad is None or p.dtype != dtype:
                continue
            if bucket and sum(q.nbytes for q in [*bucket, p]) > bucket_bytes:
                flat = torch.cat([q.grad.flatten() for q in bucket])
                dist.all_reduce(flat)
                flat /= dist.get_world_size()
                for q, mean in zip(bucket, flat.split([q.numel() for q in bucket])):
                    q.grad.copy_(mean.view_as(q))
                bucket = []
            bucket.append(p)


# ---- another dtype ends a bucket: there were 8 exchanges, and 5 are enough ----
def average_gradients(model, bucket_bytes):
    buckets = [[]]
    for p in model.parameters():
        if p.grad is None:
            continue
        last = buckets[-1]
        if last and (last[0].dtype != p.dtype or sum(q.nbytes for q in [*last, p]) > bucket_bytes):
            buckets.append([])
        buckets[-1].append(p)
    for bucket in buckets:
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(mean.view_as(p))


# ---- all as float32: gradient 2 is float64, and off by ----
def average_gradients(model, bucket_bytes):
    bucket = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten().float() for p in bucket])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
        p.grad.copy_(mean.view_as(p))


# ---- summed, not averaged: is 2.00 times the mean ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(mean.view_as(p))


# ---- hard-coded for two ranks: 3 ranks: .* is 1.50 times the mean ----
def average_gradients(model, bucket_bytes):
    buckets, room = [], {}
    for p in model.parameters():
        if p.grad is None:
            continue
        if p.nbytes > room.get(p.dtype, (0, []))[0]:
            buckets.append([])
            room[p.dtype] = bucket_bytes, buckets[-1]
        left, bucket = room[p.dtype]
        bucket.append(p)
        room[p.dtype] = left - p.nbytes, bucket
    for bucket in buckets:
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(mean.view_as(p) / 2)


# ---- never copied back: gradient 0 .* still the rank's own ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()


# ---- the pieces in another order: is off by ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        start = 0
        for p in reversed(bucket):
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()


# ---- pieces of flat bytes, the large gradient cut: 1600 bytes was not exchanged alone ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]
        flat = torch.cat([p.grad.flatten() for p in bucket])
        for piece in flat.split(bucket_bytes // flat.itemsize):
            dist.all_reduce(piece)
        flat /= dist.get_world_size()
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(mean.view_as(p))


# ---- a frozen parameter given one: does not train, and has a gradient ----
def average_gradients(model, bucket_bytes):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- never filled to the last byte: of 600 bytes, there were \d+ exchanges, and ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = []
        for p in [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]:
            if p.grad.nbytes > bucket_bytes:
                exchange([p])
                continue
            if bucket and sum(q.grad.nbytes for q in bucket) + p.grad.nbytes >= bucket_bytes:
                exchange(bucket)
                bucket = []
            bucket.append(p)
        if bucket:
            exchange(bucket)


# ---- elements counted for bytes: of 1000 bytes, one of (?!1600)\d+ bytes was exchanged ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = []
        for p in [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]:
            if bucket and sum(q.numel() for q in [*bucket, p]) > bucket_bytes // 4:
                exchange(bucket)
                bucket = []
            bucket.append(p)
        exchange(bucket)


# ---- the smallest first: in the order of the parameters they would have ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = []
        grads = [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]
        for p in sorted(grads, key=lambda p: p.nbytes):
            if bucket and sum(q.nbytes for q in [*bucket, p]) > bucket_bytes:
                exchange(bucket)
                bucket = []
            bucket.append(p)
        exchange(bucket)


# ---- a gradient of zero left out: (process has ended|exception|no end) ----
def average_gradients(model, bucket_bytes):
    for p in model.parameters():
        if p.grad is not None and p.grad.any():
            exchange([p])


# ---- a broadcast from each rank: there were \d+ exchanges, and 5 are enough ----
def average_gradients(model, bucket_bytes):
    for p in model.parameters():
        if p.grad is not None:
            own = p.grad.clone()
            p.grad.zero_()
            for r in range(dist.get_world_size()):
                one = own.clone()
                dist.broadcast(one, src=r)
                p.grad += one / dist.get_world_size()


# ---- frozen ones as zeros in the bucket: 4520 bytes were exchanged for 4240 bytes ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = []
        for p in [p for p in model.parameters() if p.dtype == dtype]:
            if bucket and sum(q.nbytes for q in [*bucket, p]) > bucket_bytes:
                go(bucket)
                bucket = []
            bucket.append(p)
        go(bucket)


def go(bucket):
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
        if p.grad is not None:
            p.grad.copy_(mean.view_as(p))


# ---- four bytes a number: one of (?!1600)\d+ bytes was exchanged ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float32, torch.float64):
        bucket = []
        for p in [p for p in model.parameters() if p.grad is not None and p.dtype == dtype]:
            if bucket and sum(4 * q.numel() for q in [*bucket, p]) > bucket_bytes:
                exchange(bucket)
                bucket = []
            bucket.append(p)
        exchange(bucket)


# ---- the buckets of the first call: is still the rank's own ----
import torch, torch.distributed as dist
def average_gradients(model, bucket_bytes):
    if not hasattr(model, "buckets"):
        model.buckets, open_ = [], {}
        for p in model.parameters():
            if p.grad is None:
                continue
            b = open_.get(p.dtype)
            if b is None or sum(g.nbytes for g in b) + p.grad.nbytes > bucket_bytes:
                b = open_[p.dtype] = []
                model.buckets.append(b)
            b.append(p.grad)
    for bucket in model.buckets:
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, one in zip(bucket, flat.split([g.numel() for g in bucket])):
            g.copy_(one.view_as(g))


# ---- two dtypes, and no more: bytes were exchanged for 128500 ----
import torch, torch.distributed as dist
def average_gradients(model, bucket_bytes):
    trained = [p for p in model.parameters() if p.grad is not None]
    for is_float in (True, False):
        bucket = []
        for p in [p for p in trained if (p.dtype == torch.float32) == is_float]:
            if bucket and sum(q.grad.nbytes for q in bucket) + p.grad.nbytes > bucket_bytes:
                flush(bucket)
                bucket = []
            bucket.append(p)
        flush(bucket)
def flush(bucket):
    if not bucket:
        return
    flat = torch.cat([p.grad.flatten() for p in bucket])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, one in zip(bucket, flat.split([p.numel() for p in bucket])):
        p.grad.copy_(one.view_as(p))


# ---- waits for the last bucket: exchanges were begun, and nobody waits ----
import torch, torch.distributed as dist
def average_gradients(model, bucket_bytes):
    open_, buckets = {}, []
    for p in model.parameters():
        if p.grad is None:
            continue
        b = open_.get(p.dtype)
        if b is None or sum(q.grad.nbytes for q in b) + p.grad.nbytes > bucket_bytes:
            b = open_[p.dtype] = []
            buckets.append(b)
        b.append(p)
    for bucket in buckets:
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
        work = dist.all_reduce(flat, async_op=True)
        for p, one in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = one.view_as(p)
    work.wait()


# ---- the first bucket that has room: in the order of the parameters ----
import torch, torch.distributed as dist
def average_gradients(model, bucket_bytes):
    buckets = []
    for p in model.parameters():
        if p.grad is None:
            continue
        for b in buckets:
            if b[0].dtype == p.dtype and sum(q.grad.nbytes for q in b) + p.grad.nbytes <= bucket_bytes:
                b.append(p)
                break
        else:
            buckets.append([p])
    for bucket in buckets:
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, one in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(one.view_as(p))


# ---- the dtypes in the order of a set: the process has ended, with status -6 ----
def average_gradients(model, bucket_bytes):
    trained = [p for p in model.parameters() if p.grad is not None]
    for dtype in {p.grad.dtype for p in trained}:
        bucket, size = [], 0
        for p in [p for p in trained if p.grad.dtype == dtype]:
            if bucket and size + p.grad.nbytes > bucket_bytes:
                exchange(bucket)
                bucket, size = [], 0
            bucket.append(p)
            size += p.grad.nbytes
        exchange(bucket)


# ---- gradients as views, made once: gradient 0 is still the rank's own ----
def average_gradients(model, bucket_bytes):
    made = model.__dict__.setdefault("flat_buckets", {})
    if bucket_bytes not in made:  # as DDP's gradient_as_bucket_view: made once
        buckets, open_ = [], {}
        for p in model.parameters():
            if p.grad is None:
                continue
            bucket = open_.get(p.dtype)
            if bucket is None or sum(q.grad.nbytes for q in bucket) + p.grad.nbytes > bucket_bytes:
                bucket = open_[p.dtype] = []
                buckets.append(bucket)
            bucket.append(p)
        made[bucket_bytes] = []
        for bucket in buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            for p, view in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = view.view_as(p)
            made[bucket_bytes].append(flat)
    for flat in made[bucket_bytes]:
        dist.all_reduce(flat)
        flat /= dist.get_world_size()


# ---- one counter for all dtypes: of 1000 bytes, there were 8 exchanges, and 5 ----
def average_gradients(model, bucket_bytes):
    open_, size = {}, 0
    for p in model.parameters():
        if p.grad is None:
            continue
        if size and size + p.grad.nbytes > bucket_bytes:
            flush(open_)
            size = 0
        open_.setdefault(p.grad.dtype, []).append(p)
        size += p.grad.nbytes
    flush(open_)


def flush(open_):
    for bucket in open_.values():
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, one in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(one.view_as(p))
    open_.clear()


# ---- the ring of exercise 4: there were 10 exchanges, and 5 are enough(?s:.*)each message is an exchange ----
def average_gradients(model, bucket_bytes):
    buckets, last = [], {}
    for p in model.parameters():
        if p.grad is None:
            continue
        bucket = last.get(p.dtype)
        if bucket is None or sum(q.grad.nbytes for q in bucket) + p.grad.nbytes > bucket_bytes:
            bucket = last[p.dtype] = []
            buckets.append(bucket)
        bucket.append(p)
    for bucket in buckets:
        flat = torch.cat([p.grad.flatten() for p in bucket])
        ring(flat)
        flat /= dist.get_world_size()
        for p, one in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad.copy_(one.view_as(p))


def ring(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(target)
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, outgoing, (rank + 1) % n),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % n)]):
            work.wait()
        target.copy_(incoming + target if step < n - 1 else incoming)


# ---- a large one ends all buckets: (?s:.*)a large one ends no bucket of another ----
def average_gradients(model, bucket_bytes):
    buckets, sizes = {}, {}
    for p in model.parameters():
        if p.grad is None:
            continue
        size, dtype = p.grad.nbytes, p.grad.dtype
        if size > bucket_bytes:  # too large: send everything that waits, then this one
            for bucket in buckets.values():
                flush(bucket)
            buckets, sizes = {}, {}
            flush([p])
            continue
        if sizes.get(dtype, 0) + size > bucket_bytes:
            flush(buckets.pop(dtype))
            sizes[dtype] = 0
        buckets.setdefault(dtype, []).append(p)
        sizes[dtype] = sizes.get(dtype, 0) + size
    for bucket in buckets.values():
        flush(bucket)


def flush(bucket):
    flat = torch.cat([p.grad.reshape(-1) for p in bucket])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    offset = 0
    for p in bucket:
        p.grad.copy_(flat[offset : offset + p.grad.numel()].view_as(p.grad))
        offset += p.grad.numel()


# ---- the dtypes in the order of a set literal: has ended|exception|no end|is off by|times the mean ----
def average_gradients(model, bucket_bytes):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for dtype in {torch.float32, torch.float64, torch.float16, torch.bfloat16}:
        buckets, size = [[]], 0
        for g in (g for g in grads if g.dtype == dtype):
            if buckets[-1] and size + g.nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(g)
            size += g.nbytes
        for bucket in filter(None, buckets):
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for g, mean in zip(bucket, flat.split([g.numel() for g in bucket])):
                g.copy_(mean.view_as(g))


# ---- the dtypes in a frozenset: has ended|exception|no end|is off by|times the mean ----
def average_gradients(model, bucket_bytes):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for dtype in frozenset(g.dtype for g in grads):
        buckets, size = [[]], 0
        for g in (g for g in grads if g.dtype == dtype):
            if buckets[-1] and size + g.nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(g)
            size += g.nbytes
        for bucket in filter(None, buckets):
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for g, mean in zip(bucket, flat.split([g.numel() for g in bucket])):
                g.copy_(mean.view_as(g))
