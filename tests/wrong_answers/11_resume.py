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


# ---- the optimizer not saved: there is no momentum of 0.weight ----
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


# ---- off by one: load returned 1 as the next step: it had been taken ----
def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"]


# ---- written in place: died in the middle of save, after step 3, and now load fails: ----
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


# ---- removed first: before it moved or removed a file, and now load returned 0 ----
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


# ---- only rank 0 goes on: and on all ranks \[2, 0 ----
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


# ---- hard-coded for two ranks: with 16 ranks, rank 0 draws in step 1 what rank 2 draws in step 0 ----
def seed_step(step, rank, world_size):
    torch.manual_seed(step * 2 + rank)


# ---- other numbers in each life: at the end, the weight 0.weight has other bits ----
def seed_step(step, rank, world_size):
    torch.manual_seed((step * world_size + rank) * 10**6 + os.getpid())


# ---- seeds that meet later: with 16 ranks, rank 0 draws in step 100 what rank 1 draws in step 0 ----
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


# ---- from another folder: the new snapshot comes from another folder, .*/elsewhere ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        other = os.path.join(os.path.dirname(path), "elsewhere")
        os.makedirs(other, exist_ok=True)
        torch.save(state, f"{other}/snapshot.tmp")
        os.replace(f"{other}/snapshot.tmp", path)
