"""Runs inside each Python process of the watched command, and notes what torch is asked to do.

It writes records (../records) to a file of this process. It makes no collective call, draws no
random number, keeps no object of the script alive, and reads no tensor of a GPU after the first
steps. It reads tensors on a CPU ever more rarely. If it fails, it says so in a file, and is silent.

    sitecustomize.py   comes into each Python process, and starts the recorder behind torch
    hooks.py           puts functions of the recorder around those of torch, protected
    state.py           whether it is on; forgets all in a process that is forked
    machine.py         the machine, the files of the script, where a file lies
    notebook.py        the files of this process: note() writes a record
    script_lines.py    which line of the script asked for something
    fingerprints.py    which tensors may be read, and their checksums
    counters.py        what the process has done so far, where several subjects ask for that
    times.py           where the time of a step goes
    gpu_times.py       and where on a GPU, by its own clock
    process.py         joining and leaving the group, collective calls
    totals.py          running totals that are summed in place
    links.py           how fast its connections carry what it sends
    works.py           calls with async_op=True for which nobody waits
    model.py           DDP objects: how they were made, and their forward passes
    parameters.py      parameters that are trained, and belong to no model
    state_dicts.py     a module's state_dict() and load_state_dict()
    shards.py          parameters that FSDP2 has gathered
    optimizer.py       optimizers and their steps
    gradients.py       backward(), zero_grad(), clipping
    graphs.py          which graphs of autograd are held long
    schedules.py       schedules of the learning rate, averaged models
    datasets.py        datasets, subsets, set_epoch()
    passes.py          passes over loaders
    labels.py          what they look at in the labels of a batch
    generators.py      generators of random numbers
    files.py           torch.save(), torch.load(), files of pickle, json and numpy, and moves

To note something new: add a record, or a field, to ../records. Then write a function in the file of
its subject, with one of the decorators of hooks.py. It says which function of torch it goes with.
A new file must be imported in start().
"""


def start(folder):
    """Watch this process from now on, and write what it does to files in this folder.

    torch must have been imported. Call it once in a process.
    """
    import torch

    if not torch.distributed.is_available():
        return
    from . import files, gradients, hooks, passes, process, schedules, state  # noqa: F401

    hooks.install()
    state.watch(folder)
