"""A mesh: the groups of ranks for replicas in one direction, and shards in the other.

With several machines, you shard the model inside a machine, where the network is fast, and keep
replicas across machines. So the ranks stand in a table, a mesh. A row has one replica: its ranks
have a shard each. A column has the ranks with the same shard. With 6 ranks and 3 shards:

    row 0:   0 1 2
    row 1:   3 4 5        the columns: 0 3, 1 4 and 2 5

Each row and each column is a process group. Write layout, make_groups and mean_of_shard, in which
the gradients go first along the rows, then along the columns. The checker has 2 and 3 ranks, so one
row or one column, and then 4, in two rows. It asks layout for larger meshes.

Read before: 04_collectives.py, the sections groups and reduce_scatter, and
recipes/shard_inside_machines.py. Exercise 13 shards in one direction.

    python exercises/21_mesh.py
"""

import torch
import torch.distributed as dist


def layout(world_size, shards):
    """Return (rows, columns): two lists of lists of ranks, as above, each in rising order.

    The first row has the ranks 0 to shards - 1. If shards does not divide world_size, raise a
    ValueError. Ask no process group: the mesh may be that of another job.
    """
    raise NotImplementedError


def make_groups(shards):
    """Return (row, column): the process groups of this rank's row, and of its column.

    All ranks call it together. With dist.new_group, each rank has to make every group, also those
    that it is not in, and all ranks in the same order. (dist.init_device_mesh does so. Do it
    without init_device_mesh or DeviceMesh here.)
    """
    raise NotImplementedError


def mean_of_shard(gradient, row, column):
    """Return this rank's shard of the mean of all ranks' gradients, over all rows and columns.

    All ranks call it together. gradient: this rank's, shape (length,), float64. You may change it.
    row, column: the groups from make_groups. A row has S ranks, a column R. S divides the length:
    the rank with the number i in its row has the shard of length / S numbers from i * length / S
    on. Return it, shape (length / S,).

    On average over the ranks, a rank sends at most (S - 1) / S of the gradient's bytes in the row,
    and 2 (R - 1) / R of the shard's in the column.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
