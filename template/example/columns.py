"""A model with a state that goes on from batch to batch: each rank has that of its own columns.

    PYTHONPATH=template torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
        template/example/columns.py

An LSTM sees a text in windows of 6 bits, and learns the bit of 2 places ago. For the first two of a
window, it needs its state of the window before. Truncated backpropagation, SGD by hand, and a
learning rate that is a plain number.

Other states of each rank's own:
- A replay memory is one tensor on each rank, a row for each transition. Save
  memory=survive.gathered(rows). After load, a rank takes
  torch.cat(now["memory"]).tensor_split(world_size)[rank].
- Of environments, save one list of all, sum(survive.gathered(mine), []): of each its state,
  generator, count of steps and last observation. A rank takes its part.
- Of a place in a stream, rank r takes entry r, or begins anew.
"""

import math

import survive
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel as DDP

COLUMNS, WINDOW, WINDOWS, BACK, WIDTH = 10, 6, 50, 2, 12
EPOCHS, SAVE_EVERY = 6, 20


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, bits, state):
        """bits (columns, WINDOW), state (2, columns, WIDTH) -> logits like bits, the next state."""
        found, (h, c) = self.lstm(bits.unsqueeze(2), (state[:1], state[1:]))
        return self.head(found).squeeze(2), torch.cat([h, c])


def main():
    device = survive.start()
    survive.leave(train(device))


def train(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > COLUMNS:
        survive.stop(f"start at most {COLUMNS} ranks, one for each column")
    survive.seed(0)
    text = torch.randint(2, (COLUMNS, WINDOW * WINDOWS), device=device).float()
    # A rank has the same columns in every step: neighbours, from first to last - 1.
    first, last = COLUMNS * rank // world_size, COLUMNS * (rank + 1) // world_size
    model = Reader().to(device)
    snapshot = survive.Snapshot("columns.pt", f"{COLUMNS} columns", model=model)
    now = snapshot.load(
        step=0, rate=3.0, total=0.0, best=math.inf, state=torch.zeros(2, COLUMNS, WIDTH)
    )
    step, rate, total, best = now["step"], now["rate"], now["total"], now["best"]
    state = now["state"][:, first:last].to(device)  # my part, on any number of ranks
    ddp = DDP(model)
    with survive.settled(ddp):
        ddp(text[:2, :WINDOW], state.new_zeros(2, 2, WIDTH))[0].sum().backward()
    asked_to_leave = survive.leave_on_sigterm()
    while step < EPOCHS * WINDOWS:
        begin = step % WINDOWS * WINDOW
        if begin == 0:
            state = torch.zeros_like(state)
        seen = text[first:last, begin : begin + WINDOW]
        truth = text.roll(BACK, 1)[first:last, begin : begin + WINDOW]
        logits, state = ddp(seen, state.detach())
        loss = binary_cross_entropy_with_logits(logits, truth)
        # DDP takes the mean over the ranks, and some may have a column more.
        loss = loss * (last - first) * world_size / COLUMNS
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weights in model.parameters():
                weights -= rate * weights.grad
        step += 1
        dist.all_reduce(loss := loss.detach())
        total += loss.item() / world_size
        if step % WINDOWS == 0:
            survive.log(f"step {step}: loss {total / WINDOWS:.6f}, rate {rate:g}")
            rate = rate if total < best else rate / 4  # alike on all ranks, as total is
            total, best = 0.0, min(best, total)
        leaving = asked_to_leave() and step < EPOCHS * WINDOWS
        if leaving or step % SAVE_EVERY == 0:
            # What each rank has of its own: all ranks gather it, so that it is alike on all.
            whole = torch.cat(survive.gathered(state.detach().cpu()), dim=1)
            snapshot.save(step=step, rate=rate, total=total, best=best, state=whole)
        if leaving:
            return False
    return True


if __name__ == "__main__":
    main()
