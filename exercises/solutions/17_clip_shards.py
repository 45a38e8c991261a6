import math

import torch
import torch.distributed as dist


@torch.no_grad()
def clip_by_norm(parameters, max_norm):
    # Norms do not add up, but their squares do. So one number for each rank is enough, and a rank
    # without gradients makes the same call with a 0. A nan or an infinite number goes through the
    # sum: each rank sees it, and none needs a second exchange to tell the others.
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in gradients]
    square = sum((norm.double() ** 2 for norm in norms), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(square)
    norm = square.sqrt().item()
    # All ranks decide by the same number, so they decide alike. Without the look at it, an infinite
    # norm would make a factor of 0, and 0 times infinity is nan. (torch's clip_grad_norm_ does not
    # look: you do, before optimizer.step().)
    if math.isfinite(norm):
        factor = min(1, max_norm / (norm + 1e-6))
        for one in gradients:
            one *= factor
    return norm


# With FSDP2, gradients are DTensors: clip_grad_norm_ returns one, which keeps each rank's own part
# of the norm. norm.full_tensor() makes the exchange. It takes the norm of a bfloat16 gradient in
# bfloat16. With experts or stages: clip_with_experts in recipes/expert_parallel.py.
