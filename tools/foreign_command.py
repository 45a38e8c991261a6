"""Start a foreign command, read what it prints, see all its processes, and end them all.

The tools of this folder use it (copy both files if you take one away):

    with foreign_command.cleaning_up():  # also after Ctrl-C, SIGTERM, SIGHUP and SIGQUIT
        command = foreign_command.start(["torchrun", "--nproc-per-node=2", "train.py"])
        while command.poll() is None:
            for line in command.read():
                print(line.seconds, line.text)
        command.read()  # what it printed last
        print(command.poll(), command.processes(), command.error())

Lines come whole. The command's stdout is a pseudo-terminal, so that programs write line by line. A
Python process is told to do so even where it has no terminal, or was started with -u, as torchrun
does: print(a, b) would write each word by itself, and those of other ranks between them. (Not with
python -E and -I.) stderr is a pipe: no progress bars.

All processes are seen that descend from the command, also those with a session, a title or an
environment of their own: this process adopts them when their parents die (a "subreaper", Linux
alone). Not seen is what a server starts in its stead: docker run, systemd-run, ssh.
"""

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import tty
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")
LONGEST = 2**20  # bytes of a line: a longer one comes in pieces
PATIENCE = 10  # seconds for a killed process to end
# It runs at the start of each Python process, and then what it stands in the way of.
SITE = """
import os, sys
for stream in sys.stdout, sys.stderr:
    try:
        stream.reconfigure(line_buffering=True, write_through=False)
    except Exception:
        pass  # closed, or another object
here = os.path.dirname(__file__)
sys.path[:] = [place for place in sys.path if place != here]
from importlib.machinery import PathFinder
spec = PathFinder.find_spec("sitecustomize", sys.path)
if spec:
    from importlib.util import module_from_spec
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
"""
# Lines of torchrun (its log, its table of failures) and frames of its own stack.
LAUNCHERS = re.compile(
    r"[IWEF]\d{4} [\d:.]+ \d+ \S*(torch/|elastic/|api\.py|run\.py|launch\.py)|[=*-]{20,}|"
    r"\S+ FAILED$|(Root Cause|Failures).*:$|<NO_OTHER_FAILURES>|\[\d+\]:$| +(time|host|rank|"
    r"exitcode|error_file|traceback) *: |torch\.distributed\.elastic\.|"
    r"torch\.multiprocessing\.spawn\.ProcessRaisedException|-- Process \d+ terminated"
)
# A rank that says so has been left by another one, which had the error.
CONSEQUENCE = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|timed? ?out|"
    r"Dist(Backend|Network|Store)Error|KeyboardInterrupt|SignalException"
)


class Line(NamedTuple):
    """A line that the command printed."""

    seconds: float  # since its start, when it was read
    text: str  # without its end (a progress bar's is "\\r"), without colours
    stream: str  # "stdout" or "stderr"

    @property
    def rank(self):
        """The rank that the line names at its beginning, "[rank 1/2]" or "[rank1]:", or None."""
        found = re.match(r"\[(?:rank|default) ?(\d+)(?:/\d+)?\]", self.text)
        return int(found[1]) if found else None


class Process(NamedTuple):
    """A living process of the command."""

    parent: int  # process id; that of this process, if its own parent has died
    rank: str | None  # the RANK in its environment (or mpirun's, or srun's)
    words: tuple[str, ...]  # its command line

    @property
    def shell(self):
        """Whether it is a shell, which waits for what it has started and hears no signal."""
        return os.path.basename(self.words[0].lstrip("-")) in SHELLS if self.words else False

    @property
    def name(self):
        return " ".join(map(os.path.basename, self.words)) or "a process without a command line"


@dataclass
class Command:
    """A command that runs; made by start()."""

    process: subprocess.Popen
    folder: str  # for its temporary files
    streams: dict  # {file descriptor: (its name, what has come of its next line)}
    before: set  # {(process id, its start)}: older children of this process
    ends: set  # of its output, as /proc names them
    begin: float = field(default_factory=time.monotonic)
    ranks: dict = field(default_factory=dict)  # {(process id, its start): RANK}
    errors: int = 0  # bytes that came on stderr
    tail: deque = field(default_factory=lambda: deque(maxlen=2000))  # for error()

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
        timeout = 0 if ended else timeout
        # Not for ever, if it prints without a pause.
        lines, until = [], time.monotonic() + (5 if ended else 0.2)
        while ready := select.select([*self.streams], [], [], timeout)[0]:
            for descriptor in ready:
                name, pending = self.streams[descriptor]
                with contextlib.suppress(OSError):
                    if data := os.read(descriptor, 2**16):
                        pending += data
                        self.errors += len(data) * (name == "stderr")
                        lines += self._split(name, pending, len(data))
                        if echo:
                            echo(data)
                        continue
                del self.streams[descriptor]  # all have closed it
                os.close(descriptor)
                lines += self._split(name, pending + b"\n", 1)
            if time.monotonic() > until:
                break
            timeout = 0
        if ended:
            for name, pending in self.streams.values():
                pending += b"\n"
                lines += self._split(name, pending, 1)
        self.tail.extend(lines)
        return lines

    def _split(self, name, pending, count):
        """Take the whole lines out of what is pending, of which the last count bytes are new."""
        end = 1 + max(pending.rfind(b"\n", -count), pending.rfind(b"\r", -count))
        if not end and len(pending) > LONGEST:
            end = len(pending) - 2**12
        seconds, data = time.monotonic() - self.begin, bytes(pending[:end])
        del pending[:end]
        text = re.sub(rb"\x1b\[[0-9;?]*[@-~]", b"", data).decode(errors="replace")
        return [Line(seconds, line, name) for line in re.split(r"[\r\n]+", text) if line.strip()]

    def processes(self):
        """Return {process id: Process} of all that live, the command itself first.

        Those that have ended, and whose parents have died, are taken off the system's list.
        """
        found, children, me = {}, {}, os.getpid()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if (stat := _stat(pid)) and (pid, stat[2]) not in self.before:
                state, parent, begin = stat
                if state == "Z" and parent == me and pid != self.process.pid:
                    os.waitpid(pid, os.WNOHANG)
                else:
                    children.setdefault(parent, []).append((pid, parent, state, begin))
        todo = sorted(children.get(me, []), key=lambda child: child[0] != self.process.pid)
        for pid, parent, state, begin in todo:
            todo += children.get(pid, [])
            words = _read(pid, "cmdline")
            if state not in "ZX" and words is not None:
                # Noted while it is seen: a process may write a title over its environment.
                if rank := _rank(pid):
                    self.ranks[pid, begin] = rank
                rank = self.ranks.get((pid, begin)) or getattr(found.get(parent), "rank", None)
                found[pid] = Process(parent, rank, tuple(words))
        return found

    def keeps_lines(self, pid):
        """Return whether a process may keep lines to itself, which it has printed: in a buffer.

        So do programs whose output goes through a pipe or to a file, but for Python's.
        """
        words = _read(pid, "cmdline") or [""]
        told = f"{self.folder}/site" in " ".join(_read(pid, "environ") or [])
        told &= "python" in words[0] and not {"-E", "-I", "-S"} & {*words}
        return _stream(pid, 1) not in {*self.ends, "/dev/null", ""} and not told

    def feeders(self, pid, processes):
        """Return the ids of those that print into a process, as the first of "train | tee log"."""
        return [other for other in processes if _stream(other, 1) == _stream(pid, 0) != "/dev/null"]

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
            os.close(self.streams.popitem()[0])
        shutil.rmtree(self.folder, ignore_errors=True)
        if self in _running:
            _running.remove(self)
            _adopt_orphans(False)
        return left

    def error(self):
        """Return the script's own error, in a line, among the last lines that were read; or "".

        Not torchrun's report of it, and not that of a rank which another one has left. A traceback
        is told by its last line, and by the line of the script: "ValueError: no data (train.py:7)".
        """
        errors, lines, inside, where = [], [], False, ""
        for line in self.tail:
            text = re.sub(r"^\[(rank|default) ?\d+(/\d+)?\]:? ?", "", line.text)
            if text.startswith("Traceback (most recent call last)"):
                inside, where = True, ""
            elif not inside:
                lines += [] if LAUNCHERS.match(text) else [(line.stream, text)]
            elif found := re.match(r' +File "(.+)", line (\d+)', text):
                if not re.search(r"/(site-packages|lib/python[\d.]+)/|^<", found[1]):
                    where = f" ({os.path.basename(found[1])}:{found[2]})"
            elif re.match(r"\S", text):  # the last line of the traceback
                errors += [] if LAUNCHERS.match(text) else [text + where]
                inside = False
        named = re.compile(r"(?i)\berror\b|Err(or|no)\b")
        errors = errors or [text for _, text in lines if named.search(text)]
        said = [text for stream, text in lines if stream == "stderr"] or [text for _, text in lines]
        causes = [text for text in errors if not CONSEQUENCE.search(text)]
        crash = re.compile(r"Signal \d+ \(SIG(SEGV|ABRT|BUS|FPE|ILL)")
        signals = [line.text for line in self.tail if crash.search(line.text)]
        return (causes or errors or signals or said[-1:] or [""])[0].strip()


def start(command, cwd=None, env=None, stdin=subprocess.DEVNULL, prefix="run", tmp=None):
    """Start a command, a list of words, in a session of its own; return a Command.

    cwd, env: its working directory and its environment, default: those of this process.
    stdin: what it reads, as for subprocess.Popen. None: what this process reads, a terminal, too:
        then the command's breakpoint() works. Ctrl-C there reaches this process alone.
    prefix: of the name of its folder for temporary files, TMPDIR, which end() removes.
    tmp: another folder for these, which stays.
    One at a time: RuntimeError if another runs. OSError if the command cannot be started.
    """
    if _running:
        raise RuntimeError("one foreign command at a time: end() the one before")
    if not os.path.exists("/proc/self/stat"):
        raise OSError("processes are found by /proc: that needs Linux")
    with later():  # a signal may come as soon as all is noted
        _adopt_orphans()
        folder = tempfile.mkdtemp(prefix=prefix, dir=place())
        ends, streams = [], {}
        try:
            for name in "tmp", "site":
                os.mkdir(f"{folder}/{name}")
            with open(f"{folder}/site/sitecustomize.py", "w") as file:
                file.write(SITE)
            env = dict(os.environ if env is None else env)
            path = [f"{folder}/site", *filter(None, [env.get("PYTHONPATH")])]
            env |= {"TMPDIR": tmp or f"{folder}/tmp", "PYTHONPATH": os.pathsep.join(path)}
            try:
                terminal, out = os.openpty()
                tty.setraw(out)  # what is written comes as it is
            except OSError:
                terminal, out = os.pipe()  # no terminal is left: then as it comes
            pipe, err = os.pipe()
            ends, streams = (
                [out, err],
                {terminal: ("stdout", bytearray()), pipe: ("stderr", bytearray())},
            )
            names = {os.readlink(f"/proc/self/fd/{end}") for end in ends}
            before = {
                (int(pid), stat[2])
                for pid in filter(str.isdigit, os.listdir("/proc"))
                if (stat := _stat(pid)) and stat[1] == os.getpid()
            }
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            running = Command(process, folder, streams, before, names)
            _running.append(running)
            return running
        except BaseException:
            ends += streams
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            for descriptor in ends:
                os.close(descriptor)


@contextlib.contextmanager
def cleaning_up(*folders):
    """A context that leaves nothing behind: no process of a command, and none of these folders.

    Ctrl-C, SIGTERM, SIGHUP (the terminal is closed) and SIGQUIT raise SystemExit in it, with status
    128 + the signal's number. From then on they are ignored: a second one cuts no cleaning short.
    folders: a list may be given, which grows later.
    """

    def leave(number, _):
        for other in old:
            signal.signal(other, _ignore)
        _waiting.append(number)
        if not _deferred:
            raise SystemExit(128 + number)

    # nohup has SIGHUP ignored: so it stays.
    old = {
        number: signal.signal(number, leave)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number in old:
            signal.signal(number, _ignore)
        for command in [*_running]:
            command.end()
        for folder in folders:
            for path in [folder] if isinstance(folder, str) else folder:
                shutil.rmtree(path, ignore_errors=True)
        _waiting.clear()
        for number, handler in old.items():
            signal.signal(number, handler)


# ---- Helpers that are no part of the lesson ----

_running, _deferred, _waiting = [], [], []  # commands; blocks; signals that have come


@contextlib.contextmanager
def later():
    """A context in which a signal does not raise: at its end it does. (For what must be noted.)"""
    _deferred.append(True)
    try:
        yield
    finally:
        _deferred.pop()
        if _waiting and not _deferred:
            raise SystemExit(128 + _waiting[0])


def place():
    """Return where temporary files may lie: a socket's path among them has 107 bytes at most."""
    here = tempfile.gettempdir()
    return "/tmp" if len(here) > 60 and os.access("/tmp", os.W_OK) else here


def _ignore(*_):
    """Do nothing. (Of a SIG_IGN that is set while a signal comes, Python prints a complaint.)"""


def _adopt_orphans(yes=True):
    """Become the parent of descendants whose own parents die (prctl, PR_SET_CHILD_SUBREAPER)."""
    if ctypes.CDLL(None, use_errno=True).prctl(36, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system lets no process adopt orphans")


def _read(pid, name):
    """Return the parts of a file of /proc between zero bytes, or None: the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode(errors="replace").rstrip("\0").split("\0")
    return None


def _stream(pid, number):
    """Return where a process's stdin (0) or stdout (1) leads, or "": closed, or it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def _stat(pid):
    """Return (state, process id of the parent, start in clock ticks), or None."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
        return words[0], int(words[1]), words[19]
    return None


def _rank(pid):
    variables = dict(text.partition("=")[::2] for text in _read(pid, "environ") or [])
    return next((variables[name] for name in RANKS if variables.get(name)), None)
