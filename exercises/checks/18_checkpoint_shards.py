"""The check of exercises/18_checkpoint_shards.py."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, case, die, expect

LENGTH, MORE = 30011, 8192  # MORE: bytes that files may have besides the numbers
GONE = "the old save stays until the new one is in force: what is removed, or not yet there?"
LIFE = [0]  # the number of this attempt
OPENED, CHANGES = set(), []  # what this process has opened; when it has made or moved a file
at_change = [lambda: None]  # what to do just before


def trial(life, folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Not in ASCII: torch.save opens such a path in Python, so that watch hears of it.
    few, root, plan = folder / "saves/few", folder / "saves/äll", folder / f"plan-{rank}"
    LIFE[0] = life
    sys.addaudithook(watch)
    if life == 0:
        few.mkdir(parents=True, exist_ok=True)
        root.mkdir(exist_ok=True)
        expect(
            answer.load(str(root), 0, 1) is None,
            "there is no save yet, and load does not return None",
            "a file that is not there means that there is no save",
        )
        for step in (0, 9, 10):  # as text, 10 comes before 9
            save_and_load(few, step, world_size - 1, (1, world_size, world_size + 2))
        save_and_load(root, 1, LENGTH, (1, 2, 5))
        at_change[0], before = lambda: time.sleep(0.1), len(CHANGES)  # a slow disk
        sent = save_and_load(root, 2, LENGTH, (1, world_size, 7, 4 * world_size + 1))
        ends = gathered((*(CHANGES[before:] or [(0, "")])[-1], rank, len(CHANGES) - before))
        (_, what, last, count), other = max(ends), (max(ends)[2] + 1) % world_size
        deaths = [(other, 0, "while it wrote")]
        deaths += [
            (who, many, "before it made or moved the last file")  # of its files
            for who, many in ((last, count), (other, ends[other][3]))
            if many
        ]
        if what == "open":
            deaths += [(last, count, "when it had made the last file, and written nothing into it")]
        victim = last if last < world_size - 1 else 0  # the last one of all is not in a smaller job
        how = f"in a job of {world_size - 1} rank(s), behind the save of {world_size}"
        deaths += [(victim, ends[victim][3], how)] * bool(ends[victim][3])
    else:
        sent, step, deaths = json.loads(plan.read_text())
        told = f"a rank died in save of step {step}, {deaths.pop(0)[2]}; now"
        found = {
            look_at_load(told, root, LENGTH, (step - 1, step), virtual, 7)
            for virtual in range(rank, 7, world_size)
        }
        found = set().union(*gathered(found))
        expect(
            len(found) == 1,
            f"{told} load finds step {step - 1} as some ranks of 7, and step {step} as others",
            "one change of one file makes a save valid for all ranks",
        )
    # What died in a smaller job, the last death of all, is not saved again on more ranks.
    step = max(found) + (1 if deaths else 2) if life else 3
    smaller = [death for death in deaths if "job" in death[2]]
    if len(deaths) > len(smaller):  # in the next save
        plan.write_text(json.dumps([sent, step, deaths]))
        dist.barrier()
        die_in_save(root, step, *deaths[0])
        for virtual in range(rank, 7, world_size):  # it has not died
            look_at_load(f"after save of step {step},", root, LENGTH, (step,), virtual, 7)
    step += len(deaths) > len(smaller)
    plan.write_text(json.dumps([sent, step + 1, smaller]))
    dist.barrier()
    save_and_load(root, step, LENGTH, (1, world_size + 1))
    dist.destroy_process_group()
    if rank < world_size - 1:  # the job goes on with fewer ranks
        dist.init_process_group(
            "gloo", f"file://{folder}/fewer-{life}", rank=rank, world_size=world_size - 1
        )
        if smaller:
            die_in_save(root, step + 1, *smaller[0])
        for more in (2, 3):
            save_and_load(root, step + more, LENGTH, (1, world_size))
    return (
        f"{life} save(s) cut off, and none of them loaded; loaded as 1 to {4 * world_size + 1}"
        f" ranks; a rank sent {sent} bytes in a save"
    )


def save_and_load(root, step, length, world_sizes):
    """Save, and load as all ranks of jobs of other sizes. Return the bytes sent in the save."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    before = size_of(root.rglob("*"))
    OPENED.clear()
    answer.load(str(root), rank, world_size)
    old = [(path, path.stat().st_ino, path.read_bytes()) for path in opened_files()]
    dist.barrier()
    if LIFE[0] and rank == 0:
        time.sleep(0.2)  # too late to remove what an attempt before has left: others write
    with Exchanges() as exchanges:
        answer.save(str(root), step, length, shard_of(step, length))
    told = f"after save of step {step},"
    with case(f"load after save of step {step}"):
        found = answer.load(str(root), rank, world_size)
    dist.barrier()
    expect(
        found and found[0] == step,
        f"{told} load finds {found and f'step {found[0]}'} on rank {rank}",
        "when save returns on one rank, load finds this step on the others, too",
        "who may return before the last change? And of several saves, the one with the largest"
        ' number counts: step 0 is a save, and 10 > 9, but "10" < "9"',
    )
    for path, number, content in old:
        same = path.exists() and path.stat().st_ino == number
        expect(
            not same or path.read_bytes() == content,
            f"save writes into {path.name}, which load"
            " reads. If it dies there, the old save is gone, and the new one is not whole",
            "write another file, and move it over the old one when it is whole: os.replace",
            "does another rank write into the same file, before it is moved?",
        )
    sent, added = exchanges.bytes_sent(), size_of(root.rglob("*")) - before
    expect(
        sent <= 4096,
        f"this rank sent {sent} bytes in save; its part has {12 * (LENGTH // world_size)}",
        "each rank writes what it has",
    )
    expect(
        added <= 12 * length + MORE * world_size,
        f"{told} the folder has {added} bytes more, and the state has {12 * length}",
        "does a rank write more than its part?",
        "behind a view, torch.save writes the whole longer tensor: clone() it",
    )
    for size in world_sizes:
        for virtual in range(rank, size, world_size):
            look_at_load(told, root, length, (step,), virtual, size)
    dist.barrier()
    return sent


def look_at_load(told, root, length, steps, rank, size):
    """Call load as a rank of a job of that size, and return the step. steps: which it may find."""
    told, cut_off = f"{told} load as rank {rank} of {size}", len(steps) > 1
    OPENED.clear()
    try:
        with Exchanges() as exchanges:
            found = answer.load(str(root), rank, size)
    except Exception as error:
        gone = isinstance(error, FileNotFoundError) and GONE
        expect(
            not cut_off,
            f"{told} fails: {type(error).__name__}: {error}",
            gone
            or "the last"
            " thing that save does makes it valid, when all ranks have written: what does load"
            " look at?",
            "a file that is there may still be empty: write another, then"
            " os.replace. And two changes are not one: a job can die between them",
        )
        with case(told.replace("load as", "in load as")):
            raise
    expect(not exchanges.calls, f"{told} makes an exchange", "the files have all that is needed")
    expect(
        found and found[0] in steps,
        f"{told} returned {found and f'step {found[0]}'}; the"
        f" newest whole save is that of step {steps[0]}",
        "the old save stays until the new one"
        " is in force: is there a moment in which load finds neither?"
        if cut_off
        else "what says which save is the newest?",
    )
    expect(
        type(found) is tuple and set(found[1]) == set(answer.NAMES),
        f"{told} returned {found}",
        "return (step, shard): shard has a tensor for each of NAMES, also an empty one",
    )
    (first, stop), lives = answer.part_of(length, rank, size), set()
    for name, right in zip(answer.NAMES, whole(found[0], length)[:, first:stop], strict=True):
        part = found[1][name]
        expect(
            (part.shape, part.dtype) == (right.shape, right.dtype),
            f"{told}: {name} has shape"
            f" {tuple(part.shape)} in {part.dtype}, not ({stop - first},) in float32",
            "part_of says which it needs, and which each saved part has",
            "rank and world_size are the arguments, not those of a process group",
        )
        wrong = (part.floor() != right).nonzero().flatten().tolist()
        if wrong:
            which, place = divmod(int(part[wrong[0]].nan_to_num(0, 0, 0)), 32768)
            what = f"number {place} of {answer.NAMES[which % 3]} of step {which // 3}"
            expect(
                False,
                f"{told} says step {found[0]}, but {len(wrong)} of {len(part)} numbers of"
                f" {name} are wrong. In the place of number {first + wrong[0]} is"
                f" {what if 2 < which < 28 else part[wrong[0]].item()}",
                "no file of the old save may change in a new one"
                if cut_off
                else "which parts overlap with [first, stop), and where does each one begin?",
            )
        lives.update((part % 1).tolist())
    expect(
        len(lives) < 2,
        f"{told} mixes two attempts at step {found[0]}; the first was cut off",
        "a file of the first one may be left, and has the same step: what tells load which"
        " files were written together?",
    )
    expect(
        cut_off or lives <= {LIFE[0] / 16},
        f"{told} returns what an attempt before it saved as step {found[0]}; that one was cut off",
        "its files may be left: are they replaced?",
    )
    kept = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in found[1].values()
    }
    need, ranks = 12 * (stop - first), dist.get_world_size()
    expect(
        sum(kept.values()) <= need + 1024,
        f"{told}: its tensors keep {sum(kept.values())} bytes in memory, and have {need}",
        "a slice keeps all that it is cut from: clone it",
    )
    # Who was to die in the save of a smaller job may have lived on: then a part may be longer.
    bounds = [
        [answer.part_of(length, old, n) for old in range(n)]
        for n in (ranks, max(1, ranks - cut_off))
    ]
    parts = max(
        ([12 * (b - a) for a, b in one if max(a, first) < min(b, stop)] for one in bounds), key=sum
    )
    files = opened_files()
    expect(
        size_of(files) <= sum(parts) + MORE * (len(parts) + 1),
        f"{told} opens files of"
        f" {size_of(files)} bytes: {', '.join(sorted(file.name for file in files)[:4])}. The"
        f" parts that overlap with its own have {sum(parts)}",
        "which has it no need of?",
        "what load needs to know first can stand in a small common file",
    )
    return found[0]


def die_in_save(root, step, victim, count, how):
    """Save. Meanwhile, the victim dies before it changes the count-th file; 0: while it writes."""
    rank, before = dist.get_rank(), len(CHANGES)
    end = (lambda: die_at(0)) if "made the" in how else die
    at_change[0] = lambda: (rank, len(CHANGES)) == (victim, before + count - 1) and end()
    if (rank, count) == (victim, 0):
        die_at(3 * LENGTH // dist.get_world_size())
    answer.save(str(root), step, LENGTH, shard_of(step, LENGTH))
    at_change[0] = lambda: None
    die_at(resource.RLIM_INFINITY)
    if not count:
        die()  # all its files are short


def die_at(size):
    """Let this process die when it has written that many bytes into a file."""
    signal.signal(signal.SIGXFSZ, lambda *_: (time.sleep(0.5), die()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def shard_of(step, length):
    first, stop = answer.part_of(length, dist.get_rank(), dist.get_world_size())
    parts = zip(answer.NAMES, whole(step, length, LIFE[0])[:, first:stop], strict=True)
    return dict(reversed([*parts]))  # by name, whatever the order


def whole(step, length, life=0):
    """Return the three tensors; each number says its place, tensor, step, attempt (in 24 bits)."""
    return torch.arange(length) + life / 16 + 32768 * (3 * step + torch.arange(3.0)[:, None])


def watch(event, args):
    file = event == "open" and isinstance(args[0], str)
    if file and not args[2] & os.O_CREAT:
        OPENED.add(os.path.realpath(args[0]))
    elif event in ("os.rename", "os.symlink", "os.link") or file and "/saves/" in args[0]:
        at_change[0]()
        CHANGES.append((time.monotonic(), event))


def opened_files():
    return [path for path in map(Path, list(OPENED)) if "saves" in path.parts and path.is_file()]


def size_of(paths):
    return sum(path.stat().st_size for path in paths if path.is_file())


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
