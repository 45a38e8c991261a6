import torch
import torch.distributed as dist


def train(model, batches, lr, decay):
    # A rank without labels left the round by "continue", and with it all_gather and all_reduce. So
    # it made its calls one round too early for the others, and at the end one round too few: it
    # stood in the last all_reduce, and they in the loop. (Where they wait is not where the mistake
    # is.) Now it takes part, with zeros: the sum over no rows is 0, and its gradients are 0. What
    # decides about a call has to be alike on all ranks: counts are, as all have gathered them. DDP
    # helps a rank that has no batch at all in the same way: see torch.distributed.algorithms.Join.
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())
        if sum(counts) == 0:
            continue  # on all ranks: weight decay would change the weights without any label
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
