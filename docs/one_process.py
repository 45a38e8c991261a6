"""One process trains a model: python docs/one_process.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main():
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    torch.manual_seed(0)
    inputs = torch.randn(1024, 10)
    dataset = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))  # your data
    sampler = RandomSampler(dataset, generator=torch.Generator())  # shuffle=True, seeded
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1))  # your model
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(5):
        sampler.generator.manual_seed(epoch)  # another order in each epoch
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(model(x), y)  # your loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(x)
        print(f"epoch {epoch}: loss {loss_sum / len(dataset):.4f}")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
