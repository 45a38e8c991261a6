"""Processes on one machine or many do it, and may be killed: see template/trainer/README.md"""

from itertools import islice

import survive
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

STEPS, BATCH, ACCUMULATE, EVERY = 200, 32, 2, 20


class Trainer:
    def __init__(self, model, points, device, callbacks, **state):
        self.model, self.device, self.callbacks = model.to(device), device, callbacks
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parts = {"model": model, "averaged": self.averaged, "optimizer": self.optimizer}
        self.snapshot = survive.Snapshot("snapshot.pt", f"{ACCUMULATE} x {BATCH}", **parts)
        # What callbacks remember: a best score, counts, a flag of an early stop, the rows of a log.
        # A number that a callback keeps for itself is lost at a restart.
        self.state = self.snapshot.load(step=0, **state)
        self.step, self.ddp = self.state.pop("step"), nn.parallel.DistributedDataParallel(model)
        with survive.settled(self.ddp):
            self.loss(points[:2]).backward()
        # Endless. Without a generator of its own, it takes its seed from what survive.seed has set
        # last: then ranks and restarts draw unlike items.
        sampler = RandomSampler(points, True, 10**10, torch.Generator().manual_seed(0))
        # All ranks draw the same batches, skip those that are done, and take a share of each.
        batches = islice(BatchSampler(sampler, BATCH, True), self.step * ACCUMULATE, None)
        shares = (batch[dist.get_rank() :: dist.get_world_size()] for batch in batches)
        fork = {"multiprocessing_context": "fork", "worker_init_fn": survive.obey_rank}
        self.loader = DataLoader(points, batch_sampler=shares, num_workers=1, **fork)

    def run(self):
        asked_to_leave, batches, leaving = survive.leave_on_sigterm(), iter(self.loader), False
        # The end is checked before a step. Behind it, each restart would train one step more.
        while self.step < STEPS and not leaving:
            self.step += 1
            survive.seed(0, self.step, dist.get_rank())  # dropout, augmentation
            self.optimizer.zero_grad()
            # Only the last batch exchanges. DDP decides that in its forward, so it stands inside.
            with self.ddp.no_sync():
                for _ in range(ACCUMULATE - 1):
                    self.loss(next(batches)).backward()
            self.loss(next(batches)).backward()
            self.optimizer.step()
            self.averaged.update_parameters(self.model)
            due = self.step % EVERY == 0 or self.step == STEPS
            # A kill before the save runs the callbacks again, with the same result.
            if due:
                for callback in self.callbacks:
                    callback(self)
            leaving = asked_to_leave()
            if leaving or due:
                self.snapshot.save(step=self.step, **self.state)
        return self.step == STEPS

    def loss(self, points):
        points = points.to(self.device)
        loss = nn.functional.mse_loss(self.ddp(points), points.norm(dim=1, keepdim=True))
        # DDP averages. If N does not divide the batch, shares differ by one: this weights them.
        return loss * len(points) * dist.get_world_size() / BATCH / ACCUMULATE


def main(device):
    torch.manual_seed(0)
    points = torch.randn(2048, 10)
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1))

    @torch.no_grad()
    def validate(trainer):
        mine = points[1536 + dist.get_rank() :: dist.get_world_size()].to(device)
        error = (trainer.averaged(mine) - mine.norm(dim=1, keepdim=True)).square().sum()
        # All ranks run a callback: add up their shares first. Then one rank of a machine writes.
        dist.all_reduce(error)
        if trainer.snapshot.writer and error < trainer.state["best"]:
            survive.save(trainer.averaged.module.state_dict(), "best.pt")
        trainer.state["best"] = min(trainer.state["best"], error.item())
        survive.log(f"step {trainer.step}: error {error:.4f}, best {trainer.state['best']:.4f}")

    trainer = Trainer(model, points[:1536], device, [validate], best=float("inf"))
    if finished := trainer.run():  # not after a SIGTERM: then the model is unfinished
        survive.log("best", trainer.state["best"], "sha256", survive.compare(model=model))
    return finished


if __name__ == "__main__":
    # main has returned, so nothing holds DDP any more when leave closes the connections.
    survive.leave(main(survive.start()))
