"""Start a command and follow its processes: for the benchmarks that measure whole jobs."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from parts.common import find_gpus

TRACE = pathlib.Path(__file__).parent / "trace"
# What a process reaches, one after the other, as trace/sitecustomize.py writes it down.
STATIONS = ("start", "init begins", "init done", "DDP done", "step done")
# Two processes: on a GPU each where there are two, else on the CPU.
DEVICE = find_gpus(least=2)[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Job:
    """A command in a folder of its own, and the stations that its processes reach.

    with Job(...) as job: at the end of the block, or on an error in it, nothing of it is left.
    """

    def __init__(self, *command):
        self.folder = tempfile.TemporaryDirectory()
        self.trace = pathlib.Path(self.folder.name, "trace.log")
        self.output = pathlib.Path(self.folder.name, "output.log")
        paths = [str(TRACE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "BENCHMARK_TRACE": str(self.trace),
        }
        if DEVICE == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.begin = time.time()
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder.name,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def stations(self):
        """{pid: {station: time}}, and under "rank" the rank that the process was given, or "-"."""
        found = {}
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        for line in lines:
            pid, rank, when, station = line.split(" ", 3)
            found.setdefault(int(pid), {"rank": rank})[station] = float(when)
        return found

    def wait_for(self, condition, patience=120):
        """Return condition(self) as soon as it is true; RuntimeError if the job ends before."""
        deadline = time.monotonic() + patience
        while True:
            ended = self.process.poll() is not None
            if result := condition(self):
                return result
            if ended or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.process.args} {'ended' if ended else 'takes too long'}:"
                    f"\n{self.output.read_text()}"
                )
            time.sleep(0.002)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()  # as a scheduler would
        self.process.wait(60)
        deadline = time.monotonic() + 60
        while any(alive(pid) for pid in self.stations()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.process.args} has left processes behind")
            time.sleep(0.01)
        self.folder.cleanup()


def alive(pid):
    """Whether a process runs; one that has ended, and that nobody has asked for yet, does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def have_reached(station, count=2, apart_from=()):
    """A condition for wait_for: {pid: stations} once count processes have reached a station.

    "start" is reached by all Python processes: there, only those count that torchrun gave a rank.
    """

    def condition(job):
        found = {
            pid: reached
            for pid, reached in job.stations().items()
            if station in reached
            and pid not in apart_from
            and (station != "start" or reached["rank"] != "-")
        }
        return found if len(found) >= count else None

    return condition
