def buckets_of(parameters, bucket_bytes):
    buckets, sizes, last = [], [], {}
    for p in parameters:
        if p.grad is None:
            continue
        number = last.get(p.dtype)
        if number is not None and sizes[number] + p.grad.nbytes <= bucket_bytes:
            buckets[number].append(p)
            sizes[number] += p.grad.nbytes
            continue
        if p.grad.nbytes <= bucket_bytes:
            last[p.dtype] = len(buckets)
        buckets.append([p])
        sizes.append(p.grad.nbytes)
    return buckets


def put_back(bucket, flat):
    for p in bucket:
        p.grad = flat[: p.numel()].view(p.shape)
        flat = flat[p.numel() :]


# ---- all in flight at once, the gradients are views of the buckets ----
def average_gradients(model, bucket_bytes):
    begun = []
    for bucket in buckets_of(model.parameters(), bucket_bytes):
        flat = torch.cat([p.grad.view(-1) for p in bucket])
        begun.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
    for bucket, flat, work in begun:
        work.wait()
        put_back(bucket, flat.div_(dist.get_world_size()))


# ---- one all_gather for each bucket ----
def average_gradients(model, bucket_bytes):
    for bucket in buckets_of(reversed(list(model.parameters())), bucket_bytes):
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        each = flat.new_empty(dist.get_world_size() * len(flat))
        dist.all_gather_into_tensor(each, flat)
        put_back(bucket, each.view(-1, len(flat)).mean(dim=0))


# ---- reduce_scatter and all_gather ----
def average_gradients(model, bucket_bytes):
    n = dist.get_world_size()
    for bucket in buckets_of(model.parameters(), bucket_bytes):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % n))
        part = padded.new_empty(len(padded) // n)
        dist.reduce_scatter_tensor(part, padded)
        dist.all_gather_into_tensor(padded, part / n)
        put_back(bucket, padded[: len(flat)].clone())


# ---- to rank 0 and back ----
def average_gradients(model, bucket_bytes):
    for bucket in buckets_of(model.parameters(), bucket_bytes):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        dist.reduce(flat, dst=0)
        dist.broadcast(flat, src=0)
        put_back(bucket, flat / dist.get_world_size())


# ---- a dtype after the other, as it comes ----
def average_gradients(model, bucket_bytes):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        bucket, size = [], 0
        grads = [p.grad for p in model.parameters() if p.dtype == dtype and p.grad is not None]
        for grad in [*grads, None]:
            if bucket and (grad is None or size + grad.nbytes > bucket_bytes):
                flat = torch._utils._flatten_dense_tensors(bucket)
                dist.all_reduce(flat)
                flat /= dist.get_world_size()
                parts = torch._utils._unflatten_dense_tensors(flat, bucket)
                for one, mean in zip(bucket, parts):
                    one.copy_(mean)
                bucket, size = [], 0
            if grad is not None:
                bucket.append(grad)
                size += grad.nbytes


# ---- from the last, the large one ends the bucket ----
def exchange(bucket):
    flat = torch.cat([p.grad.flatten() for p in bucket])
    dist.all_reduce(flat)
    put_back(bucket, flat / dist.get_world_size())


def average_gradients(model, bucket_bytes):
    open_ = {}
    for p in reversed([p for p in model.parameters() if p.grad is not None]):
        bucket = open_.setdefault(p.dtype, [])
        if bucket and sum(q.grad.nbytes for q in bucket) + p.grad.nbytes > bucket_bytes:
            exchange(bucket)
            bucket.clear()
        bucket.append(p)
    for bucket in open_.values():
        exchange(bucket)


# ---- coalesced lists ----
def average_gradients(model, bucket_bytes):
    open_ = {}

    def go(bucket):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        flat.div_(dist.get_world_size())
        dist.all_reduce_coalesced([flat])
        for g in bucket:
            g.view(-1)[:] = flat[: g.numel()]
            flat = flat[g.numel() :]

    for p in model.parameters():
        if p.grad is None:
            continue
        if p.grad.nbytes > bucket_bytes:
            go([p.grad])
            continue
        bucket = open_.setdefault(p.grad.dtype, [])
        if sum(g.nbytes for g in bucket) + p.grad.nbytes > bucket_bytes:
            go(bucket)
            bucket.clear()
        bucket.append(p.grad)
    for bucket in open_.values():
        if bucket:
            go(bucket)


# ---- a buffer that is filled ----
import torch, torch.distributed as dist
class Bucket:
    def __init__(self, dtype, limit):
        self.limit = limit
        self.flat, self.used, self.inside = torch.empty(limit // dtype.itemsize, dtype=dtype), 0, []
    def put(self, p):
        size = p.numel()
        if p.grad.nbytes > self.limit:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())
            return
        if self.used + size > len(self.flat):
            self.flush()
        place = self.flat.narrow(0, self.used, size)
        place.copy_(p.grad.flatten())
        self.inside.append((p, place))
        self.used += size
    def flush(self):
        if self.inside:
            filled = self.flat[: self.used]
            dist.all_reduce(filled)
            filled /= dist.get_world_size()
            for p, place in self.inside:
                p.grad.copy_(place.view(p.shape))
        self.used, self.inside = 0, []
def average_gradients(model, bucket_bytes):
    buckets = {}
    for p in model.parameters():
        if p.grad is not None:
            if p.dtype not in buckets:
                buckets[p.dtype] = Bucket(p.dtype, bucket_bytes)
            buckets[p.dtype].put(p)
    for bucket in buckets.values():
        bucket.flush()
