"""Each batch of a loader's worker holds a file open: the limit of open files ends the training.

    python pitfalls/too_many_open_files.py
    python pitfalls/too_many_open_files.py --fixed

You see a loader whose worker sends 100 batches, which the script keeps, as one keeps outputs for a
metric. A batch travels in shared memory, and on Linux its tensors are passed on as open files. Here
a process may have 64 of them.

Recognise it: "Too many open files" or "received 0 items of ancdata", after some hundred batches, or
with more workers, and `ulimit -n` prints a small number (often 1024).
Cure: ulimit -n 65536, before the job is started. Or send names in place of open files, as here. (If
a process is killed, its shared memory stays then until the machine starts anew.) Or do not keep
what the workers send: batch.clone() lets go of the file.
"""

import argparse
import resource

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset


def broken():
    pass  # the mistake: Linux's default, "file_descriptor", where the limit is low


def fixed():
    mp.set_sharing_strategy("file_system")  # the cure: also in the workers, which are forked


def main(cure):
    (fixed if cure else broken)()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    dataset = TensorDataset(torch.arange(400.0))
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    kept, error = [], None
    try:
        for [batch] in loader:
            kept.append(batch)
    except (OSError, RuntimeError) as caught:
        error = str(caught).strip().splitlines()[-1]
    found, total = len(kept), sum(batch.sum().item() for batch in kept)
    kept.clear()  # closes the files
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    if (error is None) != cure or cure and total != 399 * 400 / 2:
        raise RuntimeError(f"{found} batches, {error}")
    print(
        f"cured: all {found} batches have come"
        if cure
        else f"after {found} of 100 batches\nsymptom: {error}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
