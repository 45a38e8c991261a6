"""Save in shards: each rank writes its own part, and any number of ranks can load it.

A state that is sharded need never be whole in one place: each rank saves the part that it has. Two
things are hard. The job may go on with more or fewer ranks, and then each rank needs other parts,
pieced together from those that were saved. And a job may die in the middle of a save, when some
ranks have written and others have not. Such a save must never be loaded, nor a mix of two. Write
save and load. The checker loads what you saved as all ranks of other jobs, and kills ranks in save.

Read before: recipes/checkpoint_any_world_size.py, and exercise 11, where one rank saves all.

    python exercises/18_checkpoint_shards.py
"""

import os

import torch
import torch.distributed as dist

NAMES = "weights", "exp_avg", "exp_avg_sq"  # the state: the weights, and AdamW's two numbers


def part_of(length, rank, world_size):
    """Return (first, stop): a rank has tensor[first:stop] of each tensor. Leave this as it is."""
    return length * rank // world_size, length * (rank + 1) // world_size


def save(root, step, length, shard):
    """Save the state of a step. All ranks call it together.

    root: the path of a folder that all ranks share. It exists. step: an int, larger than that of
    the save before. length: how many numbers each whole tensor has, maybe less than there are
    ranks. shard: {name: this rank's part}, for the three NAMES, in float32. A part may be empty,
    and may be a view of a longer tensor.

    Each rank writes its three tensors into files of its own, and at most 8192 bytes of other
    things, maybe into a common file. save changes no file that load reads: it writes another, or
    replaces it. No part is sent to another rank: a rank sends at most 4096 bytes. When save returns
    on any rank, load finds this step on all of them.

    If a rank dies in here, at any moment, load finds the save of this step, whole, or the one
    before, whole. Other files may be left over. If load finds the one before, the job may save this
    step again, on as many ranks, with other numbers.
    """
    raise NotImplementedError


def load(root, rank, world_size):
    """Return (step, shard): the newest whole save, for this rank of world_size ranks.

    Without a save, return None. world_size may be any number, whoever saved; it is not that of
    torch.distributed, and no other rank may be in load: exchange nothing. shard is a dict as that
    of save, with the parts of part_of(length, rank, world_size). Its tensors are no views of longer
    ones, which would stay in memory. load opens the files of a saved part only if it needs numbers
    from it. All other files that it opens have at most 8192 bytes together.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
