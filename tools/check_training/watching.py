"""Runs the command with the recorder in it, and ends it when the time is up or it stands still."""

import contextlib
import os
import pathlib
import signal
import sys
import time
from dataclasses import dataclass

import foreign_command

from .lines import Standing
from .recording import SITE

CTRL_C = 128 + signal.SIGINT  # the exit status, as foreign_command.cleaning_up() raises it
LAST_SAVE = 15  # seconds that a script has to save after SIGTERM
# What a process may be in for long, and no other rank need come for it to go on.
ALONE = {"", "the loader", "forward", "a file"}


@dataclass(slots=True)
class Watched:
    """How the command ended."""

    status: int | None  # its exit status; None: it was ended
    ended: str  # why it was ended: "seconds", "stall", "Ctrl-C"; "": it ended by itself
    error: str  # the script's own error, in a line; "" if it has said none

    @property
    def here(self):
        """Whether it has just run here; else its records alone are known, and it may go on."""
        return self.status is not None or bool(self.ended)


ELSEWHERE = Watched(status=None, ended="", error="")


def watch(command, records, variables, seconds, stall):
    """Run a command, a list of words, with its output shown; return a Watched.

    records: the folder for the records. variables: {name: value} that are added to the environment,
    as of recording.py. seconds: end it so long after its first records. stall: end it when it
    stands still for so many seconds. OSError if the command cannot be started.
    """
    running = foreign_command.start(
        command, stdin=None, prefix="check", env={**os.environ, **variables}
    )
    try:
        ended = wait_for_the_end(running, records, seconds, stall)
    except SystemExit as end:
        if end.code != CTRL_C:
            raise
        ended = "Ctrl-C"  # what was recorded is judged nevertheless
    status = running.poll()
    if ended == "seconds":  # a script that saves on SIGTERM may do so
        running.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + LAST_SAVE
        while running.poll() is None and time.monotonic() < until:
            running.read(0.2, echo=echo)
    running.read(0.2, echo=echo)
    error = running.error()
    running.end()
    return Watched(status, ended, error)


def echo(data):
    """Show bytes of the command's output."""
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def wait_for_the_end(running, records, seconds, stall):
    """Return why the command is to be ended, "seconds" or "stall"; "" if it has ended by itself."""
    begin = moved = time.monotonic()
    files, cpu_before, has_joined = None, None, False
    old = files_of(records)
    while running.poll() is None:
        lines = running.read(0.2, echo=echo)
        before, files = files, files_of(records)
        if not has_joined and any(name.endswith(".jsonl") for name in files.keys() - old):
            has_joined, begin = True, time.monotonic()  # its start is not counted
        still = time.monotonic() - moved
        if lines or files != before or not files:
            moved, cpu_before = time.monotonic(), None
        elif cpu_before is None and still > 1:
            cpu_before = cpu_seconds(running)
        if time.monotonic() - begin > seconds:
            return "seconds"
        if cpu_before is not None and still > stall:
            waiting = are_waiting(files)
            idle = cpu_seconds(running) - cpu_before < 0.1 * stall
            if any(waiting) and (all(waiting) or idle):
                return "stall"
    return ""


def files_of(records):
    """Return {name: size of a file of records, or the content of another one}."""
    return {
        path.name: path.stat().st_size if path.suffix == ".jsonl" else path.read_bytes()
        for path in pathlib.Path(records).iterdir()
        if path.name != SITE and path.is_file()
    }


def are_waiting(files):
    """Return for each process that lives whether it waits for others. files: as of files_of()."""
    living = [
        Standing.read(content)
        for name, content in files.items()
        if name.endswith(".now") and os.path.exists(f"/proc/{name.split('-')[-2]}")
    ]
    return [each.what not in ALONE and not each.failed for each in living]


def cpu_seconds(running):
    """Return the seconds of CPU time that the command's living processes have used."""
    ticks = 0
    for process in running.processes():
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")
