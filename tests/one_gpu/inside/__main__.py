"""Run a function of this package, or a script under settings, on each rank.

torchrun ... tests/one_gpu/inside NAME                                prints FIGURES {...}
torchrun ... tests/one_gpu/inside run SETTINGS SCRIPT [ARGUMENT ...]  see run_script.py
"""

import contextlib
import gc
import io
import json
import os
import pathlib
import sys
from datetime import timedelta

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
# The folder tests, in which the package one_gpu stands, in the place of this file's folder.
sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent.parent)

import torch
import torch.distributed as dist

from one_gpu.inside.context_parallel import context_parallel
from one_gpu.inside.features import compiled, experts, mixed_precision, sharded
from one_gpu.inside.messages import messages
from one_gpu.inside.models import CUDA
from one_gpu.inside.run_script import run_script
from one_gpu.inside.sharing import gloo_with_two_ranks, memory_of_a_process

FUNCTIONS = {
    function.__name__: function
    for function in (
        compiled,
        context_parallel,
        experts,
        gloo_with_two_ranks,
        memory_of_a_process,
        messages,
        mixed_precision,
        sharded,
    )
}


def main():
    name, *arguments = sys.argv[1:]
    if name == "run":
        run_script(*arguments)
        return
    if CUDA:
        torch.cuda.set_device(0)
    if name != "messages":  # its mistakes have processes and process groups of their own
        meet()
    with contextlib.redirect_stdout(io.StringIO()):
        figures = FUNCTIONS[name]()
    if os.environ["RANK"] == "0":
        print(f"FIGURES {json.dumps(figures)}", flush=True)
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def meet():
    """Initialize the process group. Ranks that share the GPU take Gloo: NCCL refuses them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if CUDA:
        alone = os.environ["WORLD_SIZE"] == "1"
        backend = f"cpu:gloo,cuda:{'nccl' if alone else 'gloo'}"
    dist.init_process_group(backend, timeout=timedelta(seconds=30))


if __name__ == "__main__":
    main()
