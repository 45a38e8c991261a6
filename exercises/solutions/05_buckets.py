import torch
import torch.distributed as dist


def average_gradients(model, bucket_bytes):
    # All ranks have the same parameters in the same order, so they make the same buckets without a
    # word. DDP fills its buckets (25 MiB by default, the first 1 MiB) from the last parameter to
    # the first, as backward() finishes the gradients in that order, and for each dtype apart.
    # It looks afterwards whether a bucket is full, so a bucket of DDP may be larger than its limit.
    # With gradient_as_bucket_view=True, p.grad is a view of the bucket: nothing is copied back.
    open_buckets, buckets = {}, []
    for p in reversed(list(model.parameters())):
        if p.grad is None:
            continue
        bucket = open_buckets.get(p.dtype)
        if bucket is None or sum(q.grad.nbytes for q in [*bucket, p]) > bucket_bytes:
            bucket = open_buckets[p.dtype] = []
            buckets.append(bucket)
        bucket.append(p)
    for bucket in buckets:
        flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
        dist.all_reduce(flat)
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad.copy_(mean.view_as(p))
