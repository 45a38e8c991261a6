"""One mistake at a time, in 06, for test_06_model_parallel_ddp.py."""

import torch

OTHER_RESULT = "the unsplit model trains to other weights"

# {what is wrong: (mode, a statement, what stands in its place, the error's message)}
BROKEN = {
    "same share": (
        "devices",
        "batch[replica::replicas]",
        "batch[: len(batch) // replicas]",
        OTHER_RESULT,
    ),
    "sums for means": (
        "pipeline",
        "loss_fn=cross_entropy",
        "loss_fn=cross_entropy, scale_grads=False",
        OTHER_RESULT,
    ),
    "no DDP": (
        "devices",
        "    model = DDP(split, gradient_as_bucket_view=True)",
        "    model = split",
        "the replicas differ",
    ),
}
if torch.__version__ >= "2.12":  # torch 2.11 has no such fault
    BROKEN["not settled"] = (
        "pipeline",
        "        model(torch.zeros(2, WIDTH, device=device)).sum().backward()",
        "        pass",
        "rebuilt parameter indices size is not",
    )
