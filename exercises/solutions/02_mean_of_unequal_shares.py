import torch
import torch.distributed as dist


def global_mean(losses):
    # Sums can be added up, means cannot. Both numbers travel in one tensor: a small exchange costs
    # its latency, whether it has one number or a hundred. A rank without items adds two zeros, and
    # makes the call all the same. 01's evaluate() counts right answers like this.
    total = torch.tensor([losses.sum().item(), float(len(losses))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
