"""Average the gradients: many replicas train as one model.

Each rank has the same weights, and rows of its own. So after backward() each has other gradients.
Write average_gradients: then all ranks take the step that one process would take with all rows.

Read before: 01_single_node_multi_gpu.py, which calls all_reduce. DistributedDataParallel does this
for you.

    python exercises/03_average_gradients.py

Next: 02_torchrun_elastic.py
"""

import torch
import torch.distributed as dist


def average_gradients(model):
    """Replace the gradient of each parameter, p.grad, by its mean over all ranks.

    A parameter that does not train has no gradient (None), on all ranks alike.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
