"""The wrapper's state_dict() saved: all names begin with "module.", and load nowhere else.

    torchrun --standalone --nproc-per-node=2 pitfalls/keys_with_module.py
    torchrun --standalone --nproc-per-node=2 pitfalls/keys_with_module.py --fixed

You see trained weights that a plain model does not take. DDP holds the model as its part "module",
so the wrapper's state_dict() puts that in front of each name. The quick cure, strict=False, is
worse: it skips every name that does not fit, all of them, and the model stays untrained.

Recognise it: 'Missing key(s) in state_dict: "weight"' together with 'Unexpected key(s) in
state_dict: "module.weight"', or a loaded model that guesses. torch.compile(model) does the same
with "_orig_mod.".
Cure: save model.module.state_dict(). If torch.compile() wraps the model, too, inside or outside of
DDP: get_model_state_dict(model), from torch.distributed.checkpoint.state_dict, knows all wrappers.
If a file has the prefix already, torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(
state, "module.") changes state in place. Without a reason, do not use strict=False; with one, look
at the names that load_state_dict() returns.
"""

import argparse
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by DDP, it would keep the group open to the end
from torch.nn.parallel import DistributedDataParallel as DDP


def broken(model):
    return model.state_dict()  # the mistake: the wrapper's names


def fixed(model):
    return model.module.state_dict()  # the cure: the model's own names


def main(cure):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    model = DDP(torch.nn.Linear(1, 1, bias=False))
    model.module.weight.data.fill_(7)  # stands for training
    state = (fixed if cure else broken)(model)
    plain, fits = torch.nn.Linear(1, 1, bias=False), True
    plain.weight.data.fill_(0)  # its untrained weight
    try:
        plain.load_state_dict(state)
    except RuntimeError as error:
        fits = False
        for line in str(error).splitlines()[1:]:
            log(line.strip())
        plain.load_state_dict(state, strict=False)
    expected = 7 if cure else 0
    if fits != cure or plain.weight.item() != expected:
        raise RuntimeError(f"weight {plain.weight.item()}")
    how = "loaded" if cure else "loaded with strict=False, without an error"
    log(f"{'cured' if cure else 'symptom'}: {how}: the weight is {expected}, trained was 7")
    del model
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    main(args.fixed)
