import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss


def train_step(stage, inputs, targets, micro_batches):
    # GPipe's order: no two neighbours ever send to each other at once, so plain send and recv
    # cannot hang. All micro-batches' activations are kept at the same time. 1F1B (one forward, one
    # backward, in turns) keeps at most N of them, with the same idle time, but both directions are
    # then under way together: it needs isend. 06 has both, from torch.distributed.pipelining:
    # ScheduleGPipe and Schedule1F1B.
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()  # a leaf: backward stops here, and leaves x.grad to be sent
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        kept.append((x, y))
    for (x, y), target in zip(kept, targets.chunk(micro_batches), strict=True):
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = mse_loss(y, target) / micro_batches  # so that the sum is the batch's mean
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None
