"""How do I compute a metric that is no mean (AUC, F1, median) over all ranks?

    cpus = dist.new_group(backend="gloo")  # once, on all ranks; NCCL would gather on each GPU
    shares = [None] * dist.get_world_size()
    own = [column.cpu().clone() for column in (scores, labels)]  # the ranks' sizes may differ
    dist.all_gather_object(shares, own, group=cpus)
    scores, labels = (torch.cat(column) for column in zip(*shares, strict=True))
    value = metric(scores, labels)  # of all rows, on every rank

Each rank (process) evaluates its own share of the rows. A mean, such as the accuracy or the loss,
comes from sums: add them up over the ranks, and divide once. F1 comes from three counts in the same
way. AUC and median need all rows in one place: gather their scores and labels.

    torchrun --standalone --nproc-per-node=2 recipes/metrics.py

    [rank 0/2] 1001 rows, in shares of 600 and 401
    [rank 0/2] metric    one process   over all ranks   mean of the ranks' metrics
    [rank 0/2] AUC            0.7707           0.7707   0.8105
    [rank 0/2] median         0.6615           0.6615   0.6694
    [rank 0/2] F1             0.3798           0.3798   0.4108
    [rank 0/2] over all ranks: exactly the metric of one process, in all three cases

The last column is the common mistake: each rank computes the metric of its share, and the results
are averaged. Nothing fails, but the number is wrong, and it changes with the number of ranks.
The AUC, for example, compares each positive row with each negative row; a rank sees only the pairs
within its share. DistributedSampler repeats rows to make the shares equal: for an evaluation, give
each rank every world_size-th row instead (pitfalls/padded_evaluation.py).

Now write it yourself: exercises/10_evaluate_exactly.py.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def metric_of_all_rows(metric, scores, labels, cpus=None):
    """The right way for any metric: the lines above.

    scores, labels: this rank's rows, tensors of equal length. The ranks' rows come in rank order.
    cpus: a group of Gloo. With NCCL's, each GPU needs memory for the largest share times the ranks.
    """
    shares = [None] * dist.get_world_size()
    # all_gather() takes equal shapes only. cpu(): a tensor on GPU 1 arrives on GPU 1, on every
    # rank, although that GPU is rank 1's. clone(): a slice would take the whole tensor along.
    own = [column.cpu().clone() for column in (scores, labels)]
    dist.all_gather_object(shares, own, group=cpus)  # for rank 0 alone: gather_object
    scores, labels = (torch.cat(column) for column in zip(*shares, strict=True))
    value = metric(scores, labels)
    return value


def f1_from_sums(scores, labels):
    """The right way for a metric of sums: three numbers travel, however many rows there are."""
    counts = count_hits(scores, labels)
    dist.all_reduce(counts)  # adds them up over the ranks, in place
    return f1_of(counts)


def mean_of_metrics(metric, scores, labels):
    """Wrong: the metric of each share, averaged."""
    value = torch.tensor(metric(scores, labels))
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


# Your metrics. These are small and plain; those of a library take the gathered rows just as well.


def auc(scores, labels):
    """How often a positive row has a higher score than a negative one; a tie counts half."""
    difference = scores[labels == 1][:, None] - scores[labels == 0]
    return ((difference > 0).double() + (difference == 0).double() / 2).mean().item()


def median(scores, labels):
    return scores.median().item()


def f1(scores, labels):
    return f1_of(count_hits(scores, labels))


def count_hits(scores, labels):
    """Return three counts: true positives, false positives, false negatives."""
    found, positive = scores > 1, labels == 1
    return torch.stack(
        [(found & positive).sum(), (found & ~positive).sum(), (~found & positive).sum()]
    )


def f1_of(counts):
    true_positives, false_positives, false_negatives = counts.double()
    return (2 * true_positives / (2 * true_positives + false_positives + false_negatives)).item()


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit(f"start it with: torchrun --standalone --nproc-per-node=2 {__file__}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compare_metrics()
    dist.destroy_process_group()


def compare_metrics():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    all_scores, all_labels = make_scores()
    first, rest = 600, len(all_scores) - 600  # rank 0 has more rows
    sizes = [first] + [len(part) for part in torch.arange(rest).tensor_split(world_size - 1)]
    scores = all_scores.split(sizes)[rank]
    labels = all_labels.split(sizes)[rank]
    log(f"{len(all_scores)} rows, in shares of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}")
    log("metric    one process   over all ranks   mean of the ranks' metrics")
    for name, metric, over_all_ranks in [
        ("AUC", auc, lambda: metric_of_all_rows(auc, scores, labels)),
        ("median", median, lambda: metric_of_all_rows(median, scores, labels)),
        ("F1", f1, lambda: f1_from_sums(scores, labels)),
    ]:
        expected = metric(all_scores, all_labels)
        found, wrong = over_all_ranks(), mean_of_metrics(metric, scores, labels)
        log(f"{name:<6} {expected:>14.4f} {found:>16.4f}   {wrong:.4f}")
        if found != expected:  # no rounding: the same rows in the same order, or whole numbers
            raise RuntimeError(f"{name} over all ranks: {found}, in one process: {expected}")
        if abs(wrong - expected) < 0.001:  # nan, if a share has no positive row, is wrong as well
            raise RuntimeError(f"the mean of the ranks' {name} is right here: {wrong}")
    log("over all ranks: exactly the metric of one process, in all three cases")


def make_scores():
    """Return the scores and labels of all rows. The last 400 rows have higher scores."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(1001, generator=generator) < 0.1).long()
    scores = torch.rand(1001, generator=generator) + 0.4 * labels
    return scores + 0.3 * (torch.arange(1001) > 600), labels


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
