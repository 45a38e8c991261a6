def write(path, content):
    with open(path, "wb") as file:
        torch.save(content, file)


def own(shard):
    return {name: part.clone() for name, part in shard.items()}


def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()
    point(root, folder, step, length)
    dist.barrier()


def point(root, folder, step, length):
    if dist.get_rank() == 0:
        write(f"{root}/newest.tmp", (folder, step, length, dist.get_world_size()))
        os.replace(f"{root}/newest.tmp", f"{root}/newest.pt")


def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest.pt"):
        return None
    folder, step, length, ranks = torch.load(f"{root}/newest.pt")
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            saved = torch.load(f"{folder}/{old}.pt")
            for name in NAMES:
                shard[name][low - first : high - first] = saved[name][low - start : high - start]
    return step, shard


# ---- no barrier before the pointer: a rank died in save of step 3, while it wrote; now load as rank ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    point(root, folder, step, length)
    dist.barrier()


# ---- the pointer first: a rank died in save of step 3, while it wrote; now load as rank ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    point(root, folder, step, length)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()


# ---- no barrier after the pointer: load finds (step \d+|None) on rank \d ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()
    point(root, folder, step, length)


# ---- the same folder each time: save writes into \d.pt, which load reads ----
def save(root, step, length, shard):
    write(f"{root}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()
    point(root, root, step, length)
    dist.barrier()


# ---- the same names, moved one by one: while it wrote; now load .* says step 2, but \d+ of ----
def save(root, step, length, shard):
    path = f"{root}/{dist.get_rank()}.pt"
    write(f"{path}.tmp", own(shard))
    os.replace(f"{path}.tmp", path)
    dist.barrier()
    point(root, root, step, length)
    dist.barrier()


# ---- the pointer written in place: save writes into newest.pt, which load reads ----
def point(root, folder, step, length):
    if dist.get_rank() == 0:
        write(f"{root}/newest.pt", (folder, step, length, dist.get_world_size()))


# ---- the pointer removed first: before it made or moved the last file; now load .* returned None ----
def point(root, folder, step, length):
    if dist.get_rank() == 0:
        write(f"{root}/newest.tmp", (folder, step, length, dist.get_world_size()))
        if os.path.exists(f"{root}/newest.pt"):
            os.remove(f"{root}/newest.pt")
        os.replace(f"{root}/newest.tmp", f"{root}/newest.pt")


# ---- the old save removed first: while it wrote; now load .* fails: FileNotFoundError ----
def save(root, step, length, shard):
    import shutil
    folder = f"{root}/step-{step}"
    if dist.get_rank() == 0:
        for name in os.listdir(root):
            if name.startswith("step-"):
                shutil.rmtree(f"{root}/{name}")
    dist.barrier()
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()
    point(root, folder, step, length)
    dist.barrier()


# ---- each rank removes its old part, and then the pointer moves: the last file; now load as rank \d of 7 fails: FileNotFoundError.*\n +hint: the old save stays until the new one is in force: what is removed ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()
    for name in os.listdir(root):
        old = f"{root}/{name}/{dist.get_rank()}.pt"
        if f"{root}/{name}" != folder and os.path.exists(old):
            os.remove(old)
    dist.barrier()
    point(root, folder, step, length)
    dist.barrier()


# ---- the newest folder with all files: while it wrote; now load as rank \d of 7 fails ----
def save(root, step, length, shard):
    folder = f"{root}/{step}-{length}-{dist.get_world_size()}"
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()


def load(root, rank, world_size):
    found = sorted((tuple(map(int, name.split("-"))) for name in os.listdir(root)), reverse=True)
    for step, length, ranks in found:
        folder = f"{root}/{step}-{length}-{ranks}"
        if len(os.listdir(folder)) < ranks:
            continue
        first, stop = part_of(length, rank, world_size)
        shard = {name: torch.empty(stop - first) for name in NAMES}
        for old in range(ranks):
            start, end = part_of(length, old, ranks)
            low, high = max(first, start), min(stop, end)
            if low < high:
                saved = torch.load(f"{folder}/{old}.pt")
                for name in NAMES:
                    shard[name][low - first : high - first] = saved[name][low - start : high - start]
        return step, shard


# ---- rank 0 writes all: this rank sent \d+ bytes in save ----
def save(root, step, length, shard):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own(shard))
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    if dist.get_rank() == 0:
        for rank, its in enumerate(everyone):
            write(f"{folder}/{rank}.pt", its)
    point(root, folder, step, length)
    dist.barrier()


# ---- a view saved: the folder has \d+ bytes more, and the state has \d+ ----
def own(shard):
    return shard


# ---- only as many ranks as before: load as rank \d of 1: weights has shape ----
def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest.pt"):
        return None
    folder, step, length, ranks = torch.load(f"{root}/newest.pt")
    return step, torch.load(f"{folder}/{rank % ranks}.pt")


# ---- all files opened: opens files of \d+ bytes: 0\.pt, 1\.pt ----
def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest.pt"):
        return None
    folder, step, length, ranks = torch.load(f"{root}/newest.pt")
    saved = [torch.load(f"{folder}/{old}.pt") for old in range(ranks)]
    first, stop = part_of(length, rank, world_size)
    return step, {name: torch.cat([its[name] for its in saved])[first:stop].clone()
                  for name in NAMES}


# ---- cut as if the parts were equal: numbers of weights are wrong. In the place of number ----
def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest.pt"):
        return None
    folder, step, length, ranks = torch.load(f"{root}/newest.pt")
    first, stop = part_of(length, rank, world_size)
    size = -(-length // ranks)
    shard = {name: torch.zeros(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            saved = torch.load(f"{folder}/{old}.pt")
            for name in NAMES:
                part = saved[name][low - old * size :][: high - low]
                shard[name][low - first :][: len(part)] = part
    return step, shard


# ---- a view returned: its tensors keep \d+ bytes in memory, and have \d+ ----
def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest.pt"):
        return None
    folder, step, length, ranks = torch.load(f"{root}/newest.pt")
    first, stop = part_of(length, rank, world_size)
    parts = {name: [torch.empty(0)] for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            saved = torch.load(f"{folder}/{old}.pt")
            for name in NAMES:
                parts[name].append(saved[name][low - start : high - start])
    return step, {name: its[1] if len(its) == 2 else torch.cat(its) for name, its in parts.items()}


# ---- the world of the process group: load as rank \d of 1: weights has shape ----
def load(root, rank, world_size):
    world_size = dist.get_world_size()
    rank %= world_size
    folder, step, length, ranks = (torch.load(f"{root}/newest.pt")
                                   if os.path.exists(f"{root}/newest.pt") else [None] * 4)
    return folder and (step, torch.load(f"{folder}/{rank}.pt"))


# ---- all ranks agree in load: makes an exchange|After \d+ s, there is no end ----
def load(root, rank, world_size):
    found = [torch.load(f"{root}/newest.pt") if os.path.exists(f"{root}/newest.pt") else None]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return None
    folder, step, length, ranks = found[0]
    return step, torch.load(f"{folder}/{rank % ranks}.pt")


# ---- an empty part not there: shard has a tensor for each ----
def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest.pt"):
        return None
    folder, step, length, ranks = torch.load(f"{root}/newest.pt")
    first, stop = part_of(length, rank, world_size)
    parts = {}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            for name, part in torch.load(f"{folder}/{old}.pt").items():
                parts.setdefault(name, []).append(part[low - start : high - start])
    return step, {name: torch.cat(its) for name, its in parts.items()}


# ---- a marker, and the old save removed before it: the last file; now load as rank \d of 7 returned None ----
def save(root, step, length, shard):
    import shutil
    folder = f"{root}/{step}"
    os.makedirs(folder, exist_ok=True)
    write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()
    if dist.get_rank() == 0:
        for name in os.listdir(root):
            if int(name) < step:
                shutil.rmtree(f"{root}/{name}")
        write(f"{folder}/whole", (folder, step, length, dist.get_world_size()))
    dist.barrier()


def load(root, rank, world_size):
    steps = [int(name) for name in os.listdir(root) if os.path.exists(f"{root}/{name}/whole")]
    if not steps:
        return None
    folder, step, length, ranks = torch.load(f"{root}/{max(steps)}/whole")
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            saved = torch.load(f"{folder}/{old}.pt")
            for name in NAMES:
                shard[name][low - first : high - first] = saved[name][low - start : high - start]
    return step, shard


# ---- rank 0 writes its part last, behind the pointer: the last file; now load as rank 0 of 7 fails ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    if dist.get_rank() > 0:
        write(f"{folder}/{dist.get_rank()}.pt", own(shard))
    dist.barrier()
    point(root, folder, step, length)
    if dist.get_rank() == 0:
        write(f"{folder}/0.pt", own(shard))
    dist.barrier()


# ---- a new pointer for each save, not moved: and written nothing into it; now load as rank \d of 7 fails ----
def point(root, folder, step, length):
    if dist.get_rank() == 0:
        write(f"{root}/{step}.pointer", (folder, step, length, dist.get_world_size()))


def load(root, rank, world_size):
    steps = [int(name.split(".")[0]) for name in os.listdir(root) if name.endswith(".pointer")]
    if not steps:
        return None
    folder, step, length, ranks = torch.load(f"{root}/{max(steps)}.pointer")
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            saved = torch.load(f"{folder}/{old}.pt")
            for name in NAMES:
                shard[name][low - first : high - first] = saved[name][low - start : high - start]
    return step, shard


# ---- the largest name: after save of step 10, load finds step 9 ----
import os, glob, json, uuid
import torch
import torch.distributed as dist
from answer import NAMES, part_of

def pieces(folder, length, ranks, rank, world_size):
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            for name, part in torch.load(os.path.join(folder, f"{old}.pt")).items():
                shard[name][low - first : high - first] = part[low - start : high - start]
    return shard

# WRONG: the newest folder by its name as text: step-9 comes after step-10
def save(root, step, length, shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(root, f"step-{step}")
    os.makedirs(folder, exist_ok=True)
    torch.save({name: shard[name].clone() for name in NAMES}, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(folder, "done.tmp"), "w") as file:
            json.dump([step, length, ranks], file)
        os.replace(os.path.join(folder, "done.tmp"), os.path.join(folder, "done"))
    dist.barrier()

def load(root, rank, world_size):
    done = sorted(glob.glob(os.path.join(root, "step-*", "done")))
    if not done:
        return None
    with open(done[-1]) as file:
        step, length, ranks = json.load(file)
    return step, pieces(os.path.dirname(done[-1]), length, ranks, rank, world_size)


# ---- no save of step 0: after save of step 0, load finds None ----
import os, glob, json, uuid
import torch
import torch.distributed as dist
from answer import NAMES, part_of

def pieces(folder, length, ranks, rank, world_size):
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            for name, part in torch.load(os.path.join(folder, f"{old}.pt")).items():
                shard[name][low - first : high - first] = part[low - start : high - start]
    return shard

# WRONG: the save of step 0 is taken for none
def save(root, step, length, shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(root, f"step-{step}")
    os.makedirs(folder, exist_ok=True)
    torch.save({name: shard[name].clone() for name in NAMES}, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(folder, "done.tmp"), "w") as file:
            json.dump([length, ranks], file)
        os.replace(os.path.join(folder, "done.tmp"), os.path.join(folder, "done"))
    dist.barrier()

def load(root, rank, world_size):
    steps = [int(path.split("-")[-1]) for path in glob.glob(os.path.join(root, "step-*"))
             if os.path.exists(os.path.join(path, "done"))]
    step = max(steps, default=0)
    if not step:
        return None
    folder = os.path.join(root, f"step-{step}")
    with open(os.path.join(folder, "done")) as file:
        length, ranks = json.load(file)
    return step, pieces(folder, length, ranks, rank, world_size)


# ---- the order of a dict: load as rank 0 of 1 says step 0, but 1 of 1 numbers ----
import os, glob, json, uuid
import torch
import torch.distributed as dist
from answer import NAMES, part_of

def pieces(folder, length, ranks, rank, world_size):
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            for name, part in torch.load(os.path.join(folder, f"{old}.pt")).items():
                shard[name][low - first : high - first] = part[low - start : high - start]
    return shard

# WRONG: the order of the dict, not its names
def save(root, step, length, shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(root, f"step-{step}")
    os.makedirs(folder, exist_ok=True)
    three = torch.stack(list(shard.values()))
    torch.save(dict(zip(NAMES, three.clone())), os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(root, "newest.tmp"), "w") as file:
            json.dump([step, length, ranks], file)
        os.replace(os.path.join(root, "newest.tmp"), os.path.join(root, "newest"))
    dist.barrier()

def load(root, rank, world_size):
    if not os.path.exists(os.path.join(root, "newest")):
        return None
    with open(os.path.join(root, "newest")) as file:
        step, length, ranks = json.load(file)
    return step, pieces(os.path.join(root, f"step-{step}"), length, ranks, rank, world_size)


# ---- counts the files: after save of step \d, load as rank 0 of 1 says step \d, but ----
import os, glob, json, uuid
import torch
import torch.distributed as dist
from answer import NAMES, part_of

def pieces(folder, length, ranks, rank, world_size):
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            for name, part in torch.load(os.path.join(folder, f"{old}.pt")).items():
                shard[name][low - first : high - first] = part[low - start : high - start]
    return shard

# WRONG: two folders by turns, and as many ranks as there are files: a job of fewer ranks finds those of a larger one
def save(root, step, length, shard):
    rank = dist.get_rank()
    newest = pointer(root)
    slot = "b" if newest and newest[0] == "a" else "a"
    os.makedirs(os.path.join(root, slot), exist_ok=True)
    torch.save({name: shard[name].clone() for name in NAMES}, os.path.join(root, slot, f"{rank}.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(root, "newest.tmp"), "w") as file:
            json.dump([slot, step, length], file)
        os.replace(os.path.join(root, "newest.tmp"), os.path.join(root, "newest"))
    dist.barrier()

def pointer(root):
    if os.path.exists(os.path.join(root, "newest")):
        with open(os.path.join(root, "newest")) as file:
            return json.load(file)

def load(root, rank, world_size):
    newest = pointer(root)
    if newest is None:
        return None
    slot, step, length = newest
    folder = os.path.join(root, slot)
    return step, pieces(folder, length, len(os.listdir(folder)), rank, world_size)


# ---- the last file of all is written in place: load as rank \d of \d fails ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    torch.save({name: shard[name].clone() for name in NAMES}, f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save((length, dist.get_world_size()), f"{folder}/done")
    dist.barrier()


def load(root, rank, world_size):
    steps = [int(name[5:]) for name in os.listdir(root) if os.path.exists(f"{root}/{name}/done")]
    if not steps:
        return None
    folder = f"{root}/step-{max(steps)}"
    length, ranks = torch.load(f"{folder}/done")
    first, stop = part_of(length, rank, world_size)
    found = {name: [] for name in NAMES}
    for old in range(ranks):
        begin, end = part_of(length, old, ranks)
        if max(begin, first) < min(end, stop):
            part = torch.load(f"{folder}/{old}.pt")
            for name in NAMES:
                found[name].append(part[name][max(first - begin, 0) : stop - begin])
    return max(steps), {name: torch.cat([torch.zeros(0), *its]) for name, its in found.items()}


# ---- each rank moves its own file, and a step is whole when all are there: mixes two attempts ----
def save(root, step, length, shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    path = f"{root}/{step:09d}-{rank}-{ranks}-{length}.pt"
    torch.save({name: shard[name].clone() for name in NAMES}, f"{path}.new")
    os.replace(f"{path}.new", path)
    dist.barrier()


def load(root, rank, world_size):
    there = {}
    for name in os.listdir(root):
        if name.endswith(".pt"):
            step, old, ranks, length = map(int, name[:-3].split("-"))
            there.setdefault((step, ranks, length), set()).add(old)
    whole = [key for key, its in there.items() if len(its) == key[1]]
    if not whole:
        return None
    step, ranks, length = max(whole)
    first, stop = part_of(length, rank, world_size)
    found = {name: [] for name in NAMES}
    for old in range(ranks):
        begin, end = part_of(length, old, ranks)
        if max(begin, first) < min(end, stop):
            part = torch.load(f"{root}/{step:09d}-{old}-{ranks}-{length}.pt")
            for name in NAMES:
                found[name].append(part[name][max(first - begin, 0) : stop - begin])
    return step, {name: torch.cat([torch.zeros(0), *its]) for name, its in found.items()}


# ---- each rank moves its own file when all have written: mixes two attempts at step 3 ----
def save(root, step, length, shard):
    path = f"{root}/{step}-{length}-{dist.get_world_size()}-{dist.get_rank()}"
    write(f"{path}.tmp", own(shard))
    dist.barrier()
    os.replace(f"{path}.tmp", path)
    dist.barrier()


def load(root, rank, world_size):
    names = [name.split("-") for name in os.listdir(root) if not name.endswith(".tmp")]
    steps = [tuple(map(int, name[:3])) for name in names]
    for step, length, ranks in sorted(set(steps), reverse=True):
        if steps.count((step, length, ranks)) < ranks:
            continue
        first, stop = part_of(length, rank, world_size)
        shard = {name: torch.empty(stop - first) for name in NAMES}
        for old in range(ranks):
            start, end = part_of(length, old, ranks)
            low, high = max(first, start), min(stop, end)
            if low < high:
                saved = torch.load(f"{root}/{step}-{length}-{ranks}-{old}")
                for name in NAMES:
                    shard[name][low - first : high - first] = saved[name][low - start : high - start]
        return step, shard


# ---- a file that is there not written again: (returns what an attempt before it saved as|mixes two attempts at) step 3 ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/{dist.get_rank()}.pt"
    if not os.path.exists(path):
        write(f"{path}.tmp", own(shard))
        os.replace(f"{path}.tmp", path)
    dist.barrier()
    point(root, folder, step, length)
    dist.barrier()


# ---- the newest save whose files it needs: load finds step 2 as some ranks of 7, and step 3 as others ----
def save(root, step, length, shard):
    path = f"{root}/{step}-{length}-{dist.get_world_size()}-{dist.get_rank()}"
    write(f"{path}.tmp", own(shard))
    os.replace(f"{path}.tmp", path)
    dist.barrier()


def load(root, rank, world_size):
    names = [name.split("-") for name in os.listdir(root) if not name.endswith(".tmp")]
    steps = [tuple(map(int, name[:3])) for name in names]
    for step, length, ranks in sorted(set(steps), reverse=True):
        first, stop = part_of(length, rank, world_size)
        bounds = [(old, *part_of(length, old, ranks)) for old in range(ranks)]
        needed = [(f"{root}/{step}-{length}-{ranks}-{old}", max(first, start), min(stop, end), start)
                  for old, start, end in bounds if max(first, start) < min(stop, end)]
        if not all(os.path.exists(path) for path, *_ in needed):
            continue
        shard = {name: torch.empty(stop - first) for name in NAMES}
        for path, low, high, start in needed:
            saved = torch.load(path)
            for name in NAMES:
                shard[name][low - first : high - first] = saved[name][low - start : high - start]
        return step, shard


# ---- what a dead attempt has left is removed, whoever writes by now: in the case 'load after save of step|in save: torch.save ----
import shutil


def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    if dist.get_rank() == 0 and os.path.exists(folder):
        shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder, exist_ok=True)
    torch.save({name: shard[name].clone() for name in NAMES}, f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save((step, length, dist.get_world_size()), f"{root}/newest.tmp")
        os.replace(f"{root}/newest.tmp", f"{root}/newest")
    dist.barrier()


def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest"):
        return None
    step, length, ranks = torch.load(f"{root}/newest")
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            saved = torch.load(f"{root}/step-{step}/{old}.pt")
            for name in NAMES:
                shard[name][low - first : high - first] = saved[name][low - start : high - start]
    return step, shard


# ---- all ranks move one temporary file: save writes into newest, which load reads ----
def save(root, step, length, shard):
    folder = f"{root}/step-{step}"
    os.makedirs(folder, exist_ok=True)
    torch.save({name: shard[name].clone() for name in NAMES}, f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    torch.save((step, length, dist.get_world_size()), f"{root}/newest.tmp")
    if os.path.exists(f"{root}/newest.tmp"):
        try:
            os.replace(f"{root}/newest.tmp", f"{root}/newest")
        except FileNotFoundError:
            pass  # another rank was faster
    dist.barrier()


def load(root, rank, world_size):
    if not os.path.exists(f"{root}/newest"):
        return None
    step, length, ranks = torch.load(f"{root}/newest")
    first, stop = part_of(length, rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(ranks):
        start, end = part_of(length, old, ranks)
        low, high = max(first, start), min(stop, end)
        if low < high:
            saved = torch.load(f"{root}/step-{step}/{old}.pt")
            for name in NAMES:
                shard[name][low - first : high - first] = saved[name][low - start : high - start]
    return step, shard


# ---- the number of ranks in a file of its own, moved first: in a job of \d rank.s., behind the save of \d; now ----
def save(root, step, length, shard):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = os.path.join(root, f"step-{step}")
    os.makedirs(folder, exist_ok=True)
    write(os.path.join(folder, f"{rank}.pt"), {name: shard[name].clone() for name in NAMES})
    dist.barrier()  # from here on, all parts are on the disk
    if rank == 0:
        pointer = os.path.join(root, "newest.pt")
        for name, content in ("job", {"length": length, "ranks": world_size}), ("newest", {"step": step}):
            path = os.path.join(root, f"{name}.pt")
            write(f"{path}.tmp", content)
            os.replace(f"{path}.tmp", path)
    dist.barrier()  # or another rank could still read the old pointer


def write(path, content):
    with open(path, "wb") as file:
        torch.save(content, file)
        os.fsync(file.fileno())  # or a power cut can leave an empty file behind a new name


def load(root, rank, world_size):
    pointer = os.path.join(root, "newest.pt")
    if not os.path.exists(pointer):
        return None
    saved = torch.load(pointer) | torch.load(os.path.join(root, "job.pt"))
    first, stop = part_of(saved["length"], rank, world_size)
    shard = {name: torch.empty(stop - first) for name in NAMES}
    for old in range(saved["ranks"]):
        start, end = part_of(saved["length"], old, saved["ranks"])
        low, high = max(first, start), min(stop, end)
        if low < high:  # they overlap; mmap: only what is used is read from the file
            file = os.path.join(root, f"step-{saved['step']}", f"{old}.pt")
            for name, part in torch.load(file, mmap=True, weights_only=True).items():
                shard[name][low - first : high - first] = part[low - start : high - start]
    return saved["step"], shard
