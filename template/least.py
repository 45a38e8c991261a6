"""Many train it, and may be killed: torchrun --standalone --nproc-per-node=2 template/least.py"""

import survive  # before torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    device = survive.start()  # parts 1 and 2: who am I; meet the others

    survive.seed(0)
    inputs = torch.randn(1024, 10)
    dataset = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))  # your data
    # Part 3: share the data. A step takes 64 examples, 64 / N on each process (of 3: 21, so 63).
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)

    # Part 4: build the model, and wrap it. backward() now averages all processes' gradients.
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1))  # your model
    model.to(device)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    snapshot = survive.Snapshot("train.pt", "batch of 64", model=model.module, optimizer=optimizer)
    done = snapshot.load(step=0)["step"]  # how many epochs; 0 in a new job
    with survive.settled(model):
        model(inputs[:2].to(device)).sum().backward()

    # Part 5: train. The models stay equal, so one process, rank 0, prints and saves.
    for epoch in range(done, 5):
        sampler.set_epoch(epoch)  # another order in each epoch
        survive.seed(0, epoch, dist.get_rank())  # dropout, augmentation
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(model(x), y)  # your loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(x)
        dist.all_reduce(loss_sum)  # the sum over all processes: each must call this
        survive.log(f"epoch {epoch}: loss {loss_sum / len(dataset):.4f}")
        snapshot.save(step=epoch + 1)


if __name__ == "__main__":
    main()
    # Part 6: leave. This frees DDP, and closes the connections.
    survive.leave(finished=True)
