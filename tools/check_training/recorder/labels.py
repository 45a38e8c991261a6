"""Labels of the items of a batch, for Progress.labels: is a set sorted by them?"""

import torch

from .fingerprints import readable, tensors_in


def are_looked_at(place):
    """Return whether to look at the labels of a batch. place: its number in the pass, from 0.

    If a set is sorted by its labels, the first one may fill many batches.
    """
    return place < 32 or (place < 1024 and place % 16 == 0)


def look_at(known, batch, first):
    """Add to the labels of a KnownPass, if the batch has some. first: its first tensor.

    Numbers that are all different may be names of the items.
    """
    found, has_names = [], False
    for tensor in tensors_in(batch):
        if tensor.shape != first.shape[:1] or tensor.dtype not in (torch.int64, torch.int32):
            continue
        if not readable(tensor):
            continue
        kinds = len(tensor.unique())
        if kinds == 1:
            found.append(tensor[0].item())
            known.sizes_as_labels += found[-1] in first.shape[1:]
        elif 1 < kinds < len(tensor):
            found.append(None)
        has_names = has_names or 1 < kinds == len(tensor)
    if found or has_names:
        known.labels.append(None if None in found or not found else found[0])
