"""Machines of launch/lab for tests: brought up with a name of their own, and taken down."""

import os
import re
import subprocess
import threading
import time
import uuid

import pytest
from started import ACTIVE, ROOT, Result, end, start, wait_until

LAB = ROOT / "launch/lab"


class Lab:
    """Some machines, as long as the "with" lasts."""

    def __init__(self, cwd, *up):
        self.cwd, self.up = cwd, up
        self.env = {"LAB": uuid.uuid4().hex, **ACTIVE}
        self.jobs = []

    def __call__(self, *words, check=True):
        """Call launch/lab with these words; return its output."""
        result = subprocess.run(
            [LAB, *map(str, words)],
            env={**os.environ, **self.env},
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        if check and result.returncode:
            raise RuntimeError(result.stdout)
        return result.stdout

    def __enter__(self):
        try:
            self("up", *self.up)
        except RuntimeError as error:
            causes = "lets", "there is no", "only Linux", "cannot hold"  # launch/lab's own words
            if any(cause in str(error) for cause in causes):
                pytest.skip(f"no machines of launch/lab here: {error}")
            raise
        return self

    def __exit__(self, *_):
        for job in self.jobs:
            end(job.process)
        self("down")

    def start(self, node, *command, **env):
        self.jobs.append(
            Job(start(LAB, "run", node, *command, cwd=self.cwd, env={**self.env, **env}))
        )
        return self.jobs[-1]

    def run(self, *calls, timeout=300, **env):
        """Run each (node, command...) at the same time; return their Results."""
        return [job.result(timeout) for job in [self.start(*call, **env) for call in calls]]


class Job:
    """A command on a machine, its lines with the moment of their coming."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def wait_for(self, pattern, after=0, timeout=90):
        """Return (moment, line) of the first line after that moment that matches the pattern."""

        def found():
            ended = self.process.poll() is not None and not self.reader.is_alive()
            lines = [
                line for line in list(self.lines) if line[0] > after and re.search(pattern, line[1])
            ]
            assert lines or not ended, f"ended without {pattern!r}:\n{self.output()}"
            return lines[:1]

        return wait_until(found, lambda: f"{pattern!r} does not come:\n{self.output()}", timeout)[0]

    def output(self):
        return "".join(f"{line}\n" for _, line in list(self.lines))

    def result(self, timeout=60):
        self.process.wait(timeout)
        self.reader.join(10)
        return Result(self.output(), self.process.returncode)
