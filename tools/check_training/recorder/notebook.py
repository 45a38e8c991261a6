"""The files of this process: its records, and what it is in at the moment."""

import mmap
import os
import time
import zlib
from dataclasses import dataclass, field

from ..lines import Standing, written
from ..records.process import Full, Started, Uses
from .script_lines import all_lines
from .state import kept, switch

MOST_RECORDS, MOST_BYTES = 300_000, 100_000_000  # of a process: whichever comes first
now = time.monotonic  # one clock for all processes of a machine


@dataclass
class Notebook:
    """The files, and how often things were noted."""

    file: int | None = None  # descriptor of the file of records; None: not open yet
    early: list[str] = field(default_factory=list)  # lines from before it was open
    standing: mmap.mmap | None = None  # the file that says what the process is in
    records: int = 0  # that were noted
    bytes: int = 0  # of their lines
    full: bool = False  # nothing more is noted
    counts: dict = field(default_factory=dict)  # {what was counted: how often, less one}


notebook = kept(Notebook())


def note(kind, **fields):
    """Write a record: a class of ../records, and its fields without the time.

    It is kept in memory until the process has joined a group, or takes a step.
    """
    if notebook.full:
        return
    line = written(kind(now(), **fields))
    notebook.records += 1
    notebook.bytes += len(line)
    if notebook.records >= MOST_RECORDS or notebook.bytes > MOST_BYTES:
        notebook.full, line = True, written(Full(now()))
    if notebook.file is None:
        notebook.early.append(line)
    else:
        os.write(notebook.file, line.encode())


def open_files():
    """Open this process's files, unless they are open, and write what was noted before."""
    if notebook.file is not None:
        return
    os.makedirs(switch.folder, exist_ok=True)  # on this machine it may not be there yet
    name = f"{switch.name_of_process}-{time.monotonic_ns()}"
    with open(f"{name}.now", "wb+") as file:
        file.write(b" " * Standing.SIZE)
        file.flush()
        notebook.standing = _shared_memory(file)
    notebook.file = os.open(f"{name}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    early, notebook.early = notebook.early, []
    note(Started, world_size=number_in_environment("WORLD_SIZE"))
    os.write(notebook.file, "".join(early).encode())


def _shared_memory(file):
    """Return a file's bytes in memory; where its file system shares none, others that stay here."""
    try:
        return mmap.mmap(file.fileno(), Standing.SIZE)
    except OSError:
        return mmap.mmap(-1, Standing.SIZE)


def number_in_environment(name):
    """Return the number that an environment variable holds, or None."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def stand(what, line="", failed=False):
    """Leave word what this process is in, in case that it does not come back; "": nothing.

    failed: it has raised an error there.
    """
    if notebook.file is not None:
        notebook.standing[:] = Standing(what, line, failed).written(now())


def stand_no_more(what, line, failed):
    """Leave word that this process is in its own code again, or with which error it came back."""
    if failed:
        stand(what, line, failed)
    else:
        stand("")


def count(what):
    """Return how often that was counted before."""
    notebook.counts[what] = notebook.counts.get(what, -1) + 1
    return notebook.counts[what]


def site(kind):
    """Return by what ranks match objects of a kind, a text and a number.

    They are the lines of the script that have made it, and how many these lines made before.
    """
    lines = f"{kind}{zlib.crc32(all_lines().encode()):x}"
    return lines, count(lines)


def uses(feature):
    """Note once that the script uses something of records.process.FEATURES."""
    if count(feature) == 0:
        note(Uses, what=feature)
