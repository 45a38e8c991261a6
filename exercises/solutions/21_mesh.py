import torch
import torch.distributed as dist


def layout(world_size, shards):
    if world_size % shards:
        raise ValueError(f"{shards} shards do not divide {world_size} ranks")
    table = torch.arange(world_size).view(-1, shards)
    return table.tolist(), table.T.tolist()


def make_groups(shards):
    # new_group is a call of all ranks: a rank that leaves one out makes its next group while the
    # others still make this one. So no "if" stands before it, only behind it.
    # dist.init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicas", "shards")) does
    # the same: mesh["shards"].get_group() is the row, mesh["replicas"].get_group() the column.
    own = []
    for lists in layout(dist.get_world_size(), shards):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own.append(group)
    return own


def mean_of_shard(gradient, row, column):
    # First along the row, where the network is fast: what then goes along the column, between the
    # machines, is an Sth of the gradient. The other way round, it would be all of it. FSDP2 does
    # this if fully_shard gets a mesh of two dimensions (hybrid sharding, HSDP).
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column)
    return shard / (row.size() * column.size())  # both added up: the mean is over all ranks
