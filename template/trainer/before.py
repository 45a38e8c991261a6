"""A Trainer calls back after every 20 steps: python template/trainer/before.py"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler

STEPS, BATCH, ACCUMULATE, EVERY = 200, 32, 2, 20


class Trainer:
    def __init__(self, model, points, device, callbacks):
        self.model, self.device, self.callbacks = model.to(device), device, callbacks
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.step = 0
        sampler = RandomSampler(points, True, 10**10)  # endless
        self.loader = DataLoader(points, BATCH, sampler=sampler, num_workers=1)

    def run(self):
        batches = iter(self.loader)
        while True:
            self.step += 1
            self.optimizer.zero_grad()
            for _ in range(ACCUMULATE):
                self.loss(next(batches)).backward()
            self.optimizer.step()
            self.averaged.update_parameters(self.model)
            if self.step % EVERY == 0:
                for callback in self.callbacks:
                    callback(self)
            if self.step >= STEPS:
                break

    def loss(self, points):
        points = points.to(self.device)
        loss = nn.functional.mse_loss(self.model(points), points.norm(dim=1, keepdim=True))
        return loss / ACCUMULATE


def main(device):
    torch.manual_seed(0)
    points = torch.randn(2048, 10)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1))
    best = float("inf")

    @torch.no_grad()
    def validate(trainer):
        nonlocal best
        rest = points[1536:].to(device)
        error = (trainer.averaged(rest) - rest.norm(dim=1, keepdim=True)).square().sum()
        if error < best:
            torch.save(trainer.averaged.module.state_dict(), "best.pt")
        best = min(best, error.item())
        print(f"step {trainer.step}: error {error:.4f}, best {best:.4f}")

    trainer = Trainer(model, points[:1536], device, [validate])
    trainer.run()
    print("best", best)


if __name__ == "__main__":
    main(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))
