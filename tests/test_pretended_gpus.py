"""Which GPU each process takes, and what it says to NCCL: on machines that have no GPU.

torch says that there are GPUs, and what the scripts ask torch.cuda for is written down, up to
init_process_group. What happens from there on only a GPU can tell: test_gpu.py.
"""

import functools
import json
import os
import re

import pytest
import torch
import torch.distributed as dist
from support import ROOT, fork_ranks, fork_workers

RECIPES = [f"recipes/{path.name}" for path in sorted(ROOT.glob("recipes/*.py"))
           if "    torchrun " in path.read_text()]  # fmt: skip
SCRIPTS = ["02_torchrun_elastic.py", "04_collectives.py", "launch/check_machines.py", *RECIPES]
PARALLEL = "06_model_parallel_ddp.py"


def pretend(count):
    """Called in a child: torch says that there are so many GPUs; the process ends at its group."""
    asked = []
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: count
    torch.cuda.set_device = lambda device: asked.append(f"set_device({device})")
    to = torch.Tensor.to
    torch.Tensor.to = lambda *args, **kwargs: asked.append("Tensor.to") or to(*args, **kwargs)

    def init_process_group(backend, rank=None, device_id=None, **_):
        rank = os.environ["RANK"] if rank is None else rank
        line = {"asked": asked, "backend": backend, "device_id": str(device_id),
                "TORCH_DIST_USE_NCCL2": os.environ.get("TORCH_DIST_USE_NCCL2"),
                "creator": creator_of_nccl()}  # fmt: skip
        print(f"group of rank {rank}: {json.dumps(line)}\n", end="", flush=True)
        os._exit(0)

    dist.init_process_group = init_process_group


def creator_of_nccl():
    """The name of what makes a group of NCCL, as torch chooses it now; None before torch 2.15.

    torch has no public way to ask.
    """
    c10d = dist.distributed_c10d
    if not hasattr(c10d, "ProcessGroupNCCL2"):
        return None
    c10d._register_builtin_nccl_backend()
    return c10d.Backend._plugins["NCCL"].creator_fn.__name__


def groups(result):
    """{rank: what it asked for}, of a result of pretend."""
    found = re.findall(r"^group of rank (\d+): (.+)$", result.output, re.MULTILINE)
    return {int(rank): json.loads(line) for rank, line in found}


def check(result, world_size, devices, bound=True, old=False):
    """devices: {rank: the number of its GPU}."""
    found = groups(result)
    assert sorted(found) == list(range(world_size)), result.output
    for rank, said in found.items():
        assert said["asked"] == [f"set_device({devices[rank]})"], "and nothing before or after it"
        assert said["backend"] in ("nccl", "cpu:gloo,cuda:nccl")
        assert said["device_id"] == (f"cuda:{devices[rank]}" if bound else "None")
        assert said["TORCH_DIST_USE_NCCL2"] == ("0" if old else None)
        if said["creator"]:  # torch 2.15 or later
            new = "_create_nccl2_process_group"
            assert said["creator"] == ("_create_nccl_process_group" if old else new)


@pytest.mark.parametrize("script", [*SCRIPTS, "03_multinode.py"])
def test_a_machine_of_eight(tmp_path, script):
    result = fork_ranks(script, cwd=tmp_path, world_size=8, before=functools.partial(pretend, 8))
    check(result, 8, range(8))


@pytest.mark.parametrize("script", ["03_multinode.py", "launch/check_machines.py"])
def test_two_machines_of_two(tmp_path, script):
    before = functools.partial(pretend, 2)
    result = fork_ranks(script, cwd=tmp_path, world_size=4, nodes=2, before=before)
    check(result, 4, [0, 1, 0, 1])


def test_mp_spawn(tmp_path):
    args = {"total_epochs": 1, "save_every": 1, "batch_size": 64, "data_dir": "data"}
    result = fork_workers("01_single_node_multi_gpu.py", tmp_path, 4, checkpoint_path="c.pt",
                          before=functools.partial(pretend, 4), **args)  # fmt: skip
    check(result, 4, range(4))


def test_a_stage_for_each_gpu(tmp_path):
    result = fork_ranks(PARALLEL, "--mode", "pipeline", cwd=tmp_path, world_size=4,
                        before=functools.partial(pretend, 4))  # fmt: skip
    check(result, 4, range(4))


def test_two_gpus_a_process(tmp_path):
    """The group must not be bound to one of the two: torch 2.15's new backend would do that."""
    result = fork_ranks(PARALLEL, "--mode", "devices", cwd=tmp_path, world_size=2,
                        before=functools.partial(pretend, 4))  # fmt: skip
    check(result, 2, [0, 2], bound=False, old=True)
