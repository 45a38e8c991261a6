"""Runs the commands of one check, until its time is up."""

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import threading
import time

from started import PYTHON, ROOT, TORCHRUN, end, read_until, start

from one_gpu.printed import last_line

INSIDE = pathlib.Path(__file__).resolve().parent / "inside"  # torchrun starts its __main__.py
NOT_DONE = "not done in time"


class Shell:
    """Runs commands in a temporary folder.

    log: a function that takes all that the commands print.
    deadline: the time.monotonic() at which the check must have ended.
    pretend: hide the GPUs; the check makes all as small as it can.
    results: the folder that the caller of all checks has named, for files that are to stay.
    """

    def __init__(self, log, deadline, pretend, results):
        self.log = log
        self.deadline = deadline
        self.pretend = pretend
        self.results = results
        self.folder = tempfile.mkdtemp(prefix="one_gpu_")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        self.environment = {
            "CUDA_VISIBLE_DEVICES": "" if pretend else visible[0],
            "KINETO_LOG_LEVEL": "6",  # the profiler's library keeps its notes to itself
            "MPLBACKEND": "Agg",  # matplotlib draws without a screen
        }

    def run(self, *command, status=0, cwd=None):
        """Run a command; return what it printed.

        status: what it must end with; None: anything, and it may be cut short.
        Raises an AssertionError with the reason if it ends in another way, or not in time.
        """
        process = start(*command, cwd=cwd or self.folder, env=self.environment)
        output = ""
        try:
            output = process.communicate(timeout=self.seconds_left())[0]
            output = output.replace("\r", "")  # of what a tool ran in a terminal of its own
        except subprocess.TimeoutExpired as error:
            output = (error.output or b"").decode(errors="replace")
            if status is None:
                return f"{output}\n{NOT_DONE}"
            raise AssertionError(NOT_DONE) from None
        finally:
            end(process)
            self.note(command, output, process.returncode)
        if status is not None:
            assert process.returncode == status, f"status {process.returncode}: {last_line(output)}"
        return output

    def python(self, script, *arguments, **options):
        """run() a Python script of the repository."""
        return self.run(PYTHON, ROOT / script, *arguments, **options)

    def torchrun(self, script, *arguments, status=0, **options):
        """run() a script of the repository under torchrun; options: see torchrun_command()."""
        return self.run(*torchrun_command(script, *arguments, **options), status=status)

    def inside(self, name, ranks=1):
        """Run a function of inside/ under torchrun; return the figures that it prints."""
        output = self.torchrun(INSIDE, name, ranks=ranks)
        return json.loads(re.findall(r"^FIGURES (.*)$", output, re.MULTILINE)[-1])

    def kill_ranks_at(self, pattern, command):
        """Run a torchrun command, kill its ranks when a line matches; return the whole output.

        Raises an AssertionError if no line matches, or if torchrun does not end well or in time.
        """
        process = start(*command, cwd=self.folder, env=self.environment)
        timer = threading.Timer(self.seconds_left(), end, [process])
        timer.start()
        output = ""
        try:
            output = read_until(process, pattern, timeout=self.seconds_left())
            for pid in children(process.pid):
                os.kill(pid, signal.SIGKILL)
            # communicate() with a timeout would lose what read_until() has read ahead.
            output += process.stdout.read()
            process.wait()
        finally:
            timer.cancel()
            end(process)
            self.note(command, output, process.returncode)
        assert process.returncode == 0, f"status {process.returncode}: {last_line(output)}"
        return output

    def seconds_left(self):
        """How long the next command may take."""
        return max(1, self.deadline - time.monotonic())

    def note(self, command, output, status):
        """Log a command that has ended, as a terminal would show it."""
        words = " ".join(map(str, command))
        self.log(f"\n$ {words}\n{output}\n[status {status}]\n")


def torchrun_command(script, *arguments, ranks=1, restarts=0, settings=None):
    """The words that start a script of the repository under torchrun.

    settings: of inside/run_script.py, under which the script runs; None: it runs by itself.
    """
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    under_settings = [] if settings is None else [INSIDE, "run", settings]
    return [*TORCHRUN, *options, *under_settings, ROOT / script, *arguments]


def children(pid):
    """The process ids of those that a process has started."""
    return map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
