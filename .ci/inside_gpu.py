"""What .ci/one_gpu.py runs inside processes of its own, under torchrun.

    torchrun ... .ci/inside_gpu.py NAME                                  prints FIGURES {...}
    torchrun ... .ci/inside_gpu.py run SETTINGS SCRIPT [ARGUMENT ...]    a script, as it is

SETTINGS, joined by "+": plain; deterministic (as template/README.md has them); same-gpu (all ranks
take GPU 0); gloo (by Gloo, with tensors on the GPU); syncs (count what waits for the GPU).
Without a GPU, all runs on the CPU as far as it can.
"""

import atexit
import contextlib
import gc
import io
import json
import linecache
import os
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from datetime import timedelta

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


def run(settings, script, *arguments):
    """Run a script under settings."""
    settings = settings.split("+")
    if {"same-gpu", "gloo"} & set(settings):
        os.environ["LOCAL_RANK"] = "0"
    if "gloo" in settings:
        dist.get_default_backend_for_device = lambda device: "cpu:gloo,cuda:gloo"
    if "deterministic" in settings:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    if "syncs" in settings:
        count_synchronisations()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def count_synchronisations():
    """Print at the exit which lines of this collection made the CPU wait for the GPU."""
    counts, owner = Counter(), os.getpid()

    def note(message, *_, **__):
        if "synchronizing CUDA operation" not in str(message):
            return
        frame, where = sys._getframe(), "PyTorch"
        while frame:
            path = frame.f_code.co_filename
            if path.startswith(ROOT) and path != os.path.abspath(__file__):
                line = linecache.getline(path, frame.f_lineno).strip()
                where = f"{os.path.basename(path)}: {line[:70]}"
                break
            frame = frame.f_back
        counts[where] += 1

    def show():
        if os.getpid() == owner:
            print(f"SYNCS {json.dumps(dict(counts.most_common()))}", flush=True)

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    atexit.register(show)


class Net(nn.Module):
    """Blocks of two layers, with dropout for what checkpoints must draw again."""

    def __init__(self, width=256, blocks=4, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
            )
            for _ in range(blocks)
        )
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale


def batch(rows=512, width=256):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, rows, width, generator=generator).to(DEVICE)


def train(model, optimizer, steps=3, clip=None):
    inputs, targets = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def off(found, expected):
    """How far two lists of tensors are from each other, relative to the second."""

    def flat(tensors):
        whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
        return torch.cat([t.detach().double().flatten() for t in whole])

    expected = flat(expected)
    return float(f"{((flat(found) - expected).norm() / expected.norm()).item():.1e}")


def message(call):
    """What call() raises, its first line; "no error" if nothing."""
    try:
        call()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
    return "no error"


def sharded():
    """FSDP2 on a mesh of this rank alone."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))

    def shard(model, **options):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, **options)
        return model

    plain, model = Net().to(DEVICE), shard(Net().to(DEVICE))
    expected, optimizer = (torch.optim.AdamW(m.parameters()) for m in (plain, model))
    train(plain, expected, clip=0.1)
    train(model, optimizer, clip=0.1)
    found = {"FSDP2, 3 AdamW steps: off by": off(model.parameters(), plain.parameters())}

    half = shard(
        Net().to(DEVICE),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    train(half, torch.optim.AdamW(half.parameters()))
    found["FSDP2 with bfloat16: off by"] = off(half.parameters(), plain.parameters())

    with torch.device("meta"):
        empty = Net()
    shard(empty).to_empty(device=DEVICE)
    with torch.no_grad():
        empty.scale.fill_(1)
    second = torch.optim.AdamW(empty.parameters())
    folder = tempfile.mkdtemp()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=f"{folder}/a")
    dcp.async_save(state, checkpoint_id=f"{folder}/b").result()
    for name in "ab":
        state = dict(zip(("model", "optimizer"), get_state_dict(empty, second), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_state_dict(
            empty, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        found[f"meta device, dcp {name}: off by"] = off(empty.parameters(), model.parameters())
    train(model, optimizer)
    train(empty, second)
    found["3 steps after the load: off by"] = off(empty.parameters(), model.parameters())
    return found


def mixed_precision():
    """DDP with float16 and a GradScaler."""
    plain, model = Net().to(DEVICE), DDP(Net().to(DEVICE), gradient_as_bucket_view=True)
    expected, optimizer = (torch.optim.AdamW(m.parameters()) for m in (plain, model))
    scaler = torch.amp.GradScaler(DEVICE.type)
    inputs, targets = batch()
    for attempt in range(4):
        with torch.autocast(DEVICE.type, torch.float16 if CUDA else torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        if attempt == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train(plain, expected, clip=0.1)
    return {
        "off from float32 by": off(model.parameters(), plain.parameters()),
        "scale after an inf": scaler.get_scale(),
    }


def compiled():
    """Activation checkpoints and compile() under DDP."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inputs = batch(8192 if CUDA else 64)[0]
    gradients, memory, masks = {}, {}, {}
    for name in ("plain", "checkpoint", "compile", "checkpoint, compile"):

        def wrapped(layer, name=name):
            layer = checkpoint_wrapper(layer) if "checkpoint" in name else layer
            if "compile" in name and CUDA:
                layer.compile()
            return layer

        model = Net(dropout=0.1).to(DEVICE)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = wrapped(block)
        model = DDP(model)
        for _ in range(2):
            torch.manual_seed(3)
            model.zero_grad()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            model(inputs).square().mean().backward()
        gradients[name] = [p.grad for p in model.parameters()]
        memory[name] = round(torch.cuda.max_memory_allocated() / 1e6) if CUDA else None
        del model
        gc.collect()
        # Does backward() see the masks of the forward pass? A weight's gradient tells its mask.
        layer = Masked().to(DEVICE)
        result = wrapped(layer)(torch.ones(256, 256, device=DEVICE))
        result.sum().backward()
        masks[name] = off([layer.weight.grad], [result])
    return {
        "MB at the peak": memory,
        "gradient off by (compiled dropout draws other masks)": {
            name: off(gradients[name], gradients["plain"]) for name in gradients
        },
        "masks in backward() differ from the forward pass's by": masks,
    }


class Masked(nn.Module):
    """Dropout of a weight for each number, all 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256, 256))

    def forward(self, x):
        return nn.functional.dropout(x * self.weight, 0.5)


def torchs_context_parallel():
    """The lines of recipes/context_parallel.py for GPUs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embed, self.places = nn.Embedding(9, 64), nn.Embedding(256, 64)
            self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 9)

        def forward(self, tokens, positions):
            x = (self.embed(tokens) + self.places(positions))[:, None]
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))[:, 0]

    import torch.nn.functional as F

    device, mesh = DEVICE, init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    model, plain = DDP(Transformer().to(DEVICE)), Transformer().to(DEVICE)
    tokens = torch.randint(9, (3, 129), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores = plain(tokens[:, :-1], torch.arange(128, device=device))
    F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # changed in place
    positions = torch.arange(inputs.size(1), device=device)
    try:
        with context_parallel(
            mesh, buffers=[inputs, targets, positions], buffer_seq_dims=[1, 1, 0]
        ):
            scores = model(inputs, positions)
            counted = (targets != -100).sum()
            dist.all_reduce(counted)
            loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss * dist.get_world_size() / counted).backward()
    except RuntimeError as error:
        if CUDA:
            raise
        return {"on a CPU": str(error).splitlines()[0]}
    return {
        "gradient off by": off(
            [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
        )
    }


def experts():
    """Parameters that are DTensors, and others, in one AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = {}
    for name in ("one group", "two groups"):
        model = Net().to(DEVICE)
        alone = set(model.blocks[0].parameters())
        mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, ignored_params=alone)
        groups = [[*alone], [p for p in model.parameters() if p not in alone]]
        optimizer = torch.optim.AdamW(
            model.parameters() if name == "one group" else [{"params": group} for group in groups]
        )
        found[name] = message(lambda model=model, optimizer=optimizer: train(model, optimizer))
    return found


def gloo():
    """Two ranks on GPU 0 by Gloo."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch()
    plain, model = Net().to(DEVICE), DDP(Net().to(DEVICE), gradient_as_bucket_view=True)
    nn.functional.mse_loss(plain(inputs), targets).backward()
    nn.functional.mse_loss(model(inputs[rank::world_size]), targets[rank::world_size]).backward()
    found = {
        "DDP's gradient off by": off(
            [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
        )
    }
    one = torch.full((4,), rank + 1.0, device=DEVICE)
    many = [torch.zeros(4, device=DEVICE) for _ in range(world_size)]
    wide = torch.zeros(4 * world_size, device=DEVICE)
    calls = {
        "all_reduce": lambda: dist.all_reduce(one.clone()),
        "broadcast": lambda: dist.broadcast(one.clone(), 0),
        "reduce": lambda: dist.reduce(one.clone(), 0),
        "all_gather": lambda: dist.all_gather(many, one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, one),
        "reduce_scatter": lambda: dist.reduce_scatter(one.clone(), many),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one.clone(), wide),
        "all_to_all_single": lambda: dist.all_to_all_single(wide, wide.clone()),
        "gather": lambda: dist.gather(one, many if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(one.clone(), many if rank == 0 else None, 0),
        "barrier": dist.barrier,
        "send, recv": lambda: dist.send(one, 1) if rank == 0 else dist.recv(one.clone(), 0),
    }
    said = {name: message(call) for name, call in calls.items()}
    found["work"] = ", ".join(name for name in said if said[name] == "no error")
    found["fail"] = {name: text for name, text in said.items() if text != "no error"}
    return found


def memory_of_a_process():
    """MB that this process takes of the GPU: with a context and a tensor, and with NCCL."""

    def used():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(0)
        return round((total - free) / 1e6)

    torch.ones(1, device=DEVICE)
    before = used()
    dist.all_reduce(torch.ones(1, device=DEVICE))
    return {"MB with a tensor": before, "MB after NCCL's first collective": used()}


def messages():
    """Each mistake in a process of its own; the lines that it prints."""
    start = (
        "import torch, torch.distributed as dist, tempfile, os\n"
        "def meet(backend='nccl', **more):\n"
        "    dist.init_process_group(backend, init_method='file://' + tempfile.mktemp(),"
        " rank=0, world_size=1, **more)\n"
    )
    mistakes = {
        "barrier without a device": "meet(); dist.barrier(); dist.destroy_process_group()",
        "barrier with set_device": "torch.cuda.set_device(0); meet(); dist.barrier();"
        " dist.destroy_process_group()",
        "barrier with device_id": "torch.cuda.set_device(0);"
        " meet(device_id=torch.device('cuda', 0)); dist.barrier();"
        " dist.destroy_process_group()",
        "no destroy": "torch.cuda.set_device(0); meet(); dist.all_reduce(torch.ones(1).cuda())",
        "a tensor on the CPU": "meet(); dist.all_reduce(torch.ones(1))",
        "not contiguous": "meet(); dist.all_reduce(torch.ones(4, 4).cuda().t()[1:, 1:])",
        "a GPU that is not there": "torch.cuda.set_device(1)",
        "fork after CUDA": "import torch.multiprocessing as mp; torch.ones(1).cuda();"
        " mp.start_processes(torch.cuda.set_device, (), 1,"
        " start_method='fork')",
        "a loader's worker that uses the GPU": "torch.ones(1).cuda();"
        " from torch.utils.data import DataLoader;"
        " list(DataLoader([0, 1], num_workers=1, collate_fn=lambda x: torch.ones(1).cuda()))",
        "empty all_gather": "meet(); t = torch.ones(0).cuda(); dist.all_gather([t.clone()], t)",
    }
    found = {}
    for name, code in mistakes.items():
        if CUDA:
            environment = {k: v for k, v in os.environ.items() if "TORCHELASTIC" not in k}
            printed = subprocess.run(
                [sys.executable, "-c", start + code],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            lines = [
                re.sub(
                    r"^(\[rank\d\]:|\[W.*?\] |/\S*/site-packages/\S*: |Warning: )*",
                    "",
                    line.replace("[rank0]: ", ""),
                ).strip()
                for line in (printed.stdout + printed.stderr).splitlines()
                if re.search(r"Error|[Ww]arning|WARN", line)
                and "raise " not in line
                and ("destroy_process" not in line or name == "no destroy")
            ]
            found[name] = lines[-1][:160] if lines else "nothing printed"
        else:
            compile(start + code, name, "exec")
    return found


def main():
    name, *arguments = sys.argv[1:]
    if name == "run":
        return run(*arguments)
    backend = "gloo"
    if CUDA:  # NCCL refuses two ranks on one GPU
        backend = f"cpu:gloo,cuda:{'gloo' if int(os.environ['WORLD_SIZE']) > 1 else 'nccl'}"
        torch.cuda.set_device(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if name != "messages":
        dist.init_process_group(backend, timeout=timedelta(seconds=30))
    with contextlib.redirect_stdout(io.StringIO()):
        found = globals()[name]()
    if int(os.environ["RANK"]) == 0:
        print(f"FIGURES {json.dumps(found)}", flush=True)
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
