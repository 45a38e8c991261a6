import os

import torch
import torch.distributed as dist


def save(path, model, optimizer, step):
    # os.replace is atomic: at any moment, path is the whole old file or the whole new one. fsync
    # comes first: otherwise a power cut can leave an empty file behind a new name. PyTorch's
    # distributed checkpoints (torch.distributed.checkpoint) do the same with their metadata file.
    # No collective stands under the "if": the other ranks wait in the next step.
    if dist.get_rank() == 0:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "next_step": step + 1,
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    # Each rank reads the same file, and nobody writes it before all ranks have taken a step. (With
    # a disk for each machine, rank 0 would have to send it.) DDP would send rank 0's weights to all
    # ranks, but not the optimizer's state.
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["next_step"]


def seed_step(step, rank, world_size):
    # Another seed for each pair of step and rank. So no state of a generator has to be saved: rank
    # 0 would have to know those of all ranks. (step + rank would repeat the numbers of others.)
    torch.manual_seed(step * world_size + rank)
