"""A ring: sum a tensor over all ranks, while each rank sends to its neighbour alone.

all_reduce leaves the sum of all ranks' tensors on every rank. If all ranks sent their tensors to
one of them, its link would carry all the tensors, and the others would wait for it. In a ring, rank
r sends to rank r + 1, and the last one to rank 0, a part of the tensor in each step, all at the
same time: every link carries the same. Write ring_all_reduce with point to point calls: one rank
sends, another receives. A rank that sends to one that does not receive may wait for ever.

Read before: 04_collectives.py, from the section send_recv to batch_isend_irecv, and the section
ring, which prints every step. Close it, draw the steps for three ranks on paper, and write it
without looking.

    python exercises/04_ring_all_reduce.py
"""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    """Replace the tensor, on every rank, by the sum of all ranks' tensors.

    tensor: shape (n,). n and the dtype are the same on all ranks. n is 1 or more, and may be less
    than N, the number of ranks, or no multiple of it. The sum is written into this tensor.

    To exchange, call dist.send, recv, isend, irecv and batch_isend_irecv only. A rank sends to rank
    (rank + 1) % N alone, and at most as many bytes as 2 (N - 1) chunks have. A chunk is an N-th of
    the tensor, rounded up to whole elements; yours may be shorter, or empty. Call wait() of what
    isend, irecv and batch_isend_irecv return: before it, the message may not have left.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
