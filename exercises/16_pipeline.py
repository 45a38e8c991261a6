"""A pipeline: each rank has some of the layers, and all of them work at the same time.

Cut a model between its layers: what a rank has is a stage. Rank 0 has the first layers, the last
rank has the last ones and computes the loss. Outputs go from each rank to the next, and their
gradients come back. If the batch went through in one piece, one rank would work and all others
wait. So cut the batch into micro-batches: while rank 1 computes the first of them, rank 0 computes
the second. Add up their gradients: then the step is that of one process with the whole batch.
Write train_step.

    rank 0   F0 F1 F2 F3             B0 B1 B2 B3       F: forward, B: backward,
    rank 1      F0 F1 F2 F3       B0 B1 B2 B3          0 to 3: the number of the micro-batch.
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3             The check draws your own order so.

The idea is that of Y. Huang et al., GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism, 2019.

Read before: 04_collectives.py, the sections send_recv and isend_irecv. 06_model_parallel_ddp.py
lets torch do it, in train_pipeline.

    python exercises/16_pipeline.py
"""

import torch
import torch.distributed as dist


def train_step(stage, inputs, targets, micro_batches):
    """Compute the gradients of one batch; on the last rank, return the loss, a float, else None.

    stage: this rank's layers, a module. What it returns has the shape and dtype of what it takes.
    Call it once with each micro-batch. Its parameters have no gradients yet (None). Afterwards they
    have those of torch.nn.functional.mse_loss(outputs, targets), the mean over the batch. The last
    rank returns this mean. The weights stay as they are.
    inputs, targets: (rows, width). Only rank 0 has the inputs, and only the last rank the targets.
    On the others they have the same shape and dtype, but all numbers are NaN.
    micro_batches: into how many equal parts to cut the rows, 2 or more. They can be cut so.

    Rank r talks to ranks r - 1 and r + 1 alone, by dist.send and dist.recv, or isend and irecv.
    wait() for what those two return. Send each output and each gradient once, and soon: when a pass
    begins, at most one output and one gradient wait for their send or isend.
    Choose an order that leaves no more gaps than the picture above. If all passes took equally
    long, and sending took no time, then all would end after 2 (micro_batches + N - 1) passes' time.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
