"""Processes on one machine or many do it, and may be killed: see template/README.md"""

import survive
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

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

    def __getitem__(self, which):
        epoch, place, index = which
        survive.seed(0, epoch, place, "item")
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
    device = survive.start()
    survive.leave(train(device))


def train(device):
    survive.seed(0)
    train_set, validation_set = Discs(320, 1, True), Discs(50, 2, False)
    epoch_steps = len(train_set) // BATCH
    model = new_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=EPOCHS * epoch_steps
    )
    snapshot = survive.Snapshot(
        "snapshot.pt",
        f"{BATCH} of {len(train_set)}",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    now = snapshot.load(best=0.0, total=0.0, rows=[], step=0)
    best, total, rows, step = now["best"], now["total"], now["rows"], now["step"]
    ddp = DDP(model, gradient_as_bucket_view=True)
    first = next(iter(loader_of(train_set, [[(0, 0, 0), (0, 1, 1)]])))
    survive.compare(data=first)
    with survive.settled(ddp):
        mean_loss(ddp, first, device).backward()
    asked_to_leave = survive.leave_on_sigterm()
    for batch in loader_of(train_set, shares(train_set, range(step, EPOCHS * epoch_steps))):
        step += 1
        survive.seed(0, step, dist.get_rank())
        model.train()
        optimizer.zero_grad()
        share = len(batch["image"]) * dist.get_world_size() / BATCH  # 1, if all are equal
        loss = mean_loss(ddp, batch, device) * share
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        dist.all_reduce(loss := loss.detach())
        total += loss.item() / dist.get_world_size()
        if step % epoch_steps == 0:
            survive.same_buffers(model)
            dice = validate(model, validation_set, device)
            rows.append(f"{step},{total / epoch_steps:.6f},{dice:.6f}\n")
            total = 0.0
            if snapshot.writer:
                survive.save(("step,loss,dice\n" + "".join(rows)).encode(), "log.csv")
            if dice > best:
                best = dice
                if snapshot.writer:
                    survive.save(model.state_dict(), "best.pt")
            survive.log(f"step {step}: dice {dice:.4f}, best {best:.4f}")
        leaving = asked_to_leave() and step < EPOCHS * epoch_steps
        if leaving or step % 10 == 0:
            snapshot.save(best=best, total=total, rows=rows, step=step)
        if leaving:
            return False
    survive.log(f"{dist.get_world_size()} replicas, sha256 {survive.compare(model=model)}")
    return True


def shares(train_set, steps):
    """Yield this rank's items of each step. As often as before, large discs are drawn."""
    epoch_steps = len(train_set) // BATCH
    for step in steps:
        epoch, number = divmod(step, epoch_steps)
        generator = torch.Generator().manual_seed(epoch)
        order = torch.multinomial(train_set.radius, len(train_set), True, generator=generator)
        mine = range(number * BATCH, (number + 1) * BATCH)[dist.get_rank() :: dist.get_world_size()]
        yield [(epoch, place, int(order[place])) for place in mine]


def loader_of(dataset, lists):
    return DataLoader(
        dataset,
        batch_sampler=lists,
        num_workers=2,
        worker_init_fn=survive.obey_rank,
        multiprocessing_context="fork",
    )


@torch.no_grad()
def validate(model, validation_set, device):
    """Return the Dice coefficient of all pixels together."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    places = range(len(validation_set))[dist.get_rank() :: dist.get_world_size()]
    for batch in loader_of(validation_set, [[(0, place, place)] for place in places]):
        found, masks = model(batch["image"].to(device)) > 0, batch["truth"]["mask"].to(device)
        sums += torch.stack([2 * (found * masks).sum(), found.sum() + masks.sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


if __name__ == "__main__":
    main()
