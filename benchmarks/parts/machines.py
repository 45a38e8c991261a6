"""Ranks on machines of launch/lab, for the benchmarks that need a network with a price.

A function of a benchmark runs on some machines, a rank on each. Their links are held to a rate: a
byte that travels takes time, and hardly any of the cores, as between real machines.
"""

import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LAB = ROOT / "launch/lab"
PORT = 29500  # each lab has ports of its own


def bits_per_second(rate):
    """The number behind 100mbit or 1gbit."""
    return float(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]]


@contextlib.contextmanager
def machines(count, rate):
    """Bring machines up; yield call(function, *args), which runs it on all of them.

    function(rank, world_size, store, *args) is one of a benchmark's module. call returns what rank
    0 returns (as JSON). The program ends with one line where machines cannot be made.
    """
    environment = os.environ | {"LAB": uuid.uuid4().hex}

    def lab(*words):
        return subprocess.run(
            [LAB, *map(str, words)],
            env=environment,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    result = lab("up", count, "--rate", rate)
    if result.returncode:
        sys.exit(f"this benchmark needs machines of launch/lab: {result.stdout.strip()}")
    try:
        yield lambda function, *args: run(environment, count, function, args)
    finally:
        lab("down")


def run(environment, count, function, args):
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "module": pathlib.Path(sys.modules[function.__module__].__file__).stem,
            "function": function.__name__,
            "world_size": count,
            "args": args,
            "begin": time.time(),
        }
        path = pathlib.Path(folder, "job.json")
        path.write_text(json.dumps(job))
        processes = [
            subprocess.Popen(
                [LAB, "run", f"node{rank + 1}", sys.executable, __file__, str(rank), str(path)],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
            for rank in range(count)
        ]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break  # one has failed: the others would wait for it
                time.sleep(0.05)
        finally:
            for process in processes:
                process.terminate()
        if any(statuses := [process.wait() for process in processes]):
            raise RuntimeError(
                f"{function.__name__} has failed on {count} machines, see above:"
                f" exit statuses {statuses}"
            )
        return json.loads(path.with_suffix(".result").read_text())


def main():
    """On a machine: python machines.py RANK JOB."""
    sys.path[0] = str(ROOT / "benchmarks")  # as for the benchmark itself
    import torch.distributed as dist
    from parts.common import share_cores

    rank, path = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    job = json.loads(path.read_text())
    share_cores(1)
    store = dist.TCPStore("10.77.0.1", PORT, is_master=rank == 0)
    function = getattr(importlib.import_module(job["module"]), job["function"])
    result = function(rank, job["world_size"], store, *job["args"])
    if rank == 0:
        path.with_suffix(".result").write_text(json.dumps(result | {"begin": job["begin"]}))


if __name__ == "__main__":
    main()
