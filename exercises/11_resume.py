"""Resume: a job that is killed, and started again, ends with the bits of one that never was.

When a rank dies, the launcher (torchrun, say) ends the others and starts all anew. Each rank then
calls load, and trains on from the last snapshot: a file with all that a job needs to go on. Write
save, load and seed_step, which the training below calls. The check kills the job two or three
times, in the middle of save.

Read before: 02_torchrun_elastic.py, resume and save in it; recipes/randomness.py; and, in
pitfalls/, snapshot_in_place, every_rank_saves, off_by_one_epoch and optimizer_not_saved.

    python exercises/11_resume.py
"""

import torch
import torch.distributed as dist

STEPS = 6


def save(path, model, optimizer, step):
    """Write a snapshot to path: this step has just been taken. All ranks call it, after a step.

    path: a string, alike on all ranks, in a folder that they share. One rank writes, always the
    same one: the model and the optimizer are the same on all. (In one run, the check gives each
    rank a folder of its own, to see who writes.) The process may die at any moment. Then path must
    hold, whole, the snapshot from before the call (or none, if there was none), or the new one. You
    may write other files, but only in the same folder: another folder may be on another disk.
    """
    raise NotImplementedError


def load(path, model, optimizer):
    """Put what the snapshot has into the model and the optimizer. Return the step to take next.

    All ranks call it before they train, and all go on alike. If there is no snapshot, the model and
    the optimizer stay as they are, and the step is 0, the first.
    """
    raise NotImplementedError


def seed_step(step, rank, world_size):
    """Seed torch's random numbers (torch.randn, Dropout) for a step on a rank.

    The same arguments always give the same numbers, also in another process. No two pairs of a step
    and a rank share theirs, in a job of up to 100,000 steps and 4000 ranks. On a CPU, only the
    lower 32 bits of a seed count.
    """
    raise NotImplementedError


def train(path, model, optimizer, first_step, before_step):
    """Train from first_step, which load has returned. Leave this as it is."""
    for step in range(first_step, STEPS):
        before_step(step)  # here, the check prepares its accidents
        seed_step(step, dist.get_rank(), dist.get_world_size())
        inputs = torch.randn(16, 32)  # the batch; and the model has dropout
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9  # the learning rate falls
        if step % 2 == 1:
            save(path, model, optimizer, step)


if __name__ == "__main__":
    from checker import main

    main(__file__)
