from torch.nn.functional import mse_loss


# ---- the losses not divided: is 4.00 times that of the whole batch ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target)
            loss.backward()
            total += loss.item() / micro_batches
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- divided twice: is 0.25 times that ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            (loss / micro_batches).backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- one micro-batch: the stage was called with ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in [inputs]:
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        kept.append((x, y))
    for (x, y), target in zip(kept, [targets], strict=True):
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = mse_loss(y, target)
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- gradients not sent on: has no gradient|gradients are still to be sent ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        kept.append((x, y))
    for (x, y), target in zip(kept, targets.chunk(micro_batches), strict=True):
        if rank == last:
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
    return total if rank == last else None


# ---- the arrived gradient not used: is off by ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        kept.append((x, y))
    for (x, y), target in zip(kept, targets.chunk(micro_batches), strict=True):
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.sum().backward()
        else:
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- gradients overwritten: is that of the last micro-batch alone ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        kept.append((x, y))
    for (x, y), target in zip(kept, targets.chunk(micro_batches), strict=True):
        stage.zero_grad()
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- targets of the whole batch's beginning: is off by|the loss of the batch is \d\.\d+, and this rank returns ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, targets[: len(y)]) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- the loss on all ranks: and this is not the last rank ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


# ---- hard-coded for two ranks: 3 ranks: .* is not a number ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank >= last else None


# ---- a step taken: the weights were changed ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    for p in stage.parameters():
        p.detach().sub_(0.1 * p.grad)
    return total if rank == last else None


# ---- all outputs sent at the end: when F2 begins, 2 outputs are still to be sent ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        kept.append((x, y))
    for _, y in kept:
        if rank < last:
            dist.send(y.detach(), rank + 1)
    for (x, y), target in zip(kept, targets.chunk(micro_batches), strict=True):
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- one micro-batch after the other: begins to go backward after 1 forward pass, and at least 2|your order takes 16 passes' time ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, total = dist.get_rank(), dist.get_world_size() - 1, 0.0
    for x, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- both send first: there is no end:\n    rank 0 waits in line ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept = dist.get_rank(), dist.get_world_size() - 1, []
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        kept.append((x, y))
        if rank == last:  # 1F1B's order, with calls that wait: neither of the two receives
            mse_loss(y, y.detach()).backward()
            dist.send(x.grad, rank - 1)


# ---- the sum of the losses returned: the loss of the batch is .* 4 times as much ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item() * micro_batches
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- pickled: this rank sends \d+ bytes, and its outputs have ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            arrived = [None]
            dist.recv_object_list(arrived, rank - 1)
            x = arrived[0]
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send_object_list([y.detach()], rank + 1)
        kept.append((x, y))
    for (x, y), target in zip(kept, targets.chunk(micro_batches), strict=True):
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- the loss told to all: this rank also calls broadcast, for which all ranks meet ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    told = torch.tensor(total)
    dist.broadcast(told, src=last)
    return told.item() if rank == last else None


# ---- irecv without wait: of the messages that rank 1 began, 4 had no wait ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.irecv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- isend without wait: of the messages that rank 1 began, 4 had no wait ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.isend(x.grad, rank - 1)
    return total if rank == last else None


# ---- groups: your order takes 1[26] passes' time, and 1[02] are enough ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    parts, targets, size = inputs.chunk(micro_batches), targets.chunk(micro_batches), dist.get_world_size()
    for first in range(0, micro_batches, size):
        for x in parts[first : first + size]:
            if rank > 0:
                x = torch.empty_like(x)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank < last:
                dist.send(y.detach(), rank + 1)
            kept.append((x, y))
        for (x, y), target in zip(kept[first:], targets[first:]):
            if rank < last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, rank + 1)
                y.backward(gradient)
            else:
                loss = mse_loss(y, target) / micro_batches
                loss.backward()
                total += loss.item()
            if rank > 0:
                dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- in single precision: this rank sends 240 bytes, and its outputs have 480|off by ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x).float()
            dist.recv(x, rank - 1)
            x = x.double()
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach().float(), rank + 1)
        kept.append((x, y))
    for (x, y), target in zip(kept, targets.chunk(micro_batches), strict=True):
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- the gradients kept to the end: when B2 begins, 2 gradients are still to be sent ----
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
    for x, _ in kept:
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == last else None


# ---- tells rank 0 the loss: 3 ranks: .*this rank talks to rank ----
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

# WRONG: at the end, the last rank tells rank 0 the loss (to log it): with 3 ranks, no neighbour
def train_step(stage, inputs, targets, micro_batches):
    rank, last, kept, total = dist.get_rank(), dist.get_world_size() - 1, [], 0.0
    for x in inputs.chunk(micro_batches):
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
            x.requires_grad_()
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
            loss = mse_loss(y, target) / micro_batches
            loss.backward()
            total += loss.item()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    told = torch.tensor(total)
    if rank == last:
        dist.send(told, 0)
    elif rank == 0:
        dist.recv(told, last)
        print(f"loss {told.item():.3f}")
    return total if rank == last else None
