"""The processes of this machine, as /proc shows them."""

import contextlib
import ctypes
import os
from typing import NamedTuple

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")
PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """A living process of the command."""

    parent: int  # process id; that of this process, if its own parent has died
    rank: str | None  # the RANK in its environment (or mpirun's, or srun's)
    words: tuple[str, ...]  # its command line

    @property
    def shell(self):
        """Whether it is a shell, which waits for what it has started and hears no signal."""
        return bool(self.words) and os.path.basename(self.words[0].lstrip("-")) in SHELLS

    @property
    def name(self):
        """Its command line, each word without its folder."""
        return " ".join(map(os.path.basename, self.words)) or "a process without a command line"


class Stat(NamedTuple):
    """What the system says of a process, living or ended, that its parent has not yet asked for."""

    pid: int
    state: str  # one letter: "Z" (a zombie) and "X" are processes that have ended
    parent: int  # process id
    begin: str  # its start, in clock ticks since the machine's

    @property
    def identity(self):
        """What no other process shares. (The system gives a process id again and again.)"""
        return self.pid, self.begin

    @property
    def ended(self):
        return self.state in "ZX"


def all_stats():
    """Return a list of Stat, one for each process of this machine."""
    stats = [read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return [stat for stat in stats if stat]


def read_stat(pid):
    """Return the Stat of a process, or None if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        # The second word is a name in brackets, which may hold spaces and brackets.
        state, parent, *others = file.read().rpartition(")")[2].split()
        return Stat(pid, state, int(parent), begin=others[17])
    return None


def command_line(pid):
    """Return the words of a process's command line, or None if it has ended."""
    return _parts(f"/proc/{pid}/cmdline")


def environment(pid):
    """Return {variable: value} of a process, as it was started; {} if nobody may read it."""
    return dict(text.partition("=")[::2] for text in _parts(f"/proc/{pid}/environ") or [])


def rank_in_environment(pid):
    """Return the rank that a process was started with, a text, or None."""
    variables = environment(pid)
    ranks = (variables.get(name) for name in RANKS)
    return next(filter(None, ranks), None)


def stream_of(pid, number):
    """Return where a process's stdin (0) or stdout (1) leads, or "": closed, or it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def network_namespace(pid):
    """Return the network namespace of a process, "net:[7]", or "": it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def adopt_orphans(yes=True):
    """Become the parent of descendants whose own parents die, or stop to do so. (Linux alone.)"""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system lets no process adopt orphans")


def _parts(path):
    """Return what a file of /proc has between its zero bytes, or None: the process has ended."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read().decode(errors="replace").rstrip("\0").split("\0")
    return None
