import torch
import torch.distributed as dist


def ring_all_reduce(tensor):
    # In N - 1 steps each chunk visits all ranks and grows to the sum (reduce_scatter); in N - 1
    # more the finished chunks go round (all_gather). So each rank sends 2 (N - 1) / N of the
    # tensor, the least possible: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
    # clusters of workstations, 2009. Gloo does the same (gloo/allreduce.cc); NCCL has a ring, too.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)  # views; torch.chunk may make fewer than N
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        for work in dist.batch_isend_irecv(
            [  # if all called send first, all would wait
                dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size),
            ]
        ):
            work.wait()
        target.copy_(incoming + target if step < world_size - 1 else incoming)
