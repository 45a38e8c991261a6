"""Which weights do I save for use without the ranks?

    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.999),  # model: DDP
                             use_buffers=True)
    for inputs, targets in loader:
        ...  # forward, backward, optimizer.step()
        update_average(averaged, model.module)  # on every rank: update_parameters(), see below
    if rank == 0:
        torch.save(averaged.module.state_dict(), path)  # without averaging: model.module
    dist.barrier()  # nobody leaves, or loads the file, before it is written

Those of the plain model, without its wrappers. DistributedDataParallel (DDP), torch.compile and
AveragedModel each put a prefix in front of all names. AveragedModel keeps an average over the last
steps (EMA). Keep the weights in float32: in bfloat16, most of such an average stands still. All
ranks (processes) have the same weights after each step, and so the same average of them. Buffers
differ: BatchNorm's running mean is that of the rank's own data. To validate the model that rank 0
saves, give all ranks its buffers first, as share_buffers does.

    torchrun --standalone --nproc-per-node=2 recipes/weights_to_serve.py

    [rank 0/2] averaged weights: the same on 2 ranks, bit for bit, without an exchange
    [rank 0/2] averaged buffers: 2 versions on 2 ranks; after share_buffers: 1
    [rank 0/2] integers after 50 updates: 45 of 169 are wrong; with those copied: 0
    [rank 0/2] resumed with averaged.state_dict():        average off by 0.0e+00
    [rank 0/2] resumed with averaged.module.state_dict(): average off by 5.2e-02
    [rank 0/2] DDP(model)                  saves module.0.weight
    [rank 0/2] torch.compile(DDP(model))   saves _orig_mod.module.0.weight
    [rank 0/2] AveragedModel(model.module) saves module.0.weight
    [rank 0/2] averaged.module             saves 0.weight
    [rank 0/2] averaged.module, loaded by the plain model:   outputs differ by 0.0e+00
    [rank 0/2] DDP(model), loaded by the plain model:        Missing key(s): "0.weight", ...
    [rank 0/2] DDP(model), loaded with strict=False:         outputs differ by 1.1e+00
    [rank 0/2] DDP(model), loaded without its prefix:        outputs differ by 0.0e+00

A file with the names of DDP does not fit the plain model, and load_state_dict() says so. With its
option strict=False, it loads only the names that fit: here none. The model keeps its random start.
Take the prefixes off instead. model.compile() in place, before DDP(model), adds no prefix. A
snapshot to resume from is another file: put averaged.state_dict() into it. It has n_averaged, too.
Without that number, the first update makes the average anew, without an error.
"""

import copy
import gc
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, by DDP, it would hold that
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BACKEND = "eager"  # needs no C++ compiler, and speeds up nothing; leave it out for the default one
STEPS = 5


def train(model):
    """Train a DDP model; return the average of its weights, which is the same on every rank."""
    averaged = average_of(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has samples of its own
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(torch.randn(16, 8)) - 1).square().mean().backward()
        optimizer.step()  # the same step on every rank: DDP has averaged the gradients
        update_average(averaged, model.module)
    return averaged


def update_average(averaged, plain):
    """Take the weights after a step into the average. On a GPU, the CPU waits for it in here."""
    averaged.update_parameters(plain)
    # torch truncates the means of integers, so a table of indices drifts; and the mean of a mask's
    # -inf is nan. Copy these.
    for mean, latest in zip(averaged.module.buffers(), plain.buffers(), strict=True):
        mean.copy_(
            torch.where(latest.isfinite() & mean.isfinite(), mean, latest)
            if latest.is_floating_point()
            else latest
        )


def average_of(plain):
    """Return a copy of the plain model that will hold the average."""
    # 0.9 for 5 steps; 0.999 or more for a real training.
    return AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


def share_buffers(*modules):
    """Give all ranks the buffers of rank 0. Call it before a validation, for each model in use."""
    # averaged.module, not averaged: that has n_averaged, too, which is a tensor on the CPU.
    for module in modules:
        for buffer in module.buffers():
            dist.broadcast(sent := buffer.contiguous(), src=0)  # NCCL wants it so
            buffer.copy_(sent)


def save_plain(averaged, path, rank):
    """The right way: .module is the plain model. For the latest weights: model.module (of DDP)."""
    if rank == 0:
        torch.save(averaged.module.state_dict(), path)
    dist.barrier()


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
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with tempfile.TemporaryDirectory() as folder:
        train_and_serve(folder)
    gc.collect()  # otherwise what is left of DDP can abort the process at its exit
    dist.destroy_process_group()


def train_and_serve(folder):
    torch.manual_seed(0)
    plain = new_net()
    plain.compile(backend=BACKEND)  # in place, and before DDP: it adds nothing to the names
    model = DDP(plain)
    averaged = train(model)
    weights = gathered([p.tolist() for p in averaged.parameters()])
    if weights.count(weights[0]) != len(weights):
        raise RuntimeError("the averaged weights differ between the ranks")
    log(f"averaged weights: the same on {len(weights)} ranks, bit for bit, without an exchange")
    before = versions_of_buffers(averaged.module, model.module)
    share_buffers(averaged.module, model.module)
    after = versions_of_buffers(averaged.module, model.module)
    ranks = len(weights)
    log(f"averaged buffers: {before} versions on {ranks} ranks; after share_buffers: {after}")
    if not (before == ranks and after == 1):
        raise RuntimeError("the buffers of the ranks are not what this file says")
    average_integers(model.module)
    resume_average(averaged, model.module)
    show_names(
        {
            "DDP(model)": model,
            "torch.compile(DDP(model))": torch.compile(model, backend=BACKEND),
            "AveragedModel(model.module)": averaged,
            "averaged.module": averaged.module,
        }
    )

    right, wrong = os.path.join(folder, "right.pt"), os.path.join(folder, "wrong.pt")
    save_plain(averaged, right, dist.get_rank())
    save_with_wrapper(model, wrong)
    if dist.get_rank() == 0:
        load_and_compare(right, wrong, averaged.module, model.module)
    dist.barrier()  # the others wait here for rank 0


def versions_of_buffers(*modules):
    """How many different sets of buffers the ranks have."""
    return len(set(gathered(str([b.tolist() for module in modules for b in module.buffers()]))))


def average_integers(plain):
    """Average a table that never changes: its average must be the same table."""

    def table(model):
        return next(b for name, b in model.named_buffers() if name.endswith("table"))

    changed = []
    for way in (AveragedModel.update_parameters, update_average):
        averaged = average_of(plain)
        for _ in range(50):
            way(averaged, plain)
        changed.append((table(averaged) != table(plain)).sum().item())
    log(
        f"integers after 50 updates: {changed[0]} of {len(table(plain))} are wrong; with those"
        f" copied: {changed[1]}"
    )
    if not changed[0] > changed[1] == 0:
        raise RuntimeError("the average of integers is not what this file says")


def resume_average(averaged, plain):
    """Load the average from a snapshot, and go on: is it that of a run without a stop?"""
    whole, right, wrong = copy.deepcopy(averaged), average_of(plain), average_of(plain)
    right.load_state_dict(averaged.state_dict())
    wrong.module.load_state_dict(averaged.module.state_dict())  # n_averaged stays 0
    off = []
    for resumed in (whole, right, wrong):
        update_average(resumed, plain)
        difference = next(resumed.parameters()) - next(whole.parameters())
        off.append(difference.abs().max().item())
    log(f"resumed with averaged.state_dict():        average off by {off[1]:.1e}")
    log(f"resumed with averaged.module.state_dict(): average off by {off[2]:.1e}")
    if not (off[1] == 0 and off[2] > 0.01):
        raise RuntimeError("the average does not go on as this file says")


def show_names(models):
    """Log the name that the first layer's weight has in each model, and check it."""
    found = {
        what: next(name for name in model.state_dict() if name.endswith("0.weight"))
        for what, model in models.items()
    }
    for what, name in found.items():
        log(f"{what:<27} saves {name}")
    if list(found.values()) != [
        "module.0.weight",
        "_orig_mod.module.0.weight",
        "module.0.weight",
        "0.weight",
    ]:
        raise RuntimeError("the names are not those that this file shows")


def load_and_compare(right, wrong, averaged, latest):
    inputs = torch.randn(4, 8)

    def difference(loaded, trained):
        return (loaded(inputs) - trained.eval()(inputs)).abs().max().item()

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
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    net[0].register_buffer("table", torch.arange(169))  # integers, such as indices
    return net


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
