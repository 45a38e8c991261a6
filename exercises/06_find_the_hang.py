"""Find the hang: a training loop that stands still on some data. Find out why, and mend it.

In a hang there is no error. Each rank waits for a call that another does not make, and that may be
far from the mistake: what you can see is where each of them waits. Here, the checker says it, after
some 8 seconds; elsewhere, py-spy does. First run this file as it is. Which ranks are still in the
loop, and which have left it? What has let them go faster? Then mend train: its docstring says what
it has to do, and is right.

Some rows have no label: nobody has looked at them yet. A rank may get a batch of such rows only.

Read before: pitfalls/README.md, what it says above the tables, and the rows under "It hangs"; and
exercise 3, for the gradients. The weight of rows is the subject of exercise 2.

    python exercises/06_find_the_hang.py
"""

import torch
import torch.distributed as dist


def train(model, batches, lr, decay):
    """Take a step for each batch in which a rank has a label. Return the mean loss, a float.

    batches: this rank's, a list of pairs: inputs, shape (n, 4), and labels, shape (n,). A row that
    has no label has nan there. The list is as long on all ranks; the batches differ in size. They
    stay as they are.

    Step k is the one that a single process would take with the k-th batches of all ranks as one
    batch. The loss is the mean of the squared errors of all its rows that have a label. From each
    parameter p, the step subtracts lr * (gradient + decay * p): that is weight decay. If no row of
    that batch has a label, there is no step, and the weights stay as they are.

    All ranks end with the same weights, bit for bit. A rank gives the model no rows of other ranks.

    The result is the mean over all rows with a label, of all steps and ranks. Each loss is taken
    before its step. All ranks return the same number.
    """
    total = torch.zeros(2, dtype=torch.float64)  # the losses, and how many
    for inputs, labels in batches:
        labelled = ~labels.isnan()
        if not labelled.any():
            continue  # nothing to learn from
        losses = (model(inputs[labelled]).squeeze(1) - labels[labelled]).square()
        counts = [torch.tensor(0) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, labelled.sum())  # how many rows of this step, on each rank
        model.zero_grad()
        (losses.sum() / sum(counts)).backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum of parts of the mean: it is the gradient of all
                p -= lr * (p.grad + decay * p)
        total += torch.stack([losses.detach().sum(), labelled.sum()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    from checker import main

    main(__file__)
