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


# ---- everything gathered: bytes were sent for a mean ----
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
