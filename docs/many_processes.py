"""Many processes train a model: torchrun --standalone --nproc-per-node=2 docs/many_processes.py"""

import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; without it, torch 2.11 to 2.15 may abort at the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # Part 1: start. torchrun starts this file N times. Each process takes a GPU of its own.
    backend = dist.get_default_backend_for_device(device)  # NCCL connects GPUs, Gloo CPUs
    if backend == "gloo":  # a CPU; or a Mac: Gloo sends nothing from its GPU
        device = torch.device("cpu")
    else:  # LOCAL_RANK: my number on this machine, and my GPU's. Now device means that GPU
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    # Part 2: meet. Each process waits here for all others. Then they are connected.
    dist.init_process_group(backend)

    torch.manual_seed(0)
    inputs = torch.randn(1024, 10)
    dataset = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))  # your data
    # Part 3: share the data. A step takes 64 examples, as before: 64 / N on each process.
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)

    # Part 4: build the model, and wrap it. backward() now averages all processes' gradients.
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1))  # your model
    model.to(device)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    # Part 5: train. The models stay equal, so one process, rank 0, prints and saves.
    for epoch in range(5):
        sampler.set_epoch(epoch)  # another order in each epoch
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(model(x), y)  # your loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(x)
        dist.all_reduce(loss_sum)  # the sum over all processes: each must call this
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss_sum / len(dataset):.4f}")
            torch.save(model.module.state_dict(), "model.pt")  # your model, without DDP


if __name__ == "__main__":
    main()
    # Part 6: leave. Free DDP, which still holds the connections. Then close them.
    gc.collect()
    dist.destroy_process_group()
