"""Start a command, read what it prints, look at its processes, and end them."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import tty
from collections import deque
from dataclasses import dataclass, field

from . import cleanup, processes
from .errors import own_error
from .lines import Stream
from .processes import Process

PATIENCE = 10  # seconds for a killed process to end
READING = 0.2  # seconds after which read() returns, though the command prints without a pause
READING_REST = 5  # the same, once the command has ended
LONGEST_PLACE = 60  # characters: in a longer one, a socket's path may become too long
WHOLE_LINES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "whole_lines.py")


@dataclass
class Command:
    """A command that runs; made by start()."""

    process: subprocess.Popen  # of the command itself
    folder: str  # for its temporary files
    streams: dict[int, Stream]  # by the file descriptor that this process reads
    before: set  # the identities of older children of this process, which are not the command's
    ends: set  # the other ends of the streams, as /proc names them: "pipe:[7]"
    begin: float  # when it was started, by time.monotonic()
    ranks: dict = field(default_factory=dict)  # {identity of a process: its rank}, once seen
    errors: int = 0  # bytes that came on stderr
    tail: deque = field(default_factory=lambda: deque(maxlen=2000))  # the last lines, for error()
    namespace: str | None = None  # all its processes are in this network namespace: "net:[7]"

    def poll(self):
        """Return the status of the command, or None while it runs. (Its children may live on.)"""
        return self.process.poll()

    def read(self, timeout=0.05, echo=None):
        """Return the whole lines that have come, a list of Line; wait if there are none.

        timeout: seconds to wait for the first byte. Call it often: a command whose output nobody
            reads stands still. When the command has ended, all that was printed comes, also a last
            line without an end.
        echo: a function that gets the bytes as they are, to show them on the reader's terminal.
        """
        ended = self.poll() is not None
        if ended:
            timeout = 0
        lines, until = [], time.monotonic() + (READING_REST if ended else READING)
        while ready := select.select([*self.streams], [], [], timeout)[0]:
            for descriptor in ready:
                lines += self._read_some(descriptor, echo)
            if time.monotonic() > until:
                break
            timeout = 0
        if ended:
            for stream in self.streams.values():
                lines += stream.finish()
        self.tail.extend(lines)
        return lines

    def _read_some(self, descriptor, echo):
        """Read what one of the streams has now; return its whole lines."""
        stream = self.streams[descriptor]
        try:
            data = os.read(descriptor, 2**16)
        except OSError:  # so ends a pseudo-terminal
            data = b""
        if not data:  # all have closed it
            del self.streams[descriptor]
            os.close(descriptor)
            return stream.finish()
        if stream.name == "stderr":
            self.errors += len(data)
        lines = stream.add(data)
        if echo:
            with contextlib.suppress(OSError):  # the reader's terminal is closed
                echo(data)
        return lines

    def processes(self):
        """Return {process id: Process} of all that live, the command itself first.

        Those that have ended, and whose parents have died, are taken off the system's list.
        """
        children = {}  # {process id: [Stat, ...]}
        own_children = {command.process.pid for command in [*cleanup.running, self]}
        for stat in processes.all_stats():
            if stat.identity in self.before:
                continue
            adopted = stat.parent == os.getpid() and stat.pid not in own_children
            if adopted and stat.state == "Z":
                os.waitpid(stat.pid, os.WNOHANG)
            else:
                children.setdefault(stat.parent, []).append(stat)
        todo = children.get(os.getpid(), [])
        todo = sorted(todo, key=lambda stat: stat.pid != self.process.pid)
        found = {}
        for stat in todo:
            todo += children.get(stat.pid, [])  # the loop comes to these, too
            if not self._has(stat.pid):
                continue
            words = processes.command_line(stat.pid)
            if words is not None and not stat.ended:
                rank = self._rank(stat, found.get(stat.parent))
                found[stat.pid] = Process(stat.parent, rank, tuple(words))
        return found

    def _has(self, pid):
        """Return whether a process is this command's, and not that of one beside it."""
        if self.namespace is None or pid == self.process.pid:  # which has still to enter it
            return True
        return processes.network_namespace(pid) == self.namespace

    def _rank(self, stat, parent):
        """Return the rank of a process: its own, or that of its parent, a Process or None."""
        # Noted while it is seen: a process may write a title over its environment.
        if rank := processes.rank_in_environment(stat.pid):
            self.ranks[stat.identity] = rank
        inherited = parent.rank if parent else None
        return self.ranks.get(stat.identity) or inherited

    def keeps_lines(self, pid):
        """Return whether a process may keep lines to itself, which it has printed: in a buffer.

        So do programs whose output goes through a pipe or to a file, but for Python's.
        """
        if processes.stream_of(pid, 1) in {*self.ends, "/dev/null", ""}:
            return False
        words = processes.command_line(pid) or [""]
        path = processes.environment(pid).get("PYTHONPATH", "")
        if f"{self.folder}/site" not in path or "python" not in words[0]:
            return True
        return not {"-E", "-I", "-S"}.isdisjoint(words)  # then it does not look at PYTHONPATH

    def feeders(self, pid, among):
        """Return those of the process ids that print into a process: "train" in "train | tee"."""
        source = processes.stream_of(pid, 0)
        if source in ("/dev/null", ""):
            return []
        return [other for other in among if processes.stream_of(other, 1) == source]

    def end(self):
        """Kill all processes of the command, close its streams, and remove its folder.

        Return those that still live after ten seconds, as processes() does: another user's, say.
        """
        until = time.monotonic() + PATIENCE
        while (left := self.processes()) and time.monotonic() < until:
            for pid in left:  # each time anew, as one may have started another
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if self.process.pid in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(PATIENCE)
            time.sleep(0.005)
        self.poll()
        while self.streams:
            descriptor, _ = self.streams.popitem()
            os.close(descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self in cleanup.running:
            cleanup.running.remove(self)
            if not cleanup.running:
                processes.adopt_orphans(False)
        return left

    def error(self):
        """Return the script's own error, in a line, among the last lines that were read; or "".

        Not torchrun's report of it, and not that of a rank which another one has left. A traceback
        is told by its last line, and by the line of the script: "ValueError: no data (train.py:7)".
        """
        return own_error(self.tail)


def start(
    command, cwd=None, env=None, stdin=subprocess.DEVNULL, prefix="run", tmp=None, namespace=None
):
    """Start a command, a list of words, in a session of its own; return a Command.

    cwd, env: its working directory and its environment, default: those of this process.
    stdin: what it reads, as for subprocess.Popen. None: what this process reads, a terminal, too:
        then the command's breakpoint() works. Ctrl-C there reaches this process alone.
    prefix: of the name of its folder for temporary files, TMPDIR, which end() removes.
    tmp: another folder for these, which stays.
    namespace: the network namespace, as /proc names it, that the command enters ("net:[7]").
    One at a time, but for commands with namespaces of their own: RuntimeError if another runs.
    OSError if the command cannot be started.
    """
    check_start(namespace)
    with cleanup.later():  # a signal may come as soon as all is noted
        processes.adopt_orphans()
        folder = tempfile.mkdtemp(prefix=prefix, dir=place())
        begin, streams, ends = time.monotonic(), {}, []
        try:
            env = prepare(folder, dict(os.environ if env is None else env), tmp)
            for name, make_pair in ("stdout", make_terminal), ("stderr", os.pipe):
                reader, writer = make_pair()
                streams[reader] = Stream(name, begin)
                ends.append(writer)
            names = {os.readlink(f"/proc/self/fd/{end}") for end in ends}
            mine = [stat for stat in processes.all_stats() if stat.parent == os.getpid()]
            before = {stat.identity for stat in mine}
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=ends[0],
                stderr=ends[1],
                start_new_session=True,
            )
            running = Command(process, folder, streams, before, names, begin, namespace=namespace)
            cleanup.running.append(running)
            return running
        except BaseException:
            ends += streams
            shutil.rmtree(folder, ignore_errors=True)
            if not cleanup.running:
                processes.adopt_orphans(False)
            raise
        finally:
            for descriptor in ends:
                os.close(descriptor)


def check_start(namespace):
    """Raise RuntimeError if another command runs, and could not be told from one that starts now.

    OSError where there is no /proc. namespace: that of the new command, or None.
    """
    known = [running.namespace for running in cleanup.running]
    if known and (None in [*known, namespace] or namespace in known):
        raise RuntimeError("one foreign command at a time: end() the one before")
    if not os.path.exists("/proc/self/stat"):
        raise OSError("processes are found by /proc: that needs Linux")


def prepare(folder, env, tmp=None):
    """Fill the folder of a command; return its environment, which points there.

    env: {variable: value}. tmp: another folder for temporary files, if not None.
    """
    for name in "tmp", "site":
        os.mkdir(f"{folder}/{name}")
    shutil.copyfile(WHOLE_LINES, f"{folder}/site/sitecustomize.py")
    path = [f"{folder}/site", *filter(None, [env.get("PYTHONPATH")])]
    return env | {"TMPDIR": tmp or f"{folder}/tmp", "PYTHONPATH": os.pathsep.join(path)}


def make_terminal():
    """Return the two ends of a pseudo-terminal: (what this process reads, what is written to)."""
    try:
        reader, writer = os.openpty()
        tty.setraw(writer)  # what is written comes as it is
    except OSError:
        reader, writer = os.pipe()  # no terminal is left: then as it comes
    return reader, writer


def place():
    """Return where temporary files may lie: a socket's path among them has 107 bytes at most."""
    here = tempfile.gettempdir()
    return "/tmp" if len(here) > LONGEST_PLACE and os.access("/tmp", os.W_OK) else here
