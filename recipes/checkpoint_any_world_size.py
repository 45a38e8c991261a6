"""How do I save a sharded model so that any number of ranks can load it?

    folder = new_folder(root, step)  # all ranks, in a folder that all of them see
    dcp.save(state_of(model, optimizer, step, scheduler=scheduler), checkpoint_id=folder)
    move_pointer(root, folder)  # a small file names the newest; removes all but the last two
    # Later, with a new model, optimizer and scheduler, on any number of ranks:
    if folder := newest(root):  # None before the first save
        step = load_folder(model, optimizer, folder, scheduler=scheduler)

With fully_shard() (FSDP2), each rank (process) keeps one part of every weight, a shard. Here dcp is
torch.distributed.checkpoint. Every rank saves its shards, and a table says where each one belongs.
Later, every rank reads what its own shards need. The other functions stand below. All ranks need
the folder: on several machines, a shared disk. Ranks may have different layers (three_dimensions).

    torchrun --standalone --nproc-per-node=2 recipes/checkpoint_any_world_size.py

    [rank 0/2] step 10, saved by 2 ranks: sha256 d73c581c4cd2
    [rank 0/2] in one file, by torch.load(): weights differ by 0.0e+00
    [rank 0/2] step 10, loaded by 1 rank:  sha256 d73c581c4cd2
    [rank 0/2] after 10 more, from a run never stopped: 5.3e-06 on 1 rank, 5.3e-06 on 2 ranks
    [rank 0/2] step 20, saved by a thread while training went on: the weights of step 20
    [rank 0/2] save of step 22 cut off, new folders: 0 of 1024 loaded rows are new
    [rank 0/2] save of step 22 cut off, same folder: 512 of 1024 loaded rows are new
    [rank 0/2] saved on 2 ranks, loaded on 1: the same; a save cut off is never loaded

The sha256 is that of weights and optimizer. With a folder, a run goes on where the last one ended.
Save with 2 ranks and load with 3: both print the same sha256 for step 10.

    torchrun --standalone --nproc-per-node=2 recipes/checkpoint_any_world_size.py saves
    torchrun --standalone --nproc-per-node=3 recipes/checkpoint_any_world_size.py saves

A save that is killed has not written all shards. If you always save into the same folder, the old
ones are still in their place, and the mix loads without an error: some rows of the first weight are
new, and some are old. torch.save(model.state_dict()) on rank 0 saves its own shards only.

Now write it yourself: exercises/18_checkpoint_shards.py.
"""

import gc
import hashlib
import os
import shutil
import sys
import tempfile
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves  # private: all that is in lists and dicts

ROWS, STEPS = 24, 10  # rows of a step over all ranks; steps before the save, and after it
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # ranks may have different weights


def save_shards(model, optimizer, step, root, **others):
    """The right way: save into a folder that is new, and move the pointer last.

    root: a folder that all ranks see, on all machines. One job at a time saves in it. If a write
    fails, CheckpointException is raised on all: "except Exception" does not catch it.
    """
    folder = new_folder(root, step)
    dcp.save(state_of(model, optimizer, step, **others), checkpoint_id=folder)
    move_pointer(root, folder)  # dcp.save() returns when all ranks have written and flushed


def state_of(model, optimizer, step, **others):
    """The state to save: the shards of this rank, not copied, and the step.

    others: scheduler=scheduler, and all else with a state_dict(): of tensors on the CPU, or of
    shards in dicts and lists (by name where layers differ: list items would mix). What is no shard,
    buffers too, is one rank's: share it first (weights_to_serve.py). Save after the first step.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=BY_NAME)
    states = {name: other.state_dict() for name, other in others.items()}
    for name, state in states.items():
        # A tuple stays whole. Of a dict, dcp loads only those keys that are there already.
        if not any(isinstance(part, DTensor) for part in tree_leaves(state)):  # shards: cut
            states[name] = (state,)
    return {"model": model_state, "optimizer": optimizer_state, "step": step, **states}


def new_folder(root, step):
    """Return the path of an empty folder in root, the same on every rank."""
    path = [None]
    if dist.get_rank() == 0:
        os.makedirs(root, exist_ok=True)
        # A name that nothing has: a killed job may have left a folder for the same step.
        path = [tempfile.mkdtemp(prefix=f"step_{step}_", dir=root)]  # for your own user only
    dist.broadcast_object_list(path)
    return path[0]


def move_pointer(root, folder):
    """Make this folder the newest one, and remove all others but the one before."""
    if dist.get_rank() == 0:
        keep = {os.path.basename(path) for path in (read_pointer(root), folder) if path}
        pointer = os.path.join(root, "latest")
        with open(f"{pointer}.tmp", "w") as file:
            file.write(os.path.basename(folder))
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave an empty file
        os.replace(f"{pointer}.tmp", pointer)  # a reader finds the old name or the new one, whole
        # Only now: until here, a job that is killed had to find what it had.
        for name in os.listdir(root):
            if name.startswith("step_") and name not in keep:
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    dist.barrier()  # otherwise another rank could still read the old name


def newest(root):
    """Return the path of the newest whole folder, or None if there is none yet. All call it."""
    # On a disk over the network, another rank could still see the old pointer, and load its folder.
    path = [read_pointer(root) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    return path[0]


def read_pointer(root):
    try:
        with open(os.path.join(root, "latest")) as file:
            return os.path.join(root, file.read())
    except FileNotFoundError:
        return None


def load_folder(model, optimizer, folder, group=None, **others):
    """Fill a model and an optimizer that have not trained yet; return the step of the save.

    group: the ranks that load together; all by default. Their number does not matter.
    others: the same names as in the save. One that is left out here keeps its new state.

    "Missing key in checkpoint state_dict: optimizer.state...": the training used no such weight, so
    AdamW had no state of it to save. Call its requires_grad_(False) before the save and the load.
    A folder saved without that loads with dcp.load(..., planner=dcp.DefaultLoadPlanner(
    allow_partial_load=True)), but then nothing that is missing raises an error.
    """
    model.zero_grad()  # where gradients are, torch makes no state to load into
    # A template of what to load. For a new optimizer, torch takes a step that changes no weight.
    state = state_of(model, optimizer, 0, **others)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=BY_NAME,
    )
    for name, other in others.items():
        other.load_state_dict(state[name][0] if type(state[name]) is tuple else state[name])
    return state["step"]


def save_shards_async(model, optimizer, step, root, group, **others):
    """The right way while training goes on. Return a function that ends the save.

    All ranks must call that function: soon, before the next save, and before the job ends.
    group: dist.new_group(backend="gloo"), made once. A thread saves while the main thread trains.
    If both used one group of Gloo, the job would abort or hang. async_save() is experimental.
    """
    folder = new_folder(root, step)
    pending = dcp.async_save(
        state_of(model, optimizer, step, **others), checkpoint_id=folder, process_group=group
    )
    # The shards have been copied to the CPU by now. From here on, the optimizer may change them.

    def finish():
        pending.result()  # waits; an error of the thread is raised here, and nowhere else
        move_pointer(root, folder)

    return finish


def save_in_place(model, optimizer, step, folder):
    """Wrong: the same folder each time. A save that does not end leaves old and new shards."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # torch does warn
        dcp.save(state_of(model, optimizer, step), checkpoint_id=folder)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)  # all ranks use the folder of rank 0
        show_all(sys.argv[1] if sys.argv[1:] else os.path.join(shared[0], "saves"), shared[0])
        dist.barrier()  # before rank 0 removes it
    gc.collect()  # otherwise what is left of the model can abort the process at its exit
    dist.destroy_process_group()


def show_all(root, scratch):
    """root: where this job loads and saves. scratch: a folder for all that is only shown."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = new_sharded()
    folder = newest(root)
    start = load_folder(model, optimizer, folder) if folder else 0
    if folder:
        log(f"step {start}, loaded by {world_size} ranks: sha256 {checksum(model, optimizer)}")
    step = start + STEPS
    train(model, optimizer, start, step, rank, world_size)
    save_shards(model, optimizer, step, root)
    log(f"step {step}, saved by {world_size} ranks: sha256 {checksum(model, optimizer)}")
    show_one_file(model, newest(root), os.path.join(scratch, "one_file.pt"))
    show_one_rank(model, optimizer, step, newest(root))
    show_async(model, optimizer, step + STEPS, scratch)
    show_cut_off(model, optimizer, step + STEPS + 1, scratch)


def show_one_file(model, folder, path):
    """Make the one file that a process without ranks opens."""
    expected = flat_weights(model)  # on every rank: each one sends its shards to the others
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, path)  # asks no other rank: any process can do it, at any time
        single, _ = new_model()
        single.load_state_dict(torch.load(path)["model"])
        off = (flat_weights(single) - expected).abs().max().item()
        log(f"in one file, by torch.load(): weights differ by {off:.1e}")
        if off > 0:
            raise RuntimeError("the one file does not hold the weights")


def show_one_rank(model, optimizer, step, folder):
    """Load the folder on each rank alone. Then train on: all ranks together, and each alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone, _ = dist.new_subgroups(group_size=1)  # for each rank, a group of which it is all
    single, its_optimizer = new_model()
    loaded = load_folder(single, its_optimizer, folder, alone)
    digest = checksum(single, its_optimizer)
    log(f"step {loaded}, loaded by 1 rank:  sha256 {digest}")
    if (loaded, digest) != (step, checksum(model, optimizer)):
        raise RuntimeError("one rank did not load what all ranks have saved")
    before = flat_weights(model)
    train(single, its_optimizer, step, step + STEPS)
    train(model, optimizer, step, step + STEPS, rank, world_size)
    never_stopped, other_optimizer = new_model()  # in one process, and never loaded
    train(never_stopped, other_optimizer, 0, step + STEPS)
    expected = flat_weights(never_stopped)
    off = [
        ((flat_weights(trained) - expected).norm() / (expected - before).norm()).item()
        for trained in (single, model)
    ]
    log(
        f"after {STEPS} more, from a run never stopped: {off[0]:.1e} on 1 rank, {off[1]:.1e} on"
        f" {world_size} ranks"
    )
    if max(off) > 1e-3:
        raise RuntimeError("training goes on in another way than in a process that never stopped")


def show_async(model, optimizer, step, root):
    """Train on while a thread saves: it must save what it was called with."""
    digest = checksum(model, optimizer)
    finish = save_shards_async(model, optimizer, step, root, dist.new_group(backend="gloo"))
    train(model, optimizer, step, step + 1, dist.get_rank(), dist.get_world_size())
    finish()
    loaded, its_optimizer = new_sharded()
    load_folder(loaded, its_optimizer, newest(root))
    if checksum(loaded, its_optimizer) != digest:
        raise RuntimeError("async_save() did not save the weights that it was called with")
    log(f"step {step}, saved by a thread while training went on: the weights of step {step}")


def show_cut_off(model, optimizer, step, root):
    """Cut a save off in each way. Then count the rows of the first weight that are new."""
    same, later, rows = os.path.join(root, "same"), step + 1, {}
    save_shards(model, optimizer, step, root)
    save_in_place(model, optimizer, step, same)
    train(model, optimizer, step, later, dist.get_rank(), dist.get_world_size())
    cut_off(save_shards, model, optimizer, later, root)
    cut_off(save_in_place, model, optimizer, later, same)
    for name, folder in (("new folders", newest(root)), ("same folder", same)):
        loaded, its_optimizer = new_sharded()
        load_folder(loaded, its_optimizer, folder)
        new = whole_state(loaded)[0]["0.weight"] == whole_state(model)[0]["0.weight"]
        rows[name] = new.all(dim=1).sum().item()
        log(f"save of step {later} cut off, {name}: {rows[name]} of {len(new)} loaded rows are new")
    if rows["new folders"] > 0 or not 0 < rows["same folder"] < len(new):
        raise RuntimeError(f"loaded rows that are new: {rows}")
    log(
        f"saved on {dist.get_world_size()} ranks, loaded on 1: the same; a save cut off is never"
        " loaded"
    )


def cut_off(way, *args):
    """Save as in a job that is killed when all ranks but rank 1 have written: an error there."""
    write_data = dcp.FileSystemWriter.write_data

    def write_or_fail(self, *args):
        if dist.get_rank() == 1:
            raise OSError("rank 1 is killed here")
        return write_data(self, *args)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_or_fail):
        try:
            way(*args)
        except dcp.CheckpointException:  # on every rank; "except Exception" would not catch it
            return
    raise RuntimeError("nothing was cut off")


def train(model, optimizer, first, last, rank=0, world_size=1):
    """Take the steps first + 1 to last. The rows of a step depend on its number only."""
    for step in range(first + 1, last + 1):
        torch.manual_seed(step)
        inputs, targets = torch.randn(2, ROWS, 256)[:, rank::world_size]
        optimizer.zero_grad()
        # fully_shard() averages over the ranks: this gives the mean over all rows.
        losses = (model(inputs) - targets).square().mean(dim=1)
        (losses.sum() * world_size / ROWS).backward()
        optimizer.step()


def new_sharded():
    """The model cut into shards, one of each weight for each rank; and an optimizer for them."""
    model, _ = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def new_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def flat_weights(model):
    return torch.cat([weight.flatten() for weight in whole_state(model)[0].values()])


def checksum(model, optimizer):
    """The sha256 of all weights, moments and counts of steps, however they are sharded."""
    weights, state = whole_state(model, optimizer)
    digest = hashlib.sha256()
    for name in sorted(weights):
        for tensor in (weights[name], *dict(sorted(state["state"][name].items())).values()):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def whole_state(model, optimizers=()):
    """The state with whole tensors, on every rank: for small models only."""
    return get_state_dict(model, optimizers, options=StateDictOptions(full_state_dict=True))


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
