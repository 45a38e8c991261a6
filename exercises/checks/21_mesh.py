"""The check of exercises/21_mesh.py."""

import answer
import torch
import torch.distributed as dist
from checker import FLOAT32, Waiting, expect
from torch.distributed.device_mesh import DeviceMesh

MESHES = [(6, 3), (6, 2), (64, 8), (64, 4), (64, 64), (64, 1), (1, 1), (4096, 16), (12, 3)]
make, called = dist.new_group, [0]


def trial():
    world_size, done, worst = dist.get_world_size(), [], 0
    for ranks, shards in MESHES:
        look_at_layout(ranks, shards)
    for ranks, shards in ((8, 3), (3, 2), (64, 128)):
        look_at_refusal(ranks, shards)
    DeviceMesh.__init__ = no_mesh
    dist.new_group = watched
    for shards in [n for n in range(1, world_size + 1) if world_size % n == 0]:
        rows, columns = right_layout(world_size, shards)
        told, called[0] = f"with {shards} shard(s) on {world_size} ranks,", 0
        found = answer.make_groups(shards)
        compare(told, "has come back")
        expect(
            isinstance(found, (tuple, list)) and len(found) == 2,
            f"{told} make_groups returned {found!r}",
            "return row, column",
        )
        look_at_group(f"{told} the row", found[0], rows)
        look_at_group(f"{told} the column", found[1], columns)
        off, sent = look_at_mean(told, *found, shards)
        worst = max(worst, off)
        done.append(f"{world_size // shards} row(s) x {shards} shard(s), {sent} bytes sent")
    # Not a mesh, and the numbers mean nothing; but both directions have several ranks.
    both = [make(list(range(world_size))) for _ in range(2)]
    with Waiting() as exchanges:
        answer.mean_of_shard(torch.zeros(61 * world_size, dtype=torch.float64), *both)
    look_at_bytes(
        f"if row and column have {world_size} ranks each,",
        exchanges,
        61 * world_size,
        world_size,
        world_size,
    )
    return f"the mean off by {worst:.0e}; meshes of {', '.join(done)}"


def look_at_layout(world_size, shards):
    told = f"layout({world_size}, {shards})"
    found = answer.layout(world_size, shards)
    expect(
        isinstance(found, (tuple, list)) and len(found) == 2,
        f"{told} returned {found!r}",
        "return rows, columns",
    )
    rows, columns = [[list(map(int, one)) for one in lists] for lists in found]
    right = right_layout(world_size, shards)
    expect(
        (rows, columns) != right[::-1] or right[0] == right[1],
        f"{told} has rows for columns, and columns for rows",
        "the ranks of a row are next to each other",
    )
    for what, lists, its in (("rows", rows, right[0]), ("columns", columns, right[1])):
        expect(
            len(lists) == len(its),
            f"{told} has {len(lists)} {what}, not {len(its)}",
            "world_size / shards rows, and shards columns",
        )
        wrong = [(a, b) for a, b in zip(lists, its, strict=True) if a != b]
        expect(
            not wrong,
            f"{told}: one of the {what} is {wrong and wrong[0][0]}, not {wrong and wrong[0][1]}",
            "rank r stands in row r // shards, column r % shards",
        )


def look_at_refusal(world_size, shards):
    told = f"layout({world_size}, {shards})"
    try:
        found = answer.layout(world_size, shards)
    except ValueError:
        return
    except Exception as error:
        expect(
            False,
            f"{told} raised {type(error).__name__}, and no ValueError",
            "the one that calls it waits for a ValueError: say so yourself",
        )
    expect(
        False,
        f"{told} returned {found!r}, and no ValueError came",
        f"{shards} shards do not"
        f" divide {world_size} ranks: say so, before groups are made that miss some of them",
    )


def look_at_group(what, group, lists):
    rank = dist.get_rank()
    right = next(ranks for ranks in lists if rank in ranks)
    expect(
        group is not None and not isinstance(group, list),
        f"{what} is {group!r}, not a process group",
        "return what new_group gives, also for a group of one rank",
    )
    expect(
        isinstance(group, dist.ProcessGroup),
        f"{what} is {group!r}: no group that rank {rank} is in",
        "for groups of others, new_group returns a sign that this rank is not in it",
        "keep the group whose list of ranks has this rank, not the last that was made",
    )
    ranks = dist.get_process_group_ranks(group)
    expect(
        ranks == right,
        f"{what} of rank {rank} has the ranks {ranks}, not {right}",
        "which list of layout has this rank?",
    )


def look_at_mean(told, row, column, shards):
    """Return by how much the mean is off, and how many bytes were sent at most."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length, replicas = 60 * shards, world_size // shards
    torch.manual_seed(shards)
    gradients = torch.randn(world_size, length, dtype=torch.float64)
    place = slice(rank % shards * 60, (rank % shards + 1) * 60)
    with Waiting() as exchanges:
        found = answer.mean_of_shard(gradients[rank].clone(), row, column)
    exchanges.look_for_waits(f"{told} in mean_of_shard,")
    shape = tuple(found.shape) if torch.is_tensor(found) else type(found).__name__
    expect(
        shape == (60,),
        f"{told} mean_of_shard returned {shape}, not the shape (60,)",
        "return this rank's shard of the mean: its number in its row says which",
    )
    same_row = gradients[rank // shards * shards :][:shards]
    right, causes = (
        gradients.mean(dim=0)[place],
        {
            "this rank's own gradient, not averaged": gradients[rank],
            "the sum over all ranks, not the mean": gradients.sum(dim=0),
            "the mean, divided by the ranks of a row once more": gradients.mean(dim=0) / shards,
            "the mean, divided by the ranks of a column once more": gradients.mean(dim=0)
            / replicas,
            "divided by the ranks of a row only": gradients.sum(dim=0) / shards,
            "divided by the ranks of a column only": gradients.sum(dim=0) / replicas,
            "added up along the row alone, and divided by all ranks": same_row.sum(dim=0)
            / world_size,
            "the mean over this rank's row only": same_row.mean(dim=0),
            "the mean over this rank's column only": gradients[rank % shards :: shards].mean(dim=0),
        },
    )
    off = (found - right).abs().max().item()
    if off > 1e-9:
        expect(off > 1e-6, f"{told} the shard is off by {off:.1e}", FLOAT32)
        for what, wrong in causes.items():
            expect(
                (found - wrong[place]).norm() > 1e-9,
                f"{told} the shard is {what}",
                "added up along the row and along the column, it is a sum over all ranks",
            )
        for number in range(shards):
            other = gradients.mean(dim=0)[number * 60 : (number + 1) * 60]
            expect(
                (found - other).norm() > 1e-9,
                f"{told} rank {rank} has the mean of shard {number}, not of {rank % shards}",
                "its number in its row says which",
            )
        expect(
            False,
            f"{told} the shard is off by {off:.1e}",
            "a sum along the row, one along the column, and one division",
            "without group=, an exchange is one over all ranks",
        )
    return off, look_at_bytes(told, exchanges, length, shards, replicas)


def look_at_bytes(told, exchanges, length, shards, replicas):
    """Return how many bytes a rank sent at most."""
    sent = [None] * dist.get_world_size()
    dist.all_gather_object(sent, exchanges.bytes_sent())
    most = round(8 * length * ((shards - 1) / shards + 2 * (replicas - 1) / replicas / shards))
    expect(
        sum(sent) <= (most + 64) * len(sent),
        f"{told} the ranks send {sent} bytes, and {most} are enough for each",
        "which rank of a row needs which part of the gradient?",
        "reduce_scatter in the row, and then all_reduce of the shard in the column",
    )
    return max(sent)


def right_layout(world_size, shards):
    return (
        [list(range(first, first + shards)) for first in range(0, world_size, shards)],
        [list(range(first, world_size, shards)) for first in range(shards)],
    )


def watched(ranks=None, *args, **options):
    """new_group, but first all ranks say which group they are about to make."""
    if not options.get("use_local_synchronization"):
        called[0] += 1
        compare(f"in call {called[0]} of new_group,", f"makes {ranks and list(ranks)}")
    return make(ranks, *args, **options)


def compare(told, what):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, what)
    each = "; ".join(f"rank {rank} {its}" for rank, its in enumerate(everyone))
    expect(
        len(set(everyone)) == 1,
        f"{told} {each}",
        "every rank makes every group, in the same order, also those that it is not in",
    )


def no_mesh(*args, **options):
    expect(False, "this makes a DeviceMesh", "make the groups by dist.new_group")
