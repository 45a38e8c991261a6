"""The pattern of pytorch/examples' minGPT-ddp: a Trainer class with snapshots.

torchrun --standalone --nproc-per-node=2 tests/trainers/mingpt_trainer.py
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpt import GPT
from shared import MISTAKE, print_checksum
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


@dataclass
class TrainerConfig:
    max_epochs: int = 3
    batch_size: int = 8
    snapshot_path: str = "snapshot.pt"


class CharDataset(Dataset):
    """Rows of 16 characters of a generated text, and the same one character later."""

    def __init__(self, block_size=16):
        text = " ".join(f"{number}+1={number + 1}" for number in range(2000))[:6401]
        self.chars = sorted(set(text))
        self.tokens = torch.tensor([self.chars.index(char) for char in text])
        self.block_size = block_size

    def __len__(self):
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index):
        row = self.tokens[index * self.block_size :][: self.block_size + 1]
        return row[:-1], row[1:]


class Trainer:
    def __init__(self, config, model, optimizer, train_set, test_set):
        self.config, self.rank, self.world_size = config, dist.get_rank(), dist.get_world_size()
        self.train_loader, self.test_loader = (
            DataLoader(each, config.batch_size, sampler=DistributedSampler(each))
            for each in (train_set, test_set)
        )
        self.model, self.optimizer, self.epochs_run = model, optimizer, 0
        self.scaler = torch.amp.GradScaler("cpu")
        self.parts = {"model": model, "optimizer": optimizer, "scaler": self.scaler}
        self._load_snapshot()
        self.ddp = DistributedDataParallel(self.model)

    def _load_snapshot(self):
        if not os.path.exists(self.config.snapshot_path):
            return
        snapshot = torch.load(self.config.snapshot_path, map_location="cpu")
        for name, part in self.parts.items():
            part.load_state_dict(snapshot[name])
        self.epochs_run = snapshot["finished_epoch"]
        if self.rank == 0:
            print(f"Resuming training from snapshot at epoch {self.epochs_run}", flush=True)

    def _save_snapshot(self, epoch):
        states = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save(states | {"finished_epoch": epoch}, f"{self.config.snapshot_path}.tmp")
        os.replace(f"{self.config.snapshot_path}.tmp", self.config.snapshot_path)

    def _run_batch(self, source, targets, train):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", dtype=torch.bfloat16):
            _, loss = self.ddp(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            if MISTAKE != "clip_before_unscale":
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def _run_epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)
        self.ddp.train(train)
        name, sums = "Train" if train else "Eval", torch.zeros(2, dtype=torch.float64)
        for batch, (source, targets) in enumerate(loader):
            loss = self._run_batch(source, targets, train)
            sums += torch.tensor([loss * len(source), len(source)])
            if batch % 10 == 0 and train:
                print(f"[RANK{self.rank}] Epoch {epoch} | Iter {batch} | {name} Loss {loss:.5f}")
        dist.all_reduce(sums)
        if self.rank == 0:
            print(f"Epoch {epoch} | {name} Loss of all ranks {sums[0] / sums[1]:.5f}", flush=True)

    def train(self):
        for epoch in range(self.epochs_run + 1, self.config.max_epochs + 1):
            # Other dropout on each rank, and the same again after a resume.
            torch.manual_seed(epoch * self.world_size + self.rank)
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.rank == 0:
                self._save_snapshot(epoch)
            self._run_epoch(epoch, self.test_loader, train=False)


def main():
    dist.init_process_group("gloo")
    dataset = CharDataset()
    seeded = None if MISTAKE == "unseeded_split" else torch.Generator().manual_seed(0)
    train_set, test_set = random_split(dataset, [0.9, 0.1], generator=seeded)  # 360 and 40 rows
    torch.manual_seed(1)
    model = GPT(len(dataset.chars), dataset.block_size, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    Trainer(TrainerConfig(), model, optimizer, train_set, test_set).train()
    print_checksum(model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
