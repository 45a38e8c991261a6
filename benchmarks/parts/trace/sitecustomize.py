"""Writes down when a process reaches the stations of its start; Python imports this by itself.

launched.py puts this folder on PYTHONPATH and names a file in BENCHMARK_TRACE. Every Python process
then appends lines "pid rank time station", so that the scripts can be measured as they are.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
import time


def mark(station):
    line = f"{os.getpid()} {os.environ.get('RANK', '-')} {time.time():.4f} {station}\n"
    file = os.open(os.environ["BENCHMARK_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())  # one write: the lines of two processes stay apart
    os.close(file)


def marked(owner, name, station):
    """Replace the function owner.name by one that marks its first call, before and after."""
    function, seen = getattr(owner, name), []

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if seen:
            return function(*args, **kwargs)
        seen.append(True)
        mark(f"{station} begins")
        result = function(*args, **kwargs)
        mark(f"{station} done")
        return result

    setattr(owner, name, wrapper)


ACTIONS = {  # module: what to do once it is imported
    "torch.distributed.distributed_c10d": lambda module: marked(
        module, "init_process_group", "init"
    ),
    "torch.nn.parallel.distributed": lambda module: marked(
        module.DistributedDataParallel, "__init__", "DDP"
    ),
    "torch.optim.sgd": lambda module: marked(module.SGD, "step", "step"),
}


class Hook(importlib.abc.MetaPathFinder):
    """Lets Python find and run a module, and then does what ACTIONS says."""

    def find_spec(self, name, path, target=None):
        if (action := ACTIONS.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)  # the other finders': this one has popped its own
        execute = spec.loader.exec_module

        def execute_and_act(module):
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act
        return spec


if "BENCHMARK_TRACE" in os.environ:
    mark("start")
    sys.meta_path.insert(0, Hook())
