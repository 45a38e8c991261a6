"""FSDP2: fully_shard() around each block, and torch.distributed.checkpoint.

torchrun --standalone --nproc-per-node=2 tests/trainers/fsdp2_loop.py
"""

import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import print_checksum
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, SAVE_EVERY, FOLDER = 3, 10, pathlib.Path("saved")


def points(count, seed):
    numbers = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, (numbers[:, :4].sum(1) > numbers[:, 4:8].sum(1)).long())


class State:
    """What a checkpoint holds: the shards of the weights and of the optimizer, and the step."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def save(state):
    """Each rank writes its shards; .metadata, which comes last, tells that all have."""
    older = [path.parent for path in FOLDER.glob("step_*/.metadata")]
    dcp.save({"app": state}, checkpoint_id=str(FOLDER / f"step_{state.step}"))
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in older:
            shutil.rmtree(folder)


def resume(state):
    complete = [path.parent for path in FOLDER.glob("step_*/.metadata")]
    newest = max(complete, default=None, key=lambda folder: int(folder.name[5:]))
    dist.barrier()  # all ranks have looked
    if newest:
        dcp.load({"app": state}, checkpoint_id=str(newest))
        if dist.get_rank() == 0:
            print(f"resuming from {newest}", flush=True)


def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for inputs, labels in loader:
            sums += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(sums)
    model.train()
    return float(sums[0] / sums[1])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 2))
    mesh = init_device_mesh("cpu", (world_size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_set, test_set = points(320, 0), points(64, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 8, sampler=sampler)
    test_loader = DataLoader(test_set, 8, sampler=DistributedSampler(test_set, shuffle=False))
    state = State(model, optimizer)
    resume(state)
    for epoch in range(state.step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader, start=epoch * len(loader) + 1):
            if step <= state.step:
                continue  # done before the resume
            # Other dropout on each rank, and the same again after a resume.
            torch.manual_seed(step * world_size + rank)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state.step = step
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step % SAVE_EVERY == 0:
                save(state)
        accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.4f}", flush=True)
    print_checksum(model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
