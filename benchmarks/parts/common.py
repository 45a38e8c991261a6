"""What the benchmarks share: ranks to measure in, turns taken fairly, tables and files of results.

None of this is needed to train; the scripts at the top level use none of it.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.util
import json
import os
import pathlib
import platform
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load_script(name):
    """Import a script of the collection: what is measured is its own functions, not copies."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(function, world_size, *args):
    """Call function(rank, world_size, store, *args) in new processes; return what rank 0 returns.

    The result travels as JSON. store is a TCPStore that all ranks are connected to.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.json")
        mp.spawn(_rank, (world_size, store.port, path, function, args), nprocs=world_size)
        return json.loads(pathlib.Path(path).read_text())


def _rank(rank, world_size, port, path, function, args):
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "WORLD_SIZE": str(world_size)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback: private
    share_cores(world_size)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    result = function(rank, world_size, store, *args)
    if rank == 0:
        pathlib.Path(path).write_text(json.dumps(result))


@contextlib.contextmanager
def process_group(backend, store, name, rank, world_size):
    """A process group for the length of a with block; name is a word that no other group had."""
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    yield
    gc.collect()  # whatever still refers to the group, DDP in a reference cycle, goes first
    dist.destroy_process_group()


def find_gpus(least=1):
    """Return (how many GPUs the scripts can use, "cuda" or such), or (0, "cpu") if below least."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    # For Apple's GPUs torch names Gloo, which cannot send their tensors.
    backend = dist.Backend.default_device_backend_map.get(gpu.type, "gloo") if gpu else "gloo"
    count = torch.accelerator.device_count() if backend != "gloo" else 0
    return (0, "cpu") if count < least else (count, gpu.type)


def seconds(call, device):
    """Return how long all ranks together take for call(), from a common start to the last's end."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    dist.barrier()
    start = time.perf_counter()
    call()
    wait()
    dist.barrier()
    return time.perf_counter() - start


def alternate(sides, rounds):
    """{name: results} of the calls in sides, which take turns; the first turn of each is not kept.

    In turns, because a machine's speed drifts: what is compared was measured close together. In
    another order in each round, as the turn before can help or harm. All ranks have that order.
    """
    for call in sides.values():
        call()
    results, order = {name: [] for name in sides}, random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(sides), len(sides)):
            results[name].append(sides[name]())
    return results


def spread(values):
    """[median, least, most]"""
    return [statistics.median(values), min(values), max(values)]


def paired(above, below):
    """[median, least, most] of the ratios of two lists of results, round by round."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def describe_machine(device="cpu"):
    """What a result depends on, as text: processor, cores, GPU, versions, and the day."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        model = found[1] if found else model
    gpu = torch.get_device_module(device).get_device_name() if device != "cpu" else None
    return {
        "processor": model,
        "cores": count_cores(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def caption(machine):
    """One line for below a table or a picture."""
    what = machine["gpu"] or f"{machine['cores']} cores, {machine['processor']}"
    return f"{what}; torch {machine['torch']}, Python {machine['python']}; {machine['date']}"


def print_table(title, columns, rows):
    """Print rows, lists of text and numbers, under a line of column names: text left, rest right.

    columns: {name: format of a number, such as ".1f"}. None is printed as a dash.
    """

    def text(cell, form):
        return cell if isinstance(cell, str) else "-" if cell is None else format(cell, form)

    cells = [
        [text(cell, form) for cell, form in zip(row, columns.values(), strict=True)] for row in rows
    ]
    print(f"\n{title}")
    left = [all(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in [list(columns), *cells]:
        print(
            "  ".join(
                cell.ljust(width) if flush else cell.rjust(width)
                for cell, width, flush in zip(line, widths, left, strict=True)
            ).rstrip()
        )


def finish(name, args, device, settings, figures, tables):
    """Print tables and the JSON line; write the line to a file, and draw it, for later.

    figures: what was measured, raw; tables: [(title, columns, rows)], calculated from them.
    """
    machine = describe_machine(device)
    for table in tables:
        print_table(*table)
    print(f"\n{caption(machine)}")
    result = {
        "benchmark": name,
        "device": device,
        "machine": machine,
        "settings": settings,
        "caption": caption(machine),
        "figures": figures,
        "tables": [{"title": t, "columns": list(c), "rows": rows} for t, c, rows in tables],
    }
    line = json.dumps(result)
    print(line, flush=True)
    path = args.results_dir / f"{name}-{device}.json"
    path.write_text(f"{line}\n")
    try:
        from parts import plot
    except ImportError as error:
        print(f"no picture: {error}; pip install -r requirements-dev.txt", file=sys.stderr)
    else:
        plot.draw(path)


def share_cores(processes, policy="SCHED_BATCH"):
    """Divide this machine's cores among its processes, which Linux schedules by that policy."""
    torch.set_num_threads(max(1, count_cores() // processes))
    if find_gpus() == (0, "cpu"):  # the scripts leave the scheduling as it is on GPUs
        with contextlib.suppress(AttributeError, OSError):
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


def count_cores():
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def number(text):
    """For options: a whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return int(text)


def folder(text):
    """For options: a folder in which files can be made; made if it is not there."""
    try:
        pathlib.Path(text).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=text).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return pathlib.Path(text)


def parser(description, rounds):
    """A parser with the options that all benchmarks have."""
    new = argparse.ArgumentParser(description=description.partition("\n")[0])
    new.add_argument(
        "--rounds", type=number, default=rounds, help=f"turns a side; default {rounds}"
    )
    new.add_argument(
        "--results-dir",
        type=folder,
        default=RESULTS,
        help="for the JSON and the picture; default benchmarks/results",
    )
    return new
