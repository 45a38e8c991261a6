"""Which weights do I save for use without the ranks?

    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # model: DDP
    averaged.update_parameters(model.module)  # on every rank, after each optimizer.step()
    if dist.get_rank() == 0:
        torch.save(averaged.module.state_dict(), path)  # without averaging: model.module

Those of the plain model, without its wrappers. DistributedDataParallel (DDP), torch.compile and
AveragedModel each put a prefix in front of all names. AveragedModel keeps an average over the last
steps (EMA). All ranks (processes) have the same weights after each step, and so the same average.

    torchrun --standalone --nproc-per-node=2 recipes/weights_to_serve.py

    [rank 0/2] averaged weights: the same on 2 ranks, bit for bit, without an exchange
    [rank 0/2] DDP(model)                  saves module.0.weight
    [rank 0/2] torch.compile(DDP(model))   saves _orig_mod.module.0.weight
    [rank 0/2] AveragedModel(model.module) saves module.0.weight
    [rank 0/2] averaged.module             saves 0.weight
    [rank 0/2] averaged.module, loaded by the plain model:   outputs differ by 0.0e+00
    [rank 0/2] DDP(model), loaded by the plain model:        Missing key(s): "0.weight", ...
    [rank 0/2] DDP(model), loaded with strict=False:         outputs differ by 1.0e+00
    [rank 0/2] DDP(model), loaded without its prefix:        outputs differ by 0.0e+00

A file with the names of DDP does not fit the plain model, and load_state_dict() says so. With its
option strict=False, it loads only the names that fit: here none. The model keeps its random start.
Take the prefixes off instead. If you compile the model in place, with model.compile() before
DDP(model), torch.compile adds no prefix. With model = torch.compile(DDP(plain)), model.module is
the plain model, too.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # else DDP imports it later, which keeps the group alive to the end
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BACKEND = "eager"  # needs no C++ compiler, and speeds up nothing; leave it out for the default one
STEPS = 5


def train(model, device):
    """Train a DDP model; return the average of its weights, which is the same on every rank."""
    # 0.9 for 5 steps; 0.999 or more for a real training. AveragedModel copies the plain model.
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has samples of its own
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(torch.randn(16, 8).to(device)) - 1).square().mean().backward()
        optimizer.step()  # the same step on every rank: DDP has averaged the gradients
        averaged.update_parameters(model.module)
    return averaged


def save_plain(averaged, path):
    """The right way: .module is the plain model. For the latest weights: model.module (of DDP)."""
    # One rank saves: all would write the same weights. (BatchNorm's running means can differ.)
    if dist.get_rank() == 0:
        torch.save(averaged.module.state_dict(), path)


def save_with_wrapper(model, path):
    """Wrong: the names in the file have a prefix for each wrapper."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)


def load_plain(path):
    """What a single process does with the file: it has no ranks, and needs none of the wrappers."""
    model = new_net()
    model.load_state_dict(torch.load(path, map_location="cpu"))  # strict: all names must fit
    return model.eval()


def load_what_fits(path):
    """Wrong: strict=False passes over all names that do not fit. Here none fits."""
    model = new_net()
    model.load_state_dict(torch.load(path, map_location="cpu"), strict=False)
    return model.eval()


def load_without_prefix(path):
    """Mends a file saved from DDP, torch.compile, or both, in either order."""
    state, model = torch.load(path, map_location="cpu"), new_net()
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):
        consume_prefix_in_state_dict_if_present(state, prefix)
    model.load_state_dict(state)
    return model.eval()


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if backend == "nccl" else None)
    with tempfile.TemporaryDirectory() as folder:
        train_and_serve(device, folder)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def train_and_serve(device, folder):
    torch.manual_seed(0)
    plain = new_net().to(device)
    plain.compile(backend=BACKEND)  # in place, and before DDP: it adds nothing to the names
    model = DDP(plain)
    averaged = train(model, device)
    weights = gathered([p.tolist() for p in averaged.parameters()])
    if weights.count(weights[0]) != len(weights):
        raise RuntimeError("the averaged weights differ between the ranks")
    log(f"averaged weights: the same on {len(weights)} ranks, bit for bit, without an exchange")
    show_names({"DDP(model)": model,
                "torch.compile(DDP(model))": torch.compile(model, backend=BACKEND),
                "AveragedModel(model.module)": averaged, "averaged.module": averaged.module})

    right, wrong = os.path.join(folder, "right.pt"), os.path.join(folder, "wrong.pt")
    save_plain(averaged, right)
    save_with_wrapper(model, wrong)
    if dist.get_rank() == 0:
        load_and_compare(right, wrong, averaged.module, model.module, device)
    dist.barrier()  # the others wait here for rank 0


def show_names(models):
    """Log the name that the first layer's weight has in each model, and check it."""
    found = {what: next(name for name in model.state_dict() if name.endswith("0.weight"))
             for what, model in models.items()}
    for what, name in found.items():
        log(f"{what:<27} saves {name}")
    if list(found.values()) != ["module.0.weight", "_orig_mod.module.0.weight", "module.0.weight",
                                "0.weight"]:
        raise RuntimeError("the names are not those that this file shows")


def load_and_compare(right, wrong, averaged, latest, device):
    inputs = torch.randn(4, 8).to(device)

    def difference(loaded, trained):
        return (loaded.to(device)(inputs) - trained.eval()(inputs)).abs().max().item()

    off = difference(load_plain(right), averaged)
    log(f"averaged.module, loaded by the plain model:   outputs differ by {off:.1e}")
    try:
        load_plain(wrong)
        error = "no error"
    except RuntimeError as caught:
        error = str(caught).splitlines()[1].strip().replace(" in state_dict", "").partition(",")[0]
    log(f"DDP(model), loaded by the plain model:        {error}, ...")
    nothing = difference(load_what_fits(wrong), latest)
    log(f"DDP(model), loaded with strict=False:         outputs differ by {nothing:.1e}")
    mended = difference(load_without_prefix(wrong), latest)
    log(f"DDP(model), loaded without its prefix:        outputs differ by {mended:.1e}")
    if not off == mended == 0:
        raise RuntimeError("the loaded model is not the trained one")
    if not (error == 'Missing key(s): "0.weight"' and nothing > 0.01):
        raise RuntimeError("the mistakes do not show what this file says")


def new_net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


# ---- Helpers that are no part of the lesson ----


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def pick_device(local_rank):
    """Return (device, backend): for each process a GPU and NCCL, or the CPU and Gloo."""
    if not torch.cuda.is_available():
        if torch.cuda.device_count() and local_rank == 0:  # the driver counts GPUs, torch has none
            print("note: torch cannot use the GPU of this machine, and takes the CPU: is its driver"
                  f" too old for CUDA {torch.version.cuda}?\n", end="", flush=True)
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)  # otherwise every process also takes memory on GPU 0
    torch.backends.cudnn.allow_tf32 = False  # TF32 is too coarse to compare runs
    return torch.device("cuda", local_rank), "nccl"


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
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
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node=gpu, or the CPU"
             " with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
