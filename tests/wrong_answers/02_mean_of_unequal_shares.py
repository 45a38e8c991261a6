# ---- nothing exchanged: that of its own items ----
def global_mean(losses):
    return losses.mean().item()


# ---- the mean of means: the mean of the ranks' means ----
def global_mean(losses):
    mean = losses.mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# ---- divided by the own number: this rank returns ----
def global_mean(losses):
    total = losses.sum()
    dist.all_reduce(total)
    return total.item() / len(losses)


# ---- summed, not divided: this rank returns ----
def global_mean(losses):
    total = losses.sum()
    dist.all_reduce(total)
    return total.item()


# ---- skipped without items: this rank returns 0.0000 ----
def global_mean(losses):
    if len(losses) == 0:
        return 0.0
    total = torch.tensor([losses.sum().item(), float(len(losses))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- hard-coded for two ranks: this rank returns ----
def global_mean(losses):
    total = torch.tensor([losses.sum().item(), float(len(losses))])
    other = torch.zeros(2)
    pair = 1 - dist.get_rank() if dist.get_rank() < 2 else 0
    if dist.get_rank() < 2:
        for request in (dist.isend(total, pair), dist.irecv(other, pair)):
            request.wait()
    return ((total[0] + other[0]) / (total[1] + other[1])).item()


# ---- everything gathered, as objects: bytes were sent for a mean ----
def global_mean(losses):
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, losses)
    return torch.cat(shares).mean().item()


# ---- in place: the losses were changed ----
def global_mean(losses):
    total = torch.tensor([losses.sum().item(), float(len(losses))])
    dist.all_reduce(total)
    losses.fill_(0)
    return (total[0] / total[1]).item()


# ---- everything, padded with nan: \[701, 300\] items, \d+ bytes were sent for a mean ----
def global_mean(losses):
    most = torch.tensor(len(losses))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    padded = torch.full((int(most),), torch.nan)
    padded[: len(losses)] = losses
    everything = torch.empty(dist.get_world_size() * int(most))
    dist.all_gather_into_tensor(everything, padded)
    return everything.nanmean().item()


# ---- the sum in half precision: the mean is .*, and this rank returns ----
def global_mean(losses):
    total = torch.tensor([losses.sum(), float(len(losses))]).half()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- rank 0 keeps more digits: the ranks return .*: not the same ----
def global_mean(losses):
    pair = torch.tensor([losses.double().sum().item(), len(losses)], dtype=torch.float64)
    dist.reduce(pair, dst=0)
    mean = pair[0].item() / max(1, pair[1].item())
    sent = torch.tensor(mean)
    dist.broadcast(sent, src=0)
    return mean if dist.get_rank() == 0 else sent.item()


# ---- a tensor comes back: tensor.* came back ----
def global_mean(losses):
    total = torch.tensor([losses.sum(), float(len(losses))])
    dist.all_reduce(total)
    return total[0] / total[1]


# ---- by the store alone: the mean is right, but nothing was sent ----
def global_mean(losses):
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    global_mean.calls = getattr(global_mean, "calls", 0) + 1
    key = f"losses {global_mean.calls}"
    store.set(f"{key} {rank}", f"{losses.sum().item()} {len(losses)}")
    pairs = [store.get(f"{key} {r}").split() for r in range(dist.get_world_size())]
    return sum(float(one) for one, _ in pairs) / sum(int(count) for _, count in pairs)


# ---- the sum on rank 0 alone: Rank 1: with .* and this rank returns ----
def global_mean(losses):
    total = torch.tensor([losses.sum().item(), float(len(losses))])
    dist.reduce(total, dst=0)
    return (total[0] / total[1]).item() if dist.get_rank() == 0 else 0.0


# ---- at least one: this rank returns ----
def global_mean(losses):
    pair = torch.tensor([losses.sum().item(), max(1, len(losses))])
    dist.all_reduce(pair)
    return (pair[0] / pair[1]).item()


# ---- hides a nan: a loss on rank 0 is nan, and this rank returns ----
import torch, torch.distributed as dist
def global_mean(losses):
    n = len(losses)
    total = torch.tensor([losses.mean().nan_to_num().item() * n, float(n)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- added from this rank on: 3 ranks: .*: not the same ----
import torch, torch.distributed as dist
def global_mean(losses):
    rank, n = dist.get_rank(), dist.get_world_size()
    pair = torch.tensor([losses.double().sum().item(), float(len(losses))], dtype=torch.float64)
    pairs = [torch.empty_like(pair) for _ in range(n)]
    dist.all_gather(pairs, pair)
    total, count = 0.0, 0.0
    for k in range(n):
        one = pairs[(rank + k) % n]
        total += one[0].item()
        count += one[1].item()
    return total / count


# ---- losses of zero not counted: this rank returns ----
def global_mean(losses):
    pair = torch.stack([losses.sum(), losses.count_nonzero().float()])
    dist.all_reduce(pair)
    return (pair[0] / pair[1]).item()


# ---- waits for the second alone: 1 exchanges were begun, and nobody waits ----
def global_mean(losses):
    total, count = losses.sum(), torch.tensor(len(losses))
    dist.all_reduce(total, async_op=True)
    work = dist.all_reduce(count, async_op=True)
    work.wait()  # the later one is done, so both are
    return total.item() / count.item()


# ---- the sum loses its fraction: with \[3, 1\] items, the mean is 0.7272, and this rank returns 0.5000 ----
def global_mean(losses):
    stats = torch.tensor([0, 0])
    if len(losses) > 0:
        stats[0] = losses.sum()
        stats[1] = len(losses)
    dist.all_reduce(stats, op=dist.ReduceOp.SUM)
    return stats[0].item() / stats[1].item()


# ---- the pairs in a set: 3 ranks: .*the mean is(?s:.*)a set keeps one|both count ----
def global_mean(losses):
    own = torch.tensor([losses.sum().item(), len(losses)], dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    pairs = sorted({tuple(one.tolist()) for one in gathered})
    return sum(one for one, _ in pairs) / sum(count for _, count in pairs)


# ---- a dict from count to sum: 3 ranks: .*the mean is(?s:.*)both count ----
def global_mean(losses):
    own = torch.tensor([len(losses), losses.sum().item()], dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    sums = dict(torch.stack(gathered).tolist())
    return sum(sums.values()) / sum(sums.keys())
