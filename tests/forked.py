"""Scripts run fast: in fresh processes, forked from a server that has torch loaded.

A run costs a tenth of a second. fork_ranks plays torchrun: its environment, one store for all
attempts, another attempt when a rank has failed. These processes skip the end of the interpreter:
what goes wrong there shows with started.run alone.
"""

import argparse
import gc
import multiprocessing
import os
import pathlib
import re
import resource
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from started import ROOT, Result

LIMIT = int(os.environ.get("FORK_LIMIT", "240"))  # seconds for a run of several ranks
forkserver = multiprocessing.get_context("forkserver")
# Starting a process also asks whether others have ended, even those of other threads. When two
# threads ask at the same moment, one of them finds the exit code gone, and reports 255.
asking = threading.Lock()
# All that the scripts and the tests' own modules import: else each process imports it anew.
forkserver.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.elastic.multiprocessing.errors",
        "torch.distributed.pipelining",
        "torchvision.datasets",
        "pytest",
        "digits",
    ]
)


def fork(script, *arguments, cwd, timeout=LIMIT / 2, before=None, env=None, environments=None):
    """Run ROOT/script in a process forked from the server; or in one for each environment."""
    return _fork(script, arguments, environments or [env or {}], cwd, timeout, before)


def fork_workers(script, cwd, world_size=2, timeout=60, before=None, **args):
    """Call worker(rank, world_size, meeting_point, args) in forked processes, like mp.spawn."""
    args = argparse.Namespace(**args)
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/meet"
        workers = [(rank, world_size, meeting_point, args) for rank in range(world_size)]
        return _fork(script, [], [{}] * world_size, cwd, timeout, before, workers)


def fork_ranks(
    script, *arguments, cwd, world_size=2, nodes=1, max_restarts=0, timeout=LIMIT, before=None
):
    """Run ROOT/script in world_size forked processes, as torchrun would on that many nodes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    output, status, local = "", None, world_size // nodes
    for attempt in range(max_restarts + 1):
        environments = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local),
                "GROUP_RANK": str(rank // local),
                "GROUP_WORLD_SIZE": str(nodes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            }
            for rank in range(world_size)
        ]
        result = _fork(script, arguments, environments, cwd, timeout, before)
        output, status = output + result.output, result.status
        if status == 0:
            break
    return Result(output, status, attempts=attempt + 1)


def _fork(script, arguments, environments, cwd, timeout, before, workers=None):
    """One process for each of the environments; when one fails, the others get SIGTERM."""
    script = pathlib.Path(script) if pathlib.Path(script).is_absolute() else ROOT / script
    with tempfile.NamedTemporaryFile() as output:
        workers = workers or [None] * len(environments)
        processes = [
            forkserver.Process(
                target=run_script,
                args=(script, arguments, env, str(cwd), output.name, before, worker),
            )
            for env, worker in zip(environments, workers, strict=True)
        ]
        for process in processes:
            with asking:
                process.start()
        deadline = time.monotonic() + timeout
        try:
            while True:
                with asking:
                    alive = [process.sentinel for process in processes if process.is_alive()]
                    status = next((p.exitcode for p in processes if p.exitcode), 0)
                if status or not alive:
                    break
                assert wait(alive, max(0, deadline - time.monotonic())), (
                    f"no end after {timeout} s:\n{pathlib.Path(output.name).read_text()}"
                )
        finally:
            for process in processes:
                process.terminate()
                process.join(10)
                process.kill()
                process.join()
        return Result(pathlib.Path(output.name).read_text(), status)


def run_script(script, arguments, environment, folder, output, before=None, worker=None):
    """In a forked process: call before, one function or several, then run the script."""
    gc.freeze()  # else gc.collect() goes through all of torch's objects
    traceback.format_stack = lambda *_, **__: []  # most of torch.manual_seed's time without a GPU
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # capsys put others in their place, if this was forked from a test (mutants.py does so).
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # What the script starts (a DataLoader's workers, say) starts as it does in a plain process. A
    # forkserver's child would start a server of its own, which imports torch anew.
    multiprocessing.set_start_method(None, force=True)
    if "RANK" in environment or worker is not None:
        # One thread for each rank: more would wait for each other, and change a result's last bits.
        torch.set_num_threads(1)  # torchrun sees to that by OMP_NUM_THREADS
        os.sched_getaffinity = lambda _: {0}  # which the scripts ask, to raise it
    if sys.version_info < (3, 11, 10):  # a fork beside Gloo's threads may hang: pitfalls/README.md
        os.register_at_fork(before=lambda: time.sleep(0.01))  # by then, these have ended
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *map(str, arguments)]
    sys.path.insert(0, str(script.parent))  # as "python SCRIPT" does
    sys.modules.pop("survive", None)  # if this was forked from a test that has imported it
    try:
        for function in before if isinstance(before, tuple) else [before] * (before is not None):
            function()
        if worker is None:
            runpy.run_path(str(script), run_name="__main__")
        else:  # call the script's function of that name instead, as mp.spawn does
            runpy.run_path(str(script))["worker"](*worker)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def variant(folder, script, changes):
    """Write ROOT/script to folder with changes in it; return its path.

    changes: code that gives names of the script another meaning, put in front of the call of main()
    (it has the old one by def name(..., old=name)); or {old text: new text}, each of which must
    stand below the docstring exactly once: else a test would change nothing, or more than it means.
    """
    text = (ROOT / script).read_text()
    if isinstance(changes, str):
        guard = '\nif __name__ == "__main__":\n'
        before, after = text.rsplit(guard, 1)
        text = f"{before}\n{changes}\n{guard}{after}"
    else:
        docstring = re.match(r'(r?""".*?""")?', text, re.DOTALL)[0]  # a recipe's has its answer
        text = text.removeprefix(docstring)
        for old, new in changes.items():
            assert text.count(old) == 1, f"{text.count(old)} times in {script}: {old!r}"
            text = text.replace(old, new)
        text = docstring + text
    path = folder / pathlib.Path(script).name
    path.write_text(text)
    if str(script).startswith("template/"):  # two files that are copied together
        shutil.copy(ROOT / "template/survive.py", folder)
    if (parts := (ROOT / script).with_suffix("")).is_dir():  # a tool, with its package
        shutil.copytree(parts, folder / parts.name)
    return path


# ---- For before=, called in each process (pretended, machine: their helpers) ----


def limit_file_size():
    """Files may grow to 20 KB, which stands in for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def pretend_gpus(count=1, kind="cuda"):
    """Torch says that there are so many GPUs, with any build of torch."""
    vars(torch.accelerator).update(
        current_accelerator=lambda check_available=False: torch.device(kind),
        is_available=lambda: True,
        device_count=lambda: count,
        set_device_index=lambda index: None,
    )


def come_late():
    """In later attempts, rank 1 looks up rank 0 before that is there."""
    join = dist.init_process_group

    def join_late(*args, **kwargs):
        time.sleep(0.5)
        join(*args, **kwargs)

    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        dist.init_process_group = join_late


def wait_before_forks():
    """Else a store's thread may hold the lock of glibc's resolver: never free in the child."""
    os.register_at_fork(before=lambda: time.sleep(0.3))


def machine():
    """The number of the machine that this forked process plays: 1, 2, ..."""
    return int(os.environ["GROUP_RANK"]) + 1


def play_machine():
    """A host name of its own, and an address that the others can reach."""
    name = f"node{machine()}"
    socket.gethostname = lambda: name
    addresses = {"node1": "10.0.0.1", "node2": "10.0.0.2"}
    look_up = socket.getaddrinfo
    socket.getaddrinfo = lambda name, *args, **kwargs: look_up(
        addresses.get(name, name), *args, **kwargs
    )


def own_disk():
    """A current folder for each machine."""
    os.makedirs(f"disk{machine()}", exist_ok=True)
    os.chdir(f"disk{machine()}")


def report_errors():
    """What torchrun would read of an error goes to report*.json."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.abspath(f"report{os.environ['RANK']}.json")
