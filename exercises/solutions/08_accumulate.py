import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss


def accumulate(model, micro_batches):
    # Sums add up over micro-batches and over ranks, whatever their sizes; means do not. The number
    # of terms is only known when all ranks have spoken. It travels with the gradients, so one
    # exchange is enough, and division comes last. A rank without micro-batches sends zeros.
    # DDP's no_sync() puts off the exchange like this. But DDP divides by the number of ranks, so
    # each loss has to be weighed beforehand: recipes/unequal_micro_batches.py.
    parameters, count = list(model.parameters()), 0
    for inputs, targets in micro_batches:
        mse_loss(model(inputs), targets, reduction="sum").backward()
        count += targets.numel()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    total = torch.cat([g.flatten() for g in gradients] + [gradients[0].new_tensor([count])])
    dist.all_reduce(total)
    mean = (total[:-1] / total[-1]).split([p.numel() for p in parameters])
    for p, one in zip(parameters, mean, strict=True):
        p.grad = one.view_as(p)
