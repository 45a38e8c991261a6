"""One process learns to find discs in noisy images: python template/example/before.py"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

EPOCHS, BATCH = 3, 16


class Discs(Dataset):
    """Images with discs, as dicts. Few of them have a large one: draw these more often."""

    def __init__(self, count, seed, augment):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.arange(24).float()
        x, y = 6 + 12 * torch.rand(2, count, 1, 1, generator=generator)
        self.radius = 2 + 6 * torch.rand(count, generator=generator) ** 3
        distance = ((rows.view(1, 24, 1) - y) ** 2 + (rows - x) ** 2).sqrt()
        self.masks = (distance < self.radius.view(-1, 1, 1)).float()
        self.images = self.masks + 0.7 * torch.randn(count, 24, 24, generator=generator)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, mask = self.images[index], self.masks[index]
        if self.augment and torch.rand(()) < 0.5:
            image, mask = image.flip(1), mask.flip(1)
        return {"image": image[None], "truth": {"mask": mask[None], "index": index}}


def new_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout2d(0.1),
        nn.Conv2d(8, 8, 5, padding=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 1, 1),
    )


def mean_loss(model, batch, device):
    logits, masks = model(batch["image"].to(device)), batch["truth"]["mask"].to(device)
    return binary_cross_entropy_with_logits(logits, masks)


def main():
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    train(device)


def train(device):
    torch.manual_seed(0)
    train_set, validation_set = Discs(320, 1, True), Discs(50, 2, False)
    epoch_steps = len(train_set) // BATCH
    sampler = WeightedRandomSampler(train_set.radius, len(train_set))
    loader = DataLoader(train_set, BATCH, sampler=sampler, num_workers=2, drop_last=True)
    model = new_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=EPOCHS * epoch_steps
    )
    best, total, rows, step = 0.0, 0.0, [], 0
    for epoch in range(EPOCHS):
        for batch in loader:
            step += 1
            model.train()
            optimizer.zero_grad()
            loss = mean_loss(model, batch, device)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item()
        dice = validate(model, validation_set, device)
        rows.append(f"{step},{total / epoch_steps:.6f},{dice:.6f}\n")
        total = 0.0
        with open("log.csv", "w") as file:
            file.write("step,loss,dice\n" + "".join(rows))
        if dice > best:
            best = dice
            torch.save(model.state_dict(), "best.pt")
        print(f"step {step}: dice {dice:.4f}, best {best:.4f}")


@torch.no_grad()
def validate(model, validation_set, device):
    """Return the Dice coefficient of all pixels together."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in DataLoader(validation_set, 25):
        found, masks = model(batch["image"].to(device)) > 0, batch["truth"]["mask"].to(device)
        sums += torch.stack([2 * (found * masks).sum(), found.sum() + masks.sum()])
    return (sums[0] / sums[1]).item()


if __name__ == "__main__":
    main()
