def layout(world_size, shards):
    if world_size % shards:
        raise ValueError("shards do not divide world_size")
    rows = [list(range(r, r + shards)) for r in range(0, world_size, shards)]
    return rows, [list(column) for column in zip(*rows)]


def make_groups(shards):
    own = []
    for lists in layout(dist.get_world_size(), shards):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own.append(group)
    return own


def mean_of_shard(gradient, row, column):
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column)
    return shard / dist.get_world_size()


# ---- rows for columns: layout\(6, 3\) has rows for columns, and columns for rows ----
def layout(world_size, shards):
    columns = [list(range(r, r + shards)) for r in range(0, world_size, shards)]
    return [list(row) for row in zip(*columns)], columns


# ---- as many rows as shards: layout\(6, 3\) has 3 rows, not 2 ----
def layout(world_size, shards):
    size = world_size // shards
    rows = [list(range(r, r + size)) for r in range(0, world_size, size)]
    return rows, [list(range(r, world_size, size)) for r in range(size)]


# ---- dealt out like cards: one of the rows is \[0, 2, 4\], not \[0, 1, 2\] ----
def layout(world_size, shards):
    count = world_size // shards
    rows = [list(range(first, world_size, count)) for first in range(count)]
    return rows, [list(column) for column in zip(*rows)]


# ---- what does not divide: layout\(8, 3\) returned .* and no ValueError came ----
def layout(world_size, shards):
    rows = [list(range(r, min(world_size, r + shards))) for r in range(0, world_size, shards)]
    return rows, [list(range(c, world_size, shards)) for c in range(shards)]


# ---- only the groups that it is in: in call 1 of new_group, rank 0 makes \[0\]; rank 1 makes \[1\] ----
def make_groups(shards):
    return [dist.new_group(ranks) for lists in layout(dist.get_world_size(), shards)
            for ranks in lists if dist.get_rank() in ranks]


# ---- rows by all, columns by their members: new_group, rank 0 makes \[0\]; rank 1 (makes \[1\]|has come) ----
def make_groups(shards):
    rows, columns = layout(dist.get_world_size(), shards)
    groups = [dist.new_group(ranks) for ranks in rows]
    row = groups[dist.get_rank() // shards]
    return row, dist.new_group(next(ranks for ranks in columns if dist.get_rank() in ranks))


# ---- its own groups first: rank 0 makes .*; rank 1 makes ----
def make_groups(shards):
    own = []
    for lists in layout(dist.get_world_size(), shards):
        lists.sort(key=lambda ranks: dist.get_rank() not in ranks)
        own.append([dist.new_group(ranks) for ranks in lists][0])
    return own


# ---- the last group kept: no group that rank \d is in ----
def make_groups(shards):
    rows, columns = layout(dist.get_world_size(), shards)
    for ranks in rows:
        row = dist.new_group(ranks)
    for ranks in columns:
        column = dist.new_group(ranks)
    return row, column


# ---- row and column swapped: the row of rank 0 has the ranks \[0, 1.*\], not \[0\] ----
def make_groups(shards):
    own = []
    for lists in layout(dist.get_world_size(), shards):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own.append(group)
    return own[::-1]


# ---- the lists, no groups: the row is \[0\], not a process group ----
def make_groups(shards):
    return [next(ranks for ranks in lists if dist.get_rank() in ranks)
            for lists in layout(dist.get_world_size(), shards)]


# ---- a DeviceMesh: this makes a DeviceMesh ----
def make_groups(shards):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // shards, shards))
    return mesh.get_group(1), mesh.get_group(0)


# ---- along the row only: this rank's own gradient, not averaged ----
def mean_of_shard(gradient, row, column):
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    return shard / row.size()


# ---- along the column only: with [23] shard\(s\) .* this rank's own gradient, not averaged ----
def mean_of_shard(gradient, row, column):
    shard = gradient.chunk(row.size())[row.rank()].clone()
    dist.all_reduce(shard, group=column)
    return shard / column.size()


# ---- summed, not averaged: the shard is the sum over all ranks, not the mean ----
def mean_of_shard(gradient, row, column):
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column)
    return shard


# ---- divided by the row alone: the shard is the sum over all ranks, not the mean ----
def mean_of_shard(gradient, row, column):
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column)
    return shard / row.size()


# ---- divided twice: divided by the ranks of a column once more ----
def mean_of_shard(gradient, row, column):
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column)
    return shard / dist.get_world_size() / column.size()


# ---- the gradient sent as float32: the shard is off by \d\.\de-0[789]\n +hint: float32 has 7 digits ----
def mean_of_shard(gradient, row, column):
    gradient = gradient.float()
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column)
    return (shard / dist.get_world_size()).double()


# ---- an all_reduce over all ranks: the ranks send \[.*\] bytes, and \d+ are enough ----
def mean_of_shard(gradient, row, column):
    dist.all_reduce(gradient)
    return gradient.chunk(row.size())[row.rank()] / dist.get_world_size()


# ---- an all_reduce in the row: the ranks send \[.*\] bytes, and \d+ are enough ----
def mean_of_shard(gradient, row, column):
    dist.all_reduce(gradient, group=row)
    shard = gradient.chunk(row.size())[row.rank()].clone()
    dist.all_reduce(shard, group=column)
    return shard / dist.get_world_size()


# ---- the whole mean: returned \(120,\), not the shape \(60,\) ----
def mean_of_shard(gradient, row, column):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


# ---- the shard of another number: rank \d has the mean of shard \d, not of \d ----
def mean_of_shard(gradient, row, column):
    gradient = torch.cat(gradient.chunk(row.size())[::-1])
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column)
    return shard / dist.get_world_size()


# ---- the column first, with the whole gradient: if row and column have 2 ranks each, the ranks send ----
def mean_of_shard(gradient, row, column):
    dist.all_reduce(gradient, group=column)
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    return shard / dist.get_world_size()


# ---- an assert in place of the ValueError: layout\(8, 3\) raised AssertionError, and no ValueError ----
def layout(world_size, shards):
    assert world_size % shards == 0
    rows = [list(range(r, r + shards)) for r in range(0, world_size, shards)]
    return rows, [list(c) for c in zip(*rows)]


# ---- a shard that divides: Check failed ----
import torch
import torch.distributed as dist

def layout(world_size, shards):
    if world_size % shards:
        raise ValueError(f"{shards} shards do not divide {world_size} ranks")
    table = torch.arange(world_size).view(-1, shards)
    return table.tolist(), table.T.tolist()

def make_groups(shards):
    own = []
    for lists in layout(dist.get_world_size(), shards):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own.append(group)
    return own

# WRONG: only S divides the length: the shard may be no multiple of R (61 numbers, 2 rows)
def mean_of_shard(gradient, row, column):
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    part = shard.new_empty(len(shard) // column.size())
    dist.reduce_scatter_tensor(part, shard, group=column)
    part /= row.size() * column.size()
    dist.all_gather_into_tensor(shard, part, group=column)
    return shard


# ---- does not wait: in mean_of_shard, 1 exchanges were begun, and nobody waits for them ----
import torch
import torch.distributed as dist

def layout(world_size, shards):
    if world_size % shards:
        raise ValueError(f"{shards} shards do not divide {world_size} ranks")
    table = torch.arange(world_size).view(-1, shards)
    return table.tolist(), table.T.tolist()

def make_groups(shards):
    own = []
    for lists in layout(dist.get_world_size(), shards):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own.append(group)
    return own

# WRONG: the all_reduce is not waited for
def mean_of_shard(gradient, row, column):
    gradient /= row.size() * column.size()
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient, group=row)
    dist.all_reduce(shard, group=column, async_op=True)
    return shard


# ---- a number in the row for a rank: is not part of group ----
import torch
import torch.distributed as dist

def layout(world_size, shards):
    if world_size % shards:
        raise ValueError(f"{shards} shards do not divide {world_size} ranks")
    table = torch.arange(world_size).view(-1, shards)
    return table.tolist(), table.T.tolist()

def make_groups(shards):
    own = []
    for lists in layout(dist.get_world_size(), shards):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own.append(group)
    return own

# WRONG: dst is a rank of the world, not of the row
def mean_of_shard(gradient, row, column):
    parts = list(gradient.chunk(row.size()))
    for number, part in enumerate(parts):
        dist.reduce(part, dst=number, group=row)
    shard = parts[dist.get_rank(row)].clone()
    dist.all_reduce(shard, group=column)
    return shard / dist.get_world_size()


# ---- the error of view: layout\(8, 3\) raised RuntimeError, and no ValueError ----
def layout(world_size, shards):
    table = torch.arange(world_size).view(-1, shards)
    return table.tolist(), table.T.tolist()
