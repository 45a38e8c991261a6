import os


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


def seed_step(step, rank, world_size):
    torch.manual_seed(step * world_size + rank)


# ---- the optimizer not saved: after a run that nothing killed, .* there is no momentum of 0.weight ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    return snapshot["step"] + 1


# ---- off by one: load returned 5 as the next step, and step 5 is in the snapshot already ----
def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"]


# ---- written in place: died in the middle of save, after step 1, and now path holds no whole snap ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path)


# ---- in place, and thrown away: returned 0 as the next step; the last whole ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path)


def load(path, model, optimizer):
    try:
        snapshot = torch.load(path)
    except Exception:
        return 0
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


# ---- removed first: while save runs, after step 3, there is no snapshot at path for a moment ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        if os.path.exists(path):
            os.remove(path)
        os.replace(f"{path}.tmp", path)


# ---- copied, not moved: save opens path itself to write into it ----
import shutil


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        shutil.copy(f"{path}.tmp", path)


# ---- two files: returned 4 as the next step, but the momentum ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        for name, part in (("model", [step, model]), ("optimizer", [step, optimizer])):
            torch.save([step, part[1].state_dict()], f"{path}.tmp")
            os.replace(f"{path}.tmp", f"{path}.{name}")


def load(path, model, optimizer):
    if not os.path.exists(f"{path}.optimizer"):
        return 0
    step, state = torch.load(f"{path}.model")
    model.load_state_dict(state)
    optimizer.load_state_dict(torch.load(f"{path}.optimizer")[1])
    return step + 1


# ---- only rank 0 goes on: and on all ranks \[6, 0 ----
def load(path, model, optimizer):
    if dist.get_rank() > 0 or not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


# ---- the momentum of rank 0 alone: Rank 1: .* there is no momentum of 0.weight ----
def load(path, model, optimizer):
    snapshot = [None]
    if dist.get_rank() == 0 and os.path.exists(path):
        snapshot = [torch.load(path)]
        optimizer.load_state_dict(snapshot[0].pop("optimizer"))
    dist.broadcast_object_list(snapshot)
    if snapshot[0] is None:
        return 0
    model.load_state_dict(snapshot[0]["model"])
    return snapshot[0]["step"] + 1


# ---- every rank writes: ranks \[0, 1\] all write a snapshot ----
def save(path, model, optimizer, step):
    if True:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


# ---- no snapshot: no rank has written a snapshot ----
def save(path, model, optimizer, step):
    pass


# ---- not seeded: torch.rand gave different numbers ----
def seed_step(step, rank, world_size):
    pass


# ---- seeded in the first step only: torch.rand gave different numbers ----
def seed_step(step, rank, world_size):
    if step == 0:
        torch.manual_seed(step * world_size + rank)


# ---- a generator of its own: torch.rand gave different numbers ----
def seed_step(step, rank, world_size):
    torch.Generator().manual_seed(step * world_size + rank)


# ---- the same on all ranks: rank 1 draws in step 0 what rank 0 draws in step 0 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step)


# ---- a sum of step and rank: rank 0 draws in step 1 what rank 1 draws in step 0 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step + rank)


# ---- hard-coded for two ranks: with 4000 ranks, rank 0 draws in step 1 what rank 2 draws in step 0 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step * 2 + rank)


# ---- other numbers in each life: seed_step gives other numbers in this life ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step * world_size + rank + 10**9 * os.getpid())


# ---- seeds that meet later: with 4000 ranks, rank 1 draws in step 100 what rank 2 draws in step 0 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(rank * 100 + step)


# ---- buffers not saved: the buffer 3.passes has other bits ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": list(model.parameters()), "optimizer": optimizer.state_dict(),
                 "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    with torch.no_grad():
        for p, saved in zip(model.parameters(), snapshot["model"], strict=True):
            p.copy_(saved)
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


# ---- the learning rate not saved: the learning rate has other bits ----
def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(snapshot["optimizer"] | {"param_groups": settings})
    return snapshot["step"] + 1


# ---- from another folder: the new snapshot comes from another folder, .*/tmp ----
import tempfile


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        with tempfile.NamedTemporaryFile(delete=False) as file:
            torch.save(state, file)
        os.replace(file.name, path)


# ---- the old one moved away: now with path alone, no other file, load |for a moment ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if os.path.exists(path):
            os.replace(path, f"{path}.old")
        torch.save(state, path)


def load(path, model, optimizer):
    for one in (path, f"{path}.old"):
        try:
            snapshot = torch.load(one)
        except Exception:
            continue
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        return snapshot["step"] + 1
    return 0


# ---- the old one moved away, and the new one in its place: there is no snapshot at path ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        if os.path.exists(path):
            os.replace(path, f"{path}.old")
        os.replace(f"{path}.tmp", path)
        if os.path.exists(f"{path}.old"):
            os.remove(f"{path}.old")


def load(path, model, optimizer):
    for one in (path, f"{path}.old"):
        if os.path.exists(one):
            snapshot = torch.load(one)
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            return snapshot["step"] + 1
    return 0


# ---- the first one in place: died in the middle of save, after step 1, and now path holds no ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if not os.path.exists(path):
            return torch.save(state, path)
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


# ---- a new start made by load: there is no snapshot, and after load the weight .* has other bits ----
def load(path, model, optimizer):
    if not os.path.exists(path):
        for p in model.parameters():
            p.data.mul_(0.5)
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


# ---- a stride of a thousand: with 4000 ranks, rank 0 draws in step 1024 what rank 1 .* in step 24 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(rank * 1000 + step)


# ---- a stride of ten thousand: with 4000 ranks, rank 0 draws in step 10240 what rank 1 draws ----
def seed_step(step, rank, world_size):
    torch.manual_seed(rank * 10_000 + step)


# ---- a stride of 1000 ranks: with 4000 ranks, rank 1024 draws in step 0 what rank 24 draws in step 1 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step * 1000 + rank)


# ---- bits side by side: with 4000 ranks, rank \d+ draws in step \d+ what rank \d+ draws ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step << 8 ^ rank)


# ---- a hash of text: seed_step gives other numbers in this life ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step * world_size + rank + hash("dropout"))


# ---- what was drawn before decides: torch.rand gave different numbers ----
def seed_step(step, rank, world_size):
    torch.manual_seed(int(torch.randint(10**9, ())) + step * world_size + rank)


# ---- two factors, for the step and for the rank: with 4000 ranks, rank \d+ draws in step \d+ what rank \d+ draws ----
import os
import torch
import torch.distributed as dist


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


def seed_step(step, rank, world_size):
    torch.manual_seed(step * world_size + rank)

# WRONG: 1009 * 9176 = 9176 * 1009: rank 1009 of step 0 draws what rank 0 of step 9176 draws
def seed_step(step, rank, world_size):
    torch.manual_seed(1009 * step + 9176 * rank)


# ---- writes in a thread: path has changed, and nobody has called save ----
import os
import torch
import torch.distributed as dist


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


def seed_step(step, rank, world_size):
    torch.manual_seed(step * world_size + rank)

# WRONG: live tensors written by a thread while training goes on
import threading

def save(path, model, optimizer, step):
    if dist.get_rank() > 0:
        return
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}

    def write():
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    threading.Thread(target=write).start()


# ---- a hash of both numbers: with 4000 ranks, rank \d+ draws in step \d+ what rank \d+ draws ----
def seed_step(step, rank, world_size):
    torch.manual_seed(hash((step, rank)))


# ---- a CRC of text: with 4000 ranks, rank \d+ draws in step \d+ what rank \d+ draws ----
import zlib


def seed_step(step, rank, world_size):
    torch.manual_seed(zlib.crc32(f"{step} {rank}".encode()))


# ---- 63 bits at random: with 4000 ranks, rank \d+ draws in step \d+ what rank \d+ draws ----
import random


def seed_step(step, rank, world_size):
    torch.manual_seed(random.Random(f"{step} {rank}").getrandbits(63))


# ---- the rank in the upper bits: rank 1 draws in step 0 what rank 0 draws .*\n.*the lower 32 bits ----
def seed_step(step, rank, world_size):
    torch.manual_seed((rank << 32) + step)


# ---- a lock that stays: after step 1, and now no save writes a whole snapshot any more ----
def save(path, model, optimizer, step):
    if dist.get_rank() > 0:
        return
    try:
        os.close(os.open(f"{path}.lock", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return  # another one is at it
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    os.remove(f"{path}.lock")


# ---- only names bound to what was loaded: the weight 0.weight has other bits ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        torch.save((model, optimizer, step), f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    model, optimizer, step = torch.load(path, weights_only=False)
    return step + 1


# ---- a temporary file that must be new: FileExistsError(?s:.*)may have left it behind ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        with open(f"{path}.tmp", "xb") as file:
            torch.save(state, file)
        os.replace(f"{path}.tmp", path)


# ---- all ranks tidy up: several ranks remove the same file in load ----
def load(path, model, optimizer):
    if os.path.exists(f"{path}.tmp"):  # left by a save that died
        os.remove(f"{path}.tmp")
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1


# ---- one stream for a step, of which a rank skips some: rank 1 draws in step 0 what rank 0 draws in step 0 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step)
    torch.rand(rank)


# ---- a hash of 32 bits, by the default generator: with 4000 ranks, rank \d+ draws in step \d+ what rank \d+ draws ----
import hashlib


def seed_step(step, rank, world_size):
    digest = hashlib.sha256(f"{step}/{rank}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:4], "little"))
