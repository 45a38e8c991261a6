"""Commands started as a reader does, with a look at what they print and leave behind."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = sys.executable
# The environment of a shell in which the .venv is active.
ACTIVE = {"PATH": f"{os.path.dirname(PYTHON)}:{os.environ['PATH']}"}
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]


@dataclass
class Result:
    """What a run printed, stdout and stderr together, and how it ended."""

    output: str
    status: int  # of the command; of the first process that failed, where there are ranks
    attempts: int = 1

    def ok(self):
        """Itself; fails if the run did not end well."""
        assert self.status == 0, self.output
        return self

    def lines(self, rank=None):
        """The lines of the script, without "[rank r/W] "; those of one rank if it is given."""
        found = re.findall(r"^\[rank (\d+)/\d+\] (.*)$", self.output, re.MULTILINE)
        return [text for r, text in found if rank is None or int(r) == rank]

    def numbers(self, pattern):
        """The groups of each line of rank 0 that matches as a whole."""
        found = [re.fullmatch(pattern, line) for line in self.lines(0)]
        return [match.groups() for match in found if match]

    def epochs(self):
        """{epoch: (loss, accuracy)} as rank 0 reported them, the last report of an epoch."""
        found = self.numbers(
            r"epoch +(\d+)/\d+ \| loss ([\d.]+) \| accuracy ([\d.]+)"
            r" \| +\d+ images/s(?: \|.*)?"
        )
        return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}

    def saved(self):
        """The epochs after which rank 0 reported that it had saved, in order."""
        return [int(epoch) for (epoch,) in self.numbers(r"epoch +(\d+)/.* \| saved in \S+")]

    def error(self):
        """The one line "SCRIPT: error: ...", without what torchrun has to add; fails if not one."""
        found = [line for line in self.output.splitlines() if re.match(r"\w+\.py: error: ", line)]
        assert len(found) == 1, self.output
        return found[0].partition("error: ")[2]


def run(*command, cwd, timeout=120, env=None, patience=10):
    """Run a command to its end; nothing that it started may be left behind."""
    with running(*command, cwd=cwd, env=env) as process:
        output, _ = process.communicate(timeout=timeout)
        assert_nothing_left(process, patience)
        return Result(output, process.returncode)


@contextlib.contextmanager
def running(*command, cwd, env=None):
    """start() a command; when the "with" is left, kill what is left of it."""
    process = start(*command, cwd=cwd, env=env)
    try:
        yield process
    finally:
        end(process)


def start(*command, cwd, env=None):
    """Start a command; return its Popen, with all output in one pipe and a mark to find it by.

    env: what is added to the environment; a variable that is None is taken out of it.
    """
    # Every descendant inherits it. (torchrun's workers have sessions of their own.)
    mark = f"STARTED_BY_TEST={uuid.uuid4().hex}"
    env = {**os.environ, **(env or {}), **dict([mark.split("=")])}
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        text=True,
        env={name: value for name, value in env.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    process.mark = mark
    return process


def read_until(process, pattern, timeout=90):
    """Read what a process prints, up to the first line that matches; return all of it."""
    too_long = threading.Event()

    def give_up():
        too_long.set()
        end(process)  # so that the loop below comes to an end

    timer, output = threading.Timer(timeout, give_up), ""
    timer.start()
    try:
        for line in process.stdout:
            output += line
            if re.search(pattern, line):
                return output
    finally:
        timer.cancel()
    how = f"was ended after {timeout} s," if too_long.is_set() else "ended"
    raise AssertionError(f"the process {how} without {pattern!r}:\n{output}")


def family(process, itself=False):
    """The living processes that the command started, {pid: command line}; or all, with itself."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it has just ended
        if process.mark.encode() in environment and (itself or int(folder.name) != process.pid):
            found[int(folder.name)] = command
    return found


def assert_nothing_left(process, patience=10):
    """Fails if something that the command started outlives it by more than some seconds."""
    deadline = time.monotonic() + patience
    while left := family(process):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def end(process):
    """Kill what is left of a command and of all that it started, by process ids."""
    for pid in family(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def wait_until(condition, what, timeout=90, pause=0.05):
    """Wait until condition() is true, and return it; what: what is waited for, or says so."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout} s: {what() if callable(what) else what}")
        time.sleep(pause)
    return found


@contextlib.contextmanager
def free_port():
    """A port that nobody else gets while the "with" lasts, and on which a store can listen.

    The socket that holds it does not listen, and both sides say SO_REUSEADDR (libuv, which makes
    the store's socket, does): so the system gives the port to nobody who asks for any free one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def listening(pid):
    """The addresses at which a process accepts connections, IPv4 and IPv6: [(address, port)]."""
    sockets = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = []
    for table, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:  # LISTEN
                address, port = local.split(":")
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                name = socket.inet_ntop(kind, struct.pack(f"={len(words)}I", *words))
                found.append((name, int(port, 16)))
    return found


def files(folder):
    """The names of what a run has left in folder, locks apart, in order."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))
