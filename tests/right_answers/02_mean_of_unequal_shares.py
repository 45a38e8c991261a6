# ---- gathered pairs ----
def global_mean(losses):
    pair = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
    pairs = torch.empty(dist.get_world_size() * 2)
    dist.all_gather_into_tensor(pairs, pair)
    total, count = pairs.view(-1, 2).sum(0).tolist()
    return total / count


# ---- to rank 0 and back ----
def global_mean(losses):
    pair = torch.tensor([losses.double().sum(), losses.numel()], dtype=torch.float64)
    dist.reduce(pair, dst=0)
    dist.broadcast(pair, src=0)
    return float(pair[0] / pair[1])


# ---- objects ----
def global_mean(losses):
    pairs = [None] * dist.get_world_size()
    dist.all_gather_object(pairs, (losses.sum().item(), len(losses)))
    return sum(total for total, _ in pairs) / sum(count for _, count in pairs)


# ---- the count first, then the mean's parts, without waiting ----
def global_mean(losses):
    count = torch.tensor(losses.numel())
    dist.all_reduce(count)
    part = (losses / count).sum()
    work = dist.all_reduce(part, async_op=True)
    work.wait()
    return part.item()


# ---- functional ----
import torch.distributed._functional_collectives as functional


def global_mean(losses):
    pair = torch.tensor([losses.sum(), float(len(losses))])
    total, count = functional.all_reduce(pair, "sum", dist.group.WORLD).tolist()
    return total / count


# ---- messages to all, added up in the order of the ranks ----
def global_mean(losses):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pairs = [torch.zeros(2) for _ in range(world_size)]
    pairs[rank] = torch.tensor([losses.sum(), float(len(losses))])
    others = [r for r in range(world_size) if r != rank]
    for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, pairs[rank], r) for r in others]
            + [dist.P2POp(dist.irecv, pairs[r], r) for r in others]):
        work.wait()
    total, count = sum(pairs).tolist()
    return total / count


# ---- gather_object and broadcast_object_list ----
def global_mean(losses):
    pairs = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((losses.sum().item(), len(losses)), pairs)
    found = [pairs and sum(a for a, _ in pairs) / sum(b for _, b in pairs)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


# ---- all to all ----
def global_mean(losses):
    n = dist.get_world_size()
    mine = torch.tensor([losses.sum().item(), float(len(losses))]).repeat(n)
    out = torch.empty_like(mine)
    dist.all_to_all_single(out, mine)
    return (out[0::2].sum() / out[1::2].sum()).item()


# ---- in another thread ----
import threading


def global_mean(losses):
    pair = torch.tensor([losses.double().sum().item(), float(len(losses))], dtype=torch.float64)
    thread = threading.Thread(target=dist.all_reduce, args=(pair,))
    thread.start()
    thread.join()
    return float(pair[0]) / float(pair[1])


# ---- one complex number ----
import torch, torch.distributed as dist
def global_mean(losses):
    both = torch.tensor([complex(losses.double().sum().item(), len(losses))], dtype=torch.complex128)
    dist.all_reduce(both)
    found = both.item()
    return found.real / found.imag


# ---- a chain, and a broadcast ----
def global_mean(losses):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    pair = torch.zeros(2, dtype=torch.float64)
    if rank > 0:
        dist.recv(pair, src=rank - 1)
    pair[0] += losses.double().sum()
    pair[1] += losses.shape[0]
    if rank < last:
        dist.send(pair, dst=rank + 1)
    dist.broadcast(pair, src=last)
    return pair[0].item() / pair[1].item()
