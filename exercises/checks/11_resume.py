"""The check of exercises/11_resume.py."""

import itertools
import os
import resource
import signal
import sys

import answer
import torch
import torch.distributed as dist
from checker import die, expect
from torch import nn

DEATHS = ("in the middle of step 3", "in the middle of save, after step 3",
          "in save, after step 3, before it moved or removed a file")  # fmt: skip
MOVED, EMPTIED, CAME_FROM = [], [], []  # what this process has done to files
last_move = [0]  # the move or removal that this process does not live to see: its number


def trial(life, folder):
    rank, own, job = dist.get_rank(), folder / f"own-{dist.get_rank()}", folder / "job"
    sys.addaudithook(watch)
    if life == 0:
        look_at_seeds()
        # First a training that nothing kills. There, each rank has a folder of its own.
        own.mkdir()
        job.mkdir(exist_ok=True)
        torch.save(unbroken(f"{own}/snapshot.pt"), folder / f"unbroken-{rank}.pt")
    states, moves, size = torch.load(folder / f"unbroken-{rank}.pt")
    model, optimizer = new_start()
    first = load_and_look(life, f"{job}/snapshot.pt", model, optimizer, states)

    def prepare_accident(step):
        if (life, step) == (0, 3) and rank == dist.get_world_size() - 1:
            model.register_forward_hook(lambda *_: die())
        if (life, step) == (1, 3) and size:  # the system lets no file of this process grow further
            signal.signal(signal.SIGXFSZ, lambda *_: die())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
        if (life, step) == (2, 3) and moves > 1:
            last_move[0] = len(MOVED) + moves

    answer.train(f"{job}/snapshot.pt", model, optimizer, first, prepare_accident)
    compare(state_of(model, optimizer), states[answer.STEPS], "at the end,",
            "after each load it was right: does a step depend on anything else?")
    expect(f"{job}/snapshot.pt" not in EMPTIED, "save opens path itself to write into it. If the"
           " process dies then, there is no whole snapshot",
           "a move is done or not done; a copy can be half done")
    expect(not CAME_FROM, f"the new snapshot comes from another folder, {''.join(CAME_FROM[:1])}."
           " If that is on another disk, it cannot be moved", "write it into the folder of path")
    return f"killed {life} times, went on with step {first}, ended with the bits of an unbroken run"


def unbroken(path):
    """Train without an accident; path is one for each rank. Return the states before each step, how
    often a save moves or removes a file, and the size of the largest file."""
    model, optimizer = new_start()
    first, states, moves = answer.load(path, model, optimizer), [], []
    expect(first == 0, f"there is no snapshot, and load returned {first!r}",
           "the first step is step 0; os.path.exists(path) says whether there is a snapshot")

    def note(step):
        states.append(state_of(model, optimizer))
        moves.append(len(MOVED))

    answer.train(path, model, optimizer, 0, note)
    note(answer.STEPS)
    size = max((file.stat().st_size for file in os.scandir(os.path.dirname(path))), default=0)
    writers = [rank for rank, its_size in enumerate(gathered(size)) if its_size]
    expect(writers, "no rank has written a snapshot", "torch.save writes one")
    expect(len(writers) == 1, f"ranks {writers} all write a snapshot",
           "written by several processes at a time, a file has parts of each; and one rank has all"
           " that is needed")
    return states, moves[4] - moves[3], size


def load_and_look(life, path, model, optimizer, states):
    """Call load, and check what it returns and leaves behind. Return the step to take next."""
    before = f"a rank died {DEATHS[life - 1]}, and now" if life else "with no snapshot,"
    try:
        first = answer.load(path, model, optimizer)
    except Exception as error:
        expect(life == 0, f"{before} load fails: {type(error).__name__}:"
               f" {str(error).partition(chr(10))[0]}",
               "what has path while save is half done? And does load open path, and no other file?",
               "write another file, and move it over the old one when it is whole: os.replace")
        raise
    told, everyone = f"{before} load returned {first!r} as the next step", gathered(first)
    expect(isinstance(first, int), told, "return the number of a step")
    expect(set(everyone) == {first}, f"{told}, and on all ranks {everyone}",
           "all ranks go on alike: each needs what the snapshot has")
    expect(first != 1, f"{told}: it had been taken when the snapshot was saved",
           "which step comes after the one that save was told?")
    expect(first != 3, f"{told}: step 2, which was lost, is left out",
           "which step comes after the one that save was told?")
    expect(first in ((0,), (2,), (2,), (2, 4))[life], f"{told}; the last whole snapshot was saved"
           " after step 1", "at each moment in save, a whole snapshot has to be in its place. (And"
           " load has to leave it there)",
           "write another file, and move it over the old one when it is whole: os.replace")
    compare(state_of(model, optimizer), states[first], f"{told}, but",
            "all that a step changes has to be in the snapshot, as it was after the same step")
    return first


def look_at_seeds():
    world_size, seen = dist.get_world_size(), {}
    for step, rank in itertools.product(range(answer.STEPS), range(world_size)):
        drawn = []
        for _ in range(2):
            answer.seed_step(step, rank, world_size)
            drawn.append(tuple(torch.rand(3).tolist()))
        expect(drawn[0] == drawn[1], f"after two calls of seed_step({step}, {rank}, {world_size}),"
               " torch.rand gave different numbers", "let nothing but the arguments decide:"
               " torch.manual_seed")
        other = seen.setdefault(drawn[0], (step, rank))
        expect(other == (step, rank), f"rank {rank} draws in step {step} what rank {other[1]} draws"
               f" in step {other[0]}", "each pair of a step and a rank needs a seed of its own")
    seen.clear()
    for step, rank in itertools.product(range(110), range(16)):
        answer.seed_step(step, rank, 16)
        other = seen.setdefault(tuple(torch.rand(3).tolist()), (step, rank))
        expect(other == (step, rank), f"with 16 ranks, rank {rank} draws in step {step} what rank"
               f" {other[1]} draws in step {other[0]}", "which numbers does step times something,"
               " plus the rank, meet twice?", "world_size is one of the arguments")


def compare(found, right, when, hint):
    for name, tensor in right.items():
        expect(name in found, f"{when} there is no {name}", hint)
        expect(torch.equal(found[name], tensor), f"{when} the {name} has other bits than in a run"
               " that nothing killed", hint)


def state_of(model, optimizer):
    """Return copies of weights and buffers, of each weight's momentum, and the learning rate."""
    state = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if "momentum_buffer" in optimizer.state[p]:
            state[f"momentum of {name}"] = optimizer.state[p]["momentum_buffer"].clone()
    state |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return state | {"learning rate": torch.tensor(optimizer.param_groups[0]["lr"])}


def watch(event, args):
    if event in ("os.rename", "os.remove"):
        MOVED.append(event)
        if event == "os.rename" and str(args[1]).endswith("snapshot.pt"):
            source, target = (os.path.dirname(os.path.abspath(path)) for path in args[:2])
            CAME_FROM.extend([source] * (source != target))
        if len(MOVED) == last_move[0]:
            die()
    elif event == "open" and isinstance(args[2], int) and args[2] & os.O_TRUNC:
        EMPTIED.append(str(args[0]))


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


def new_start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Dropout(), nn.Linear(64, 1, bias=False),
                          Count())
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
