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


# ---- rank 0 loads and tells, the last rank saves ----
import pathlib


def save(path, model, optimizer, step):
    if dist.get_rank() == dist.get_world_size() - 1:
        new = pathlib.Path(path).with_suffix(f".{step}")
        torch.save([model.state_dict(), optimizer.state_dict(), step + 1], new)
        new.rename(path)
    dist.barrier()


def load(path, model, optimizer):
    found = [None]
    if dist.get_rank() == 0 and pathlib.Path(path).exists():
        found = [torch.load(path)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return 0
    weights, state, step = found[0]
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return step


def seed_step(step, rank, world_size):
    torch.default_generator.manual_seed(rank * 100_000 + step)


# ---- a link to the file of the step ----
def save(path, model, optimizer, step):
    if dist.get_rank() > 0:
        return
    old = os.path.realpath(path) if os.path.exists(path) else None
    with open(f"{path}.{step}", "wb") as file:
        torch.save((model.state_dict(), optimizer.state_dict(), step), file)
    if os.path.lexists(f"{path}.link"):
        os.remove(f"{path}.link")
    os.symlink(f"{path}.{step}", f"{path}.link")
    os.replace(f"{path}.link", path)
    if old and old != os.path.realpath(path):
        os.remove(old)


def load(path, model, optimizer):
    try:
        weights, state, step = torch.load(path)
    except FileNotFoundError:
        return 0
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return step + 1


# ---- a folder for what is not ready, and bytes ----
import io
import tempfile


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "step": step}, buffer)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
            with open(f"{folder}/new", "wb") as file:
                file.write(buffer.getvalue())
            os.rename(f"{folder}/new", path)


# ---- the seed from a CRC of both numbers, and the step kept in the optimizer ----
import struct
import zlib


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        state = optimizer.state_dict()
        state["step"] = step
        torch.save((list(model.state_dict().values()), state), f"{path}.new")
        os.replace(f"{path}.new", path)


def load(path, model, optimizer):
    if not os.path.isfile(path):
        return 0
    tensors, state = torch.load(path)
    with torch.no_grad():
        for here, there in zip(model.state_dict().values(), tensors, strict=True):
            here.copy_(there)
    step = state.pop("step")
    optimizer.load_state_dict(state)
    return step + 1


def seed_step(step, rank, world_size):
    torch.manual_seed(zlib.crc32(struct.pack("<2i", step, rank)))  # up to 29 bits: no two meet


# ---- whole objects, which load copies from ----
def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        torch.save((model, optimizer, step), f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    saved, its_optimizer, step = torch.load(path, weights_only=False)
    model.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(its_optimizer.state_dict())
    return step + 1


# ---- all ranks tidy up, and it is no error that the file has gone ----
import pathlib


def load(path, model, optimizer):
    pathlib.Path(f"{path}.tmp").unlink(missing_ok=True)
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["step"] + 1
