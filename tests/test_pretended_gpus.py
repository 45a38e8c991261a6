"""Which GPU each process takes, and what it says to its backend: on machines that have no GPU.

What the scripts ask torch for is written down, up to init_process_group. The rest: test_gpu.py.
"""

import json
import os
import re
from functools import partial

import as_gpu
import pytest
import torch
import torch.distributed as dist
from forked import fork_ranks, fork_workers, pretend_gpus

MANY = "docs/many_processes.py"


def pretend(count, kind="cuda"):
    """Called in a child: torch says that there are so many GPUs; the process ends at its group."""
    asked = []
    pretend_gpus(count, kind)
    torch.accelerator.set_device_index = lambda index: asked.append(f"set_device_index({index})")
    to = torch.Tensor.to
    torch.Tensor.to = lambda *args, **kwargs: asked.append("Tensor.to") or to(*args, **kwargs)

    def init_process_group(backend, _=None, rank=None, device_id=None, **__):
        rank = os.environ["RANK"] if rank is None else rank
        line = {
            "asked": asked,
            "backend": backend,
            "device_id": str(device_id),
            "default": str(torch.get_default_device()),
            "TORCH_DIST_USE_NCCL2": os.environ.get("TORCH_DIST_USE_NCCL2"),
        }
        print(f"group of rank {rank}: {json.dumps(line)}\n", end="", flush=True)
        os._exit(0)

    dist.init_process_group = init_process_group


def check(result, devices, bound=True, old=False, kind="cuda", backend="nccl"):
    """devices: the number of each rank's GPU, rank by rank."""
    found = {
        int(rank): json.loads(line)
        for rank, line in re.findall(r"^group of rank (\d+): (.+)$", result.output, re.MULTILINE)
    }
    assert sorted(found) == list(range(len(devices))), result.output
    for rank, said in found.items():
        assert said["asked"] == [f"set_device_index({devices[rank]})"], "and nothing else"
        assert said["backend"] == backend
        assert said["device_id"] == (f"{kind}:{devices[rank]}" if bound else "None")
        assert said["TORCH_DIST_USE_NCCL2"] == ("0" if old else None)


@pytest.mark.parametrize(
    "script",
    [
        "02_torchrun_elastic.py",
        "03_multinode.py",
        "template/train.py",
        "04_collectives.py",
        "tools/check_machines.py",
        MANY,
    ],
)
def test_each_process_takes_the_gpu_of_its_local_rank(tmp_path, script):
    machines = {} if script[:2] in ("02", "04") else {"world_size": 4, "nodes": 2}
    result = fork_ranks(script, cwd=tmp_path, before=partial(pretend, 8), **machines)
    assert script[:2] != "04" or '"default": "cuda:1"' in result.output
    check(result, [0, 1, 0, 1] if machines else [0, 1], bound=script != MANY)
    # More processes than GPUs. (It is torch that ends MANY: for a device that is not there.)
    if script != MANY:
        result = fork_ranks(script, cwd=tmp_path, before=partial(pretend, 1))
        assert result.status == 1 and "each process needs a GPU: start fewer" in result.output


@pytest.mark.parametrize("script", ["04_collectives.py", "template/train.py", MANY])
def test_a_gpu_of_intel(tmp_path, script):  # bound to it, a job could make no group of Gloo
    result = fork_ranks(script, cwd=tmp_path, before=partial(pretend, 2, "xpu"))
    check(result, [0, 1], bound=False, kind="xpu", backend="xccl")


@pytest.mark.parametrize("script", ["02_torchrun_elastic.py", MANY])
def test_an_accelerator_without_a_backend(tmp_path, script):
    """Gloo carries no tensors of a Mac's GPU: two processes take the CPU, though there is one."""
    result = fork_ranks(script, 1, cwd=tmp_path, before=partial(pretend, 1, "mps"))
    said = '"asked": [], "backend": "gloo", "device_id": "None"'
    assert result.output.count(said) == 2, result.output


def test_mp_spawn_in_01(tmp_path):
    args = {"total_epochs": 1, "save_every": 1, "batch_size": 64, "data_dir": "data"}
    result = fork_workers(
        "01_single_node_multi_gpu.py",
        tmp_path,
        2,
        checkpoint_path="c.pt",
        before=partial(pretend, 2),
        **args,
    )
    check(result, [0, 1])


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "02_torchrun_elastic.py 1",
        "03_multinode.py 1",
        "04_collectives.py",
        MANY,
        "06_model_parallel_ddp.py 1 --mode pipeline",
        "template/train.py 4 2",
    ],
)
def test_the_defaults_of_a_gpu_on_a_cpu(tmp_path, command):
    fork_ranks(*command.split(), cwd=tmp_path, before=(as_gpu.defaults, as_gpu.device)).ok()


@pytest.mark.parametrize(
    ("mode", "world_size", "expected"),
    [
        ("pipeline", 4, {"devices": range(4)}),
        # Two GPUs a process: torch 2.15's new backend would bind the group to one of them.
        ("devices", 2, {"devices": [0, 2], "bound": False, "old": True}),
    ],
)
def test_the_devices_of_06(tmp_path, mode, world_size, expected):
    result = fork_ranks(
        "06_model_parallel_ddp.py",
        "--mode",
        mode,
        cwd=tmp_path,
        world_size=world_size,
        before=partial(pretend, 4),
    )
    check(result, **expected)
