"""What torchvision's references keep in utils.py: the figures of a pass over a loader."""

import time
from collections import defaultdict

import torch
import torch.distributed as dist


class MetricLogger:
    """Means of named figures, weighed by the number of items."""

    def __init__(self):
        self.sums = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))  # of values, of items

    def update(self, count, **values):
        for name, value in values.items():
            self.sums[name] += torch.tensor([value * count, count])

    def mean(self, name):
        total, count = self.sums[name].tolist()
        return total / count

    def synchronize_between_processes(self):
        for sums in self.sums.values():
            dist.all_reduce(sums)

    def log_every(self, iterable, print_freq, header):
        start = time.monotonic()
        for number, each in enumerate(iterable):
            yield each
            if number % print_freq == 0 and dist.get_rank() == 0:
                figures = "  ".join(f"{name}: {self.mean(name):.4f}" for name in self.sums)
                took = (time.monotonic() - start) / (number + 1)
                print(f"{header} [{number:3}/{len(iterable)}]  {figures}  time: {took:.4f}")
