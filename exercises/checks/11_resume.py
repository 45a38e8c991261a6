"""The check of exercises/11_resume.py."""

import contextlib
import itertools
import os
import resource
import shutil
import signal
import sys
import threading
import time
import types
from unittest import mock

import answer
import torch
import torch.distributed as dist
from checker import die, expect, limit
from torch import nn
from torch.utils._pytree import tree_leaves

DEATHS = (
    "in the middle of save, after step 1",
    "in the middle of save, after step 3",
    "in save, after step 3, before it moved or removed a file",
)
CHANGES = ("os.rename", "os.remove", "os.link", "os.symlink", "os.truncate")
MOVED, EMPTIED, CAME_FROM, LOOKS = [], [], [], []  # what this process has done to files
IN_THREADS = []  # the calls of torch.save in a thread
last_move = [0]  # the move or removal that this process does not live to see: its number
looked_at = [""]  # the path whose content goes into LOOKS before each of CHANGES


def trial(life, folder):
    rank, path = dist.get_rank(), f"{folder}/job/snapshot.pt"
    own = folder / f"own-{rank}"
    sys.addaudithook(watch)
    if life > 0:
        answer.hash = lambda value: hash((life, value)) if has_text(value) else hash(value)
    else:
        with mock.patch("traceback.format_stack", list):  # most of the time of a manual_seed
            look_at_seeds()
        # First a training that nothing kills. There, each rank has a folder of its own.
        own.mkdir()
        (folder / "job").mkdir(exist_ok=True)
        torch.save((*unbroken(f"{own}/snapshot.pt"), draw()), folder / f"unbroken-{rank}.pt")
    states, moves, size, drawn = torch.load(folder / f"unbroken-{rank}.pt")
    expect(
        draw() == drawn,
        "seed_step gives other numbers in this life of the job than in the first one",
        "what differs between two processes? The clock, a process's number, and hash() of a string",
    )
    right = ((0,), (0,), (2,), (2, 4))[life]
    before = f"a rank died {DEATHS[life - 1]}, and now" if life else "with no snapshot,"
    if life and os.path.exists(path):
        (own / f"{life}").mkdir()
        copy = shutil.copy(path, own / f"{life}")
        load_and_look(
            copy,
            states,
            right,
            f"{before} with path alone, no other file,",
            f"{before}"
            " path holds no whole snapshot. A copy of it, with no other file, cannot be"
            " loaded",
        )
    model, optimizer, first = load_and_look(
        path, states, right, before, f"{before} load fails" * bool(life)
    )

    def prepare_accident(step):
        if (life, step) in ((0, 1), (1, 3)):  # the system lets no file of this process grow further
            signal.signal(signal.SIGXFSZ, lambda *_: die())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
        if (life, step) == (2, 3) and moves > 1:
            last_move[0] = len(MOVED) + moves

    answer.train(path, model, optimizer, first, prepare_accident)
    expect(
        life > 1,
        f"{before} no save writes a whole snapshot any more",
        "what does a process that dies leave behind, a lock maybe, that stops the next one?",
    )
    compare(
        state_of(model, optimizer),
        states[answer.STEPS],
        "at the end,",
        "after each load it was right: does a step depend on anything else?",
    )
    expect(
        path not in EMPTIED,
        "save opens path itself to write into it. If the process dies then,"
        " there is no whole snapshot",
        "a move is done or not done; a copy can be half done",
    )
    expect(
        not CAME_FROM,
        f"the new snapshot comes from another folder, {''.join(CAME_FROM[:1])}."
        " If that is on another disk, it cannot be moved",
        "write it into the folder of path",
    )
    return f"killed {life} times, went on with step {first}, ended with the bits of an unbroken run"


def unbroken(path):
    """Train without an accident; path is one for each rank. Return the states before each step, how
    often a save moves or removes a file, and the size of the largest file."""
    model, optimizer = new_start()
    first, states, moves = answer.load(path, model, optimizer), [], []
    expect(
        first == 0,
        f"there is no snapshot, and load returned {first!r}",
        "the first step is step 0; os.path.exists(path) says whether there is a snapshot",
    )
    compare(
        state_of(model, optimizer),
        state_of(*new_start()),
        "there is no snapshot, and after load",
        "then the model and the optimizer stay as they are",
    )
    looked_at[0], before = path, None

    def note(step):
        nonlocal before
        if IN_THREADS and step % 2 == 1:
            time.sleep(0.4)  # now they have been written
        states.append(state_of(model, optimizer))
        moves.append(len(MOVED))
        expect(
            step % 2 == 0 and step or content(path) == before,
            f"after step {step - 1}, path has"
            " changed, and nobody has called save: the save before had returned too early",
            "after save, the next step changes the weights: they must be on the disk by then",
        )
        for look in LOOKS:
            expect(
                look or not before,
                f"while save runs, after step {step - 1}, there is no"
                " snapshot at path for a moment",
                "the process may die at each moment: move the"
                " new file over the old one. os.replace leaves no gap",
            )
            expect(
                look in (before, content(path)),
                f"while save runs, after step {step - 1}, path"
                " holds neither the old nor the new snapshot",
                "move a file that is whole",
            )
        LOOKS.clear()
        before = content(path)

    with mock.patch("torch.save", late_in_a_thread(torch.save)):
        answer.train(path, model, optimizer, 0, note)
    note(answer.STEPS)
    looked_at[0] = ""
    size = max((file.stat().st_size for file in os.scandir(os.path.dirname(path))), default=0)
    everyone = gathered((size, path))
    writers = [rank for rank, (its_size, _) in enumerate(everyone) if its_size]
    expect(writers, "no rank has written a snapshot", "torch.save writes one")
    expect(
        len(writers) == 1,
        f"ranks {writers} all write a snapshot",
        "written by several processes at a time, a file has parts of each; and one rank has all"
        " that is needed",
    )
    size, written = everyone[writers[0]]
    load_and_look(written, states, (answer.STEPS,), "after a run that nothing killed,")
    return states, moves[4] - moves[3], size


def load_and_look(path, states, right, before, failed=""):
    """Load into a new start, check it, and return it, with the step to take next.

    right: the steps that may be next. failed: what to say of an exception.
    """
    model, optimizer = new_start()
    dist.barrier()
    try:
        with mock.patch("os.remove", later(os.remove)), mock.patch("os.unlink", later(os.unlink)):
            first = answer.load(path, model, optimizer)
    except Exception as error:
        expect(
            getattr(error, "removed", True),
            f"{before} several ranks remove the same file in"
            " load, and this rank comes too late: there is no such file any more",
            "all ranks are in load at a time, and share the folder. Let one rank tidy up, maybe"
            " in save, or let it be no error that the file has gone",
        )
        expect(
            not failed,
            f"{failed}: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "what has path while save is half done? And does load open path, and no other file?",
            "write another file, and move it over the old one when it is whole: os.replace",
        )
        raise
    told = f"{before} load returned {first!r} as the next step"
    everyone, last = gathered(first), right[0] - 1
    expect(isinstance(first, int), told, "return the number of a step")
    expect(
        set(everyone) == {first},
        f"{told}, and on all ranks {everyone}",
        "all ranks go on alike: each needs what the snapshot has",
    )
    expect(
        first != last,
        f"{told}, and step {last} is in the snapshot already",
        "which step comes after the one that save was told?",
    )
    expect(
        first in right,
        f"{told}; the last whole snapshot was saved"
        f" {f'after step {last}' if last > 0 else 'never'}",
        "at each moment in save, a whole"
        " snapshot has to be in its place. (And load has to leave it there)",
        "write another file, and move it over the old one when it is whole: os.replace",
    )
    compare(
        state_of(model, optimizer),
        states[first],
        f"{told}, but",
        "all that a step changes has to be in the snapshot, as it was after the same step, and"
        " load puts it into the model and the optimizer that it gets",
    )
    return model, optimizer, first


def later(remove):
    """Return a remove that waits first, so that all ranks see the file before it goes."""

    def wait_and_remove(*args, **kwargs):
        time.sleep(0.3)
        try:
            remove(*args, **kwargs)
        except FileNotFoundError as error:
            error.removed = False
            raise

    return wait_and_remove


def late_in_a_thread(save):
    """Return a torch.save that waits first in a thread, so that a save that does not wait for the
    thread always returns too early."""

    def wait_and_save(*args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            IN_THREADS.append(args)
            time.sleep(0.2)
        save(*args, **kwargs)

    return wait_and_save


def look_at_seeds():
    world_size = dist.get_world_size()
    pairs = list(itertools.product(range(answer.STEPS), range(world_size)))
    for step, rank in pairs:
        expect(
            numbers(step, rank, world_size) == numbers(step, rank, world_size),
            f"after two calls of seed_step({step}, {rank}, {world_size}), torch.rand gave"
            " different numbers",
            "let nothing but the arguments decide: torch.manual_seed",
        )
    look_for_twins(pairs, world_size)
    if dist.get_rank() > 0:  # rank 0 can speak for all
        return
    # For each k, some of these are k steps apart, and one rank; others k ranks, and one step.
    pairs = [
        *itertools.product(range(16), range(16)),
        *((step, 1) for step in range(256)),
        *((step, 0) for step in range(0, 100_000, 256)),
        *((1, rank) for rank in range(64)),
        *((0, rank) for rank in range(0, 4000, 64)),
    ]
    look_for_twins(pairs, 4000)
    # Any two pairs are as far from each other as two of the first of these. Of so many at random, a
    # hash of 32 bits gives ten times two pairs the same. These are too many to draw from each.
    numbered = torch.randint(100_000 * 4000, (300_000,), generator=torch.Generator().manual_seed(0))
    pairs = [
        *itertools.product(range(256), (*range(64), *range(3936, 4000))),
        *itertools.product(range(0, 100_000, 256), range(0, 4000, 64)),
        *(divmod(number, 4000) for number in numbered.tolist()),
    ]
    look_for_twins(seeded_alike(pairs, 4000), 4000)


def seeded_alike(pairs, world_size):
    """Return two pairs whose seeds have the same lower 32 bits: torch.rand looks at no others.
    Return none if there are none."""
    seen, until = {}, time.monotonic() + limit() / 3
    with mock.patch("torch.manual_seed", torch.default_generator.manual_seed):  # which is quick
        for pair in pairs:
            answer.seed_step(*pair, world_size)
            other = seen.setdefault(torch.initial_seed() % 2**32, pair)
            if other != pair:
                return other, pair
            if time.monotonic() > until:  # a slow one is tried with fewer
                break
    return ()


def look_for_twins(pairs, world_size):
    seen = {}
    for step, rank in pairs:
        drawn = numbers(step, rank, world_size)
        parts = [drawn[first : first + 3] for first in range(6)]  # who skips some has others' later
        other = [seen.setdefault(part, (step, rank)) for part in parts]
        other = next((one for one in other if one != (step, rank)), (step, rank))
        expect(
            other == (step, rank),
            f"with {world_size} ranks, rank {rank} draws in step {step}"
            f" what rank {other[1]} draws in step {other[0]}",
            "each pair of a step and a rank needs a seed of its own, in the lower 32 bits: how"
            " many ranks lie between two steps? Nothing above bit 31 counts, and a hash repeats",
            "world_size is one of the arguments",
        )


def numbers(step, rank, world_size):
    answer.seed_step(step, rank, world_size)
    return tuple(torch.rand(8).tolist())


def draw():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [numbers(step, rank, world_size) for step in (0, 1, 90_000)]


def has_text(value):
    """Does each Python process have another hash of it?"""
    return any(isinstance(one, (str, bytes)) for one in tree_leaves(value))


def compare(found, right, when, hint):
    for name, tensor in right.items():
        expect(name in found, f"{when} there is no {name}", hint)
        expect(
            torch.equal(found[name], tensor),
            f"{when} the {name} has other bits than in a run that nothing killed",
            hint,
        )


def state_of(model, optimizer):
    """Return copies of weights and buffers, of each weight's momentum, and the learning rate."""
    state = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    state |= {
        f"momentum of {name}": optimizer.state[p]["momentum_buffer"].clone()
        for name, p in model.named_parameters()
        if "momentum_buffer" in optimizer.state[p]
    }
    state |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return state | {"learning rate": torch.tensor(optimizer.param_groups[0]["lr"])}


def watch(event, args):
    if event in CHANGES:
        LOOKS.extend([content(looked_at[0])] * bool(looked_at[0]))
    if event in ("os.rename", "os.remove"):
        MOVED.append(event)
        if event == "os.rename" and str(args[1]).endswith("snapshot.pt"):
            source, target = (os.path.dirname(os.path.abspath(path)) for path in args[:2])
            CAME_FROM.extend([source] * (not f"{source}/".startswith(f"{target}/")))
        if len(MOVED) == last_move[0]:
            die()
    elif event == "open" and isinstance(args[2], int) and args[2] & os.O_TRUNC:
        EMPTIED.append(str(args[0]))


def content(path):
    """Return the bytes of a file, or None if there is none."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read()


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Count(nn.Module):
    """It has a buffer that each forward pass changes, as BatchNorm has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes += 1
        return inputs


sys.modules["check"] = types.SimpleNamespace(Count=Count)  # where pickle looks for Count


def new_start():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.Dropout(), nn.Linear(64, 1, bias=False), Count()
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
