"""Buckets: average many gradients with few exchanges.

Each exchange costs a fixed time, its latency, however small the tensor is. A model has hundreds of
small gradients: one exchange for each wastes time. A single exchange for all has to wait for the
last gradient. So DistributedDataParallel (DDP) puts some gradients into one flat tensor, a bucket,
and exchanges that. Write average_gradients with buckets.

Read before: exercise 3, and BucketedDDP in 04_collectives.py, section ddp. (Its buckets may grow
larger than bucket_bytes; yours may not. And yours need no hooks: that is exercise 7.)

    python exercises/05_buckets.py
"""

import torch
import torch.distributed as dist


def average_gradients(model, bucket_bytes):
    """Replace the gradient of each parameter, p.grad, by its mean over all ranks: in buckets.

    A bucket is one flat tensor of whole gradients. One exchange averages all of it: an all_reduce,
    or other collectives that together do the same. It holds gradients of one dtype, because a
    tensor has one dtype. All gradients keep theirs; p.grad may become a new tensor.

    Take the gradients in the order of model.parameters(), or from the last to the first. For each
    dtype, one bucket is open. A gradient that does not fit into it begins a new one: a bucket has
    at most bucket_bytes bytes (a tensor has nbytes).

    A gradient that is larger than that is exchanged alone, and not cut. The open bucket of its
    dtype goes on after it, or ends. A parameter that does not train has no gradient (None), on all
    ranks alike.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
