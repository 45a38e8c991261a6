"""How do I compute a metric that is no mean (AUC, F1, median) over all ranks?

    shares = [None] * dist.get_world_size()
    own = [column.cpu().clone() for column in (scores, labels)]  # the ranks' sizes may differ
    dist.all_gather_object(shares, own)
    scores, labels = (torch.cat(column) for column in zip(*shares, strict=True))
    value = auc(scores, labels)  # the metric of all rows, on every rank

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

Now write it yourself: exercises/09_evaluate_exactly.py.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def gather_rows(*columns):
    """Return each column with the rows of all ranks, in rank order, on the CPU of every rank."""
    shares = [None] * dist.get_world_size()
    # The objects may differ in size; all_gather() takes equal shapes only. cpu(): a tensor on
    # GPU 1 arrives on GPU 1, on every rank, although that GPU belongs to rank 1. clone(): a slice
    # of a tensor would take the whole tensor along.
    dist.all_gather_object(shares, [column.cpu().clone() for column in columns])
    return [torch.cat(column) for column in zip(*shares, strict=True)]


def metric_of_all_rows(metric, scores, labels):
    """The right way for any metric. If rank 0 alone needs it: dist.gather_object sends less."""
    return metric(*gather_rows(scores, labels))


def f1_from_sums(scores, labels):
    """The right way for a metric of sums: three numbers travel, however many rows there are."""
    counts = count_hits(scores, labels)
    dist.all_reduce(counts)  # adds them up over the ranks, in place
    return f1_of(counts)


def mean_of_metrics(metric, scores, labels):
    """Wrong: the metric of each share, averaged."""
    value = torch.tensor(metric(scores, labels), device=scores.device)
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
    return torch.stack([(found & positive).sum(), (found & ~positive).sum(),
                        (~found & positive).sum()])


def f1_of(counts):
    true_positives, false_positives, false_negatives = counts.double().cpu()
    return (2 * true_positives / (2 * true_positives + false_positives + false_negatives)).item()


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    compare_metrics(device)
    dist.destroy_process_group()


def compare_metrics(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    all_scores, all_labels = make_scores()
    first, rest = 600, len(all_scores) - 600  # rank 0 has more rows
    sizes = [first] + [len(part) for part in torch.arange(rest).tensor_split(world_size - 1)]
    scores = all_scores.split(sizes)[rank].to(device)  # on a GPU, your model leaves them there
    labels = all_labels.split(sizes)[rank].to(device)
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


# ---- Helpers that are no part of the lesson ----


def pick_device(local_rank):
    """Return (device, backend): a GPU for each process and its backend, or the CPU and Gloo."""
    kind = torch.accelerator.current_accelerator()  # cuda (ROCm's name, too), xpu, mps, or None
    if count_gpus():
        torch.accelerator.set_device_index(local_rank)  # else each process takes memory on GPU 0
        return torch.device(kind.type, local_rank), dist.get_default_backend_for_device(kind)
    why = ""
    if torch.accelerator.is_available():
        why = f"no backend exchanges tensors of {kind.type}"
    elif torch.cuda.device_count():  # the driver counts GPUs, but torch has none
        why = f"torch cannot use its GPU: is the driver too old for CUDA {torch.version.cuda}?"
    if why and local_rank == 0:
        print(f"note: this machine takes the CPU: {why}\n", end="", flush=True)
    return torch.device("cpu"), "gloo"


def count_gpus():
    """Return how many GPUs, or other accelerators, the ranks on this machine can use."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    # For Apple's GPUs (mps) torch names Gloo, but Gloo exchanges tensors on the CPU alone.
    carried = kind and dist.Backend.default_device_backend_map.get(kind.type, "gloo") != "gloo"
    return torch.accelerator.device_count() if carried else 0


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    """Stop if the way of starting cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
