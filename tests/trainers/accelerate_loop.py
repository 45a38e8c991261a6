"""accelerate: prepare(), accumulate(), gather_for_metrics(), save_state() and load_state().

torchrun --standalone --nproc-per-node=2 tests/trainers/accelerate_loop.py
LOADER=dispatch torchrun ...   # rank 0 reads, and sends the others their share
LOADER=split torchrun ...      # a batch is split over the ranks
LOADER=uneven torchrun ...     # even_batches=False: the last batches are not filled up
"""

import os
import pathlib
import shutil

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from shared import MISTAKE, print_checksum
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, ITEMS, ACCUMULATE, SAVE_EVERY, FOLDER = 3, 720, 3, 9, pathlib.Path("saved")
LOADER = os.environ.get("LOADER", "")
OPTIONS = {"dispatch": "dispatch_batches", "split": "split_batches", "uneven": "even_batches"}


def points(count, seed):
    numbers = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, (numbers[:, :4].sum(1) > numbers[:, 4:8].sum(1)).long())


def evaluate(accelerator, model, loader):
    """Return the accuracy over all items, each of which counts once, also in padded shares."""
    model.eval()
    right = count = 0
    for inputs, labels in loader:
        with torch.no_grad():
            guessed = model(inputs).argmax(1)
        if LOADER != "uneven":
            gather = accelerator.gather if MISTAKE == "gather" else accelerator.gather_for_metrics
            guessed, labels = gather((guessed, labels))
        right, count = right + int((guessed == labels).sum()), count + len(labels)
    if LOADER == "uneven":  # the ranks have other numbers of batches: nothing to gather in each
        right, count = accelerator.reduce(torch.tensor([right, count])).tolist()
    return right / count


def save(accelerator, step):
    """Save into a folder beside, and rename it: a folder of this name is complete."""
    accelerator.save_state(str(FOLDER / "unfinished"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        older = list(FOLDER.glob("step_*"))
        (FOLDER / "unfinished").rename(FOLDER / f"step_{step}")
        for folder in older:
            shutil.rmtree(folder)
    accelerator.wait_for_everyone()


def resume(accelerator):
    """Load the newest state, and return after how many batches it was saved."""
    newest = max((int(path.name[5:]) for path in FOLDER.glob("step_*")), default=0)
    if newest:
        accelerator.print(f"resuming from step {newest}", flush=True)
        accelerator.load_state(str(FOLDER / f"step_{newest}"))
    return newest


def main():
    options = {OPTIONS[LOADER]: LOADER != "uneven"} if LOADER else {}
    options["use_seedable_sampler"] = True
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(data_seed=7, **options),
    )
    set_seed(1, device_specific=True)  # other dropout on each rank; DDP sends rank 0's weights
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Generators of their own: else iter() draws from the numbers of dropout, which a resume shifts.
    train_numbers, test_numbers = torch.Generator(), torch.Generator()
    train_loader = DataLoader(points(ITEMS, 0), 8, shuffle=True, generator=train_numbers)
    test_loader = DataLoader(points(101, 1), 8, generator=test_numbers)
    ours = [model, optimizer, train_loader, test_loader]
    if MISTAKE == "loader_not_prepared":
        ours.remove(train_loader)
    model, optimizer, *loaders = accelerator.prepare(*ours)
    train_loader, test_loader = [train_loader, *loaders][-2:]  # the loaders may be one alone
    # A prepared schedule takes one step for each rank (or, if batches are split, for a batch).
    steps = EPOCHS * ITEMS // 8 // ACCUMULATE
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if MISTAKE != "scheduler_not_prepared":
        schedule = accelerator.prepare(schedule)
    done = resume(accelerator)
    for epoch in range(done // len(train_loader), EPOCHS):
        model.train()
        skip = done - epoch * len(train_loader) if done > epoch * len(train_loader) else 0
        loader = accelerator.skip_first_batches(train_loader, skip) if skip else train_loader
        if MISTAKE != "loader_not_prepared":
            loader.set_epoch(epoch)
        for batch, (inputs, labels) in enumerate(loader, start=skip + 1):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                if MISTAKE == "backward_by_hand":
                    loss.backward()
                else:
                    accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            step = epoch * len(train_loader) + batch
            if batch % SAVE_EVERY == 0:
                save(accelerator, step)
            if batch % 10 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss:.4f}", flush=True)
        accelerator.print(f"accuracy {evaluate(accelerator, model, test_loader):.4f}", flush=True)
    print_checksum(accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main()
