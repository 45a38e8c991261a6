"""Mistakes of pitfalls/README.md that need a GPU, and what they print."""

import os
import re
import subprocess
import sys

from one_gpu.inside.models import CUDA

BEGINNING = """
import torch, torch.distributed as dist, tempfile, os

def meet(backend="nccl", **more):
    meeting_point = "file://" + tempfile.mktemp()
    dist.init_process_group(backend, init_method=meeting_point, rank=0, world_size=1, **more)
"""
MISTAKES = {  # {name: what stands below BEGINNING}
    "barrier without a device": """
meet()
dist.barrier()
dist.destroy_process_group()
""",
    "barrier with set_device": """
torch.cuda.set_device(0)
meet()
dist.barrier()
dist.destroy_process_group()
""",
    "barrier with device_id": """
torch.cuda.set_device(0)
meet(device_id=torch.device("cuda", 0))
dist.barrier()
dist.destroy_process_group()
""",
    "no destroy": """
torch.cuda.set_device(0)
meet()
dist.all_reduce(torch.ones(1).cuda())
""",
    "a tensor on the CPU": """
meet()
dist.all_reduce(torch.ones(1))
""",
    "not contiguous": """
meet()
dist.all_reduce(torch.ones(4, 4).cuda().t()[1:, 1:])
""",
    "a GPU that is not there": """
torch.cuda.set_device(1)
""",
    "fork after CUDA": """
import torch.multiprocessing as mp
torch.ones(1).cuda()
mp.start_processes(torch.cuda.set_device, (), 1, start_method="fork")
""",
    "a loader's worker that uses the GPU": """
from torch.utils.data import DataLoader
torch.ones(1).cuda()
list(DataLoader([0, 1], num_workers=1, collate_fn=lambda items: torch.ones(1).cuda()))
""",
    "empty all_gather": """
meet()
empty = torch.ones(0).cuda()
dist.all_gather([empty.clone()], empty)
""",
}
# What can stand before a message: the rank, the logger, the file and line that warns.
PREFIXES = re.compile(r"^(\[rank\d\]:|\[W.*?\] |/\S*/site-packages/\S*: |Warning: )*")


def messages():
    """Each mistake in a process of its own: the last line that tells of it."""
    found = {}
    for name, mistake in MISTAKES.items():
        code = BEGINNING + mistake
        if not CUDA:
            compile(code, name, "exec")
            continue
        lines = [message_in(line) for line in printed_by(code) if tells(line, name)]
        found[name] = lines[-1][:160] if lines else "nothing printed"
    return found


def printed_by(code):
    """The lines that Python prints when it runs this code, outside the job."""
    environment = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (done.stdout + done.stderr).splitlines()


def tells(line, name):
    """Whether a line of output is an error or a warning about the mistake of this name."""
    if not re.search(r"Error|[Ww]arning|WARN", line) or "raise " in line:
        return False
    return "destroy_process" not in line or name == "no destroy"


def message_in(line):
    """A line without what stands before its message."""
    return PREFIXES.sub("", line.replace("[rank0]: ", "")).strip()
