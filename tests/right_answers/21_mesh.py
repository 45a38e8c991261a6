# ---- torch's subgroups by enumeration, a mean in each group ----
def layout(world_size, shards):
    replicas, rest = divmod(world_size, shards)
    if rest:
        raise ValueError(f"{world_size} ranks, {shards} shards")
    return ([[r * shards + s for s in range(shards)] for r in range(replicas)],
            [[r * shards + s for r in range(replicas)] for s in range(shards)])


def make_groups(shards):
    rows, columns = layout(dist.get_world_size(), shards)
    row, _ = dist.new_subgroups_by_enumeration(rows)
    column, _ = dist.new_subgroups_by_enumeration(columns)
    return row, column


def mean_of_shard(gradient, row, column):
    parts = [part / dist.get_world_size(row) for part in gradient.chunk(row.size())]
    shard = torch.zeros_like(parts[0])
    dist.reduce_scatter(shard, parts, group=row)
    shard /= column.size()
    dist.all_reduce(shard, group=column)
    return shard


# ---- tuples of tuples, groups in dictionaries, all_to_all in the row ----
def layout(world_size, shards):
    if world_size % shards:
        raise ValueError
    ranks = tuple(range(world_size))
    return (tuple(ranks[at : at + shards] for at in ranks[::shards]),
            tuple(ranks[at::shards] for at in range(shards)))


def make_groups(shards):
    rows, columns = layout(dist.get_world_size(), shards)
    groups = {ranks: dist.new_group(ranks=list(ranks), backend="gloo")
              for ranks in dict.fromkeys((*columns, *rows))}
    mine = [next(group for ranks, group in groups.items() if ranks in its and
                 dist.get_rank() in ranks) for its in (rows, columns)]
    return tuple(mine)


def mean_of_shard(gradient, row, column):
    there = torch.empty_like(gradient)
    dist.all_to_all_single(there, gradient, group=row)
    shard = there.view(row.size(), -1).sum(dim=0)
    work = dist.all_reduce(shard, group=column, async_op=True)
    work.wait()
    return shard.div_(row.size() * column.size())


# ---- only its own groups, which torch allows if it is told so ----
def layout(world_size, shards):
    if world_size % shards != 0:
        raise ValueError("no")
    table = torch.arange(world_size).reshape(world_size // shards, shards)
    return list(table), list(table.T)


def make_groups(shards):
    rank = dist.get_rank()
    mine = [next(one.tolist() for one in lists if rank in one)
            for lists in layout(dist.get_world_size(), shards)]
    return [dist.new_group(ranks, use_local_synchronization=True) for ranks in mine]


def mean_of_shard(gradient, row, column):
    parts = gradient.view(row.size(), -1)
    first = dist.get_process_group_ranks(row)[0]
    for number, part in enumerate(parts):
        dist.reduce(part, first + number, group=row)
    shard = parts[row.rank()].clone()
    if column.size() == 1:
        return shard / row.size()
    root = dist.get_process_group_ranks(column)[0]
    dist.reduce(shard, root, group=column)
    dist.broadcast(shard, root, group=column)
    return shard / dist.get_world_size()


# ---- the world, where a row or a column is all ranks; a reduce_scatter and an all_gather ----
def layout(world_size, shards):
    assert world_size > 0
    if world_size % shards:
        raise ValueError(shards)
    rows = [range(r, r + shards) for r in range(0, world_size, shards)]
    return rows, [range(c, world_size, shards) for c in range(shards)]


def make_groups(shards):
    row = column = None
    for number, lists in enumerate(layout(dist.get_world_size(), shards)):
        for ranks in lists:
            whole = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if whole else dist.new_group([*ranks])
            if dist.get_rank() in ranks:
                row, column = (group, column) if number == 0 else (row, group)
    return row, column


def mean_of_shard(gradient, row, column):
    shard = gradient.new_empty(len(gradient) // row.size())
    dist.reduce_scatter_tensor(shard, gradient / dist.get_world_size(), group=row)
    if column.size() == 1 or len(shard) % column.size():
        dist.all_reduce(shard, group=column)
        return shard
    part = shard.new_empty(len(shard) // column.size())
    dist.reduce_scatter_tensor(part, shard, group=column)
    dist.all_gather_into_tensor(shard, part, group=column)
    return shard


# ---- messages in the subgroups ----
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

# RIGHT: torch's subgroups for the rows; messages by a rank's number in its group; a tree of halves in the column
def make_groups(shards):
    row, _ = dist.new_subgroups(shards)
    column = None
    for ranks in layout(dist.get_world_size(), shards)[1]:
        made = dist.new_group(ranks, backend="gloo", group_desc=f"column {ranks[0]}")
        column = made if dist.get_rank() in ranks else column
    return row, column

def mean_of_shard(gradient, row, column):
    me, parts = row.rank(), gradient.view(row.size(), -1)
    others = [r for r in range(row.size()) if r != me]
    theirs = [torch.empty_like(parts[0]) for _ in others]
    works = [dist.isend(parts[r], group=row, group_dst=r) for r in others]
    works += [dist.irecv(one, group=row, group_src=r) for one, r in zip(theirs, others)]
    for work in works:
        work.wait()
    shard = torch.stack([parts[me], *theirs]).sum(dim=0) / (row.size() * column.size())
    if column.size() > 1:
        dist.reduce(shard, group=column, group_dst=0)
        dist.broadcast(shard, group=column, group_src=0)
    return shard
