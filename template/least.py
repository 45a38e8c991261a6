"""Many processes train a model, and may be killed: see template/README.md, for CPUs and GPUs."""

import survive  # before torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main():
    device = survive.start()  # parts 1 and 2: who am I; meet the others

    survive.seed(0)
    inputs = torch.randn(1024, 10)
    dataset = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))  # your data
    train_set, validation_set = random_split(dataset, [896, 128])
    # Part 3: share the data. A step takes 64 examples, 64 / N on each process (of 3: 21, so 63).
    sampler = DistributedSampler(train_set)
    share = 64 // dist.get_world_size()
    workers = {"worker_init_fn": survive.obey_rank, "multiprocessing_context": "fork"}
    loader = DataLoader(train_set, share, sampler=sampler, num_workers=2, **workers)

    # Part 4: build the model, and wrap it. backward() now averages all processes' gradients.
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1))  # your model
    model.to(device)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    snapshot = survive.Snapshot(
        "train.pt", "batch of 64", model=model.module, optimizer=optimizer, schedule=schedule
    )
    now = snapshot.load(step=0, best=float("inf"))  # what was saved last; in a new job, these
    best = now["best"]
    with survive.settled(model):
        model(inputs[:2].to(device)).sum().backward()

    # Part 5: train. The models stay equal, so one process, rank 0, prints.
    for epoch in range(now["step"], 5):  # step counts what is done: epochs, here
        sampler.set_epoch(epoch)  # another order in each epoch
        survive.seed(0, epoch, dist.get_rank())  # dropout, augmentation
        model.train()
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(model(x), y)  # your loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        error = validate(model, validation_set, device)
        if error < best:
            best = error
            if snapshot.writer:  # true in one process for each disk
                survive.save(model.module.state_dict(), "best.pt")
        survive.log(f"epoch {epoch}: validation {error:.4f}, best {best:.4f}")
        snapshot.save(step=epoch + 1, best=best)


@torch.no_grad()
def validate(model, validation_set, device):
    model.eval()
    share = range(dist.get_rank(), len(validation_set), dist.get_world_size())
    total = torch.zeros((), dtype=torch.float64, device=device)
    for x, y in DataLoader(validation_set, 64, sampler=share):
        loss = nn.functional.mse_loss(model.module(x.to(device)), y.to(device), reduction="sum")
        total += loss
    dist.all_reduce(total)  # the sum over all processes: each must call this
    return total.item() / len(validation_set)


if __name__ == "__main__":
    main()
    # Part 6: leave. This frees DDP, and closes the connections.
    survive.leave(finished=True)
