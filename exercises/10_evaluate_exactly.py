"""Evaluate exactly: the accuracy of one process, whatever the number of ranks.

The accuracy is the share of the images that the model classifies right. The ranks evaluate
together: each takes some of the test images, and then all know the result. Two things go wrong
here. A sampler that fills up the shares to equal lengths counts some images twice. And a rank that
gets no image at all must not leave the others waiting. Write accuracy.

Read before: pitfalls/padded_evaluation.py, and 04_collectives.py, the section all_reduce. Its
neighbours are exercises 1, which shares out a set, and 2, which takes a mean over shares. With a
DDP model and a DataLoader, evaluate in 01_single_node_multi_gpu.py does this.

    python exercises/10_evaluate_exactly.py
"""

import torch
import torch.distributed as dist


def accuracy(model, images, labels, batch_size):
    """Return the accuracy of the model on all the images, as a float; the same one on each rank.

    images, shape (count, 9), and labels, shape (count,), are the whole test set, alike on all
    ranks; so is the model. count is at least 1, and may be smaller than the number of ranks.
    model(images), for some of them, returns scores of shape (n, 3); the class is the one with the
    highest score.

    Each image goes through the model once, on one of the ranks. Each rank takes about
    count / world_size images: at most batch_size more. It gives the model at most batch_size of
    them at a time. Meanwhile, the whole model is in evaluation mode (Dropout drops nothing,
    BatchNorm uses its running mean), and no graph for a backward pass is built. Afterwards, the
    model is as it was: also each part's mode. Some parts may have been in training mode, and some
    not.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from checker import main

    main(__file__)
