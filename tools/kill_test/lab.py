"""Machines of launch/lab: made for one test, and taken away, also those that a dead test left."""

import contextlib
import os
import pathlib
import re
import subprocess
import tempfile

import foreign_command

from .words import stop

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch/lab"
OWNER = re.compile(r"kill_test-(\d+)-(\d+)-(\d+)")  # namespace of process ids, process, its start


class Lab:
    """Some machines, as long as the "with" lasts.

    Each is a network namespace. Process ids and files are those of this computer.
    """

    def __init__(self, count, rate):
        """count: how many machines. rate: of their links, "100mbit", or None: as fast as memory."""
        if not SCRIPT.exists():
            stop(
                f"--machines needs {SCRIPT}: copy the folder launch beside the folder tools."
                " Everything else works without"
            )
        self.count, self.rate = count, rate
        self.nodes = [f"node{number}" for number in range(1, count + 1)]
        self.place = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
        self.name = name_of_owner(os.getpid())
        self.namespaces = {}  # {name of a machine: "net:[7]"}

    def __enter__(self):
        remove_those_of_the_dead(self.place)
        with foreign_command.later():  # half a lab would not be found again
            rate = ["--rate", self.rate] if self.rate else []
            made = call(self.place, self.name, "up", str(self.count), *rate)
        if made.returncode:
            stop(f"no machines here: {made.stdout.strip().removeprefix('lab: error: ')}")
        for node in self.nodes:
            text = pathlib.Path(state_of(self.place, self.name), node).read_text()
            self.namespaces[node] = text.split()[1]
        return self

    def __exit__(self, *_):
        call(self.place, self.name, "down")

    def __call__(self, *words):
        """Call launch/lab with these words, as ("cut", "node2"). RuntimeError if it fails."""
        called = call(self.place, self.name, *words)
        if called.returncode:
            raise RuntimeError(f"launch/lab {' '.join(words)}: {called.stdout.strip()}")

    def on(self, node, command, tmp):
        """Return the words that run a command on a machine.

        The command's environment is that of this process: launch/lab would set a variable of
        torchrun, which the caller may have forgotten. tmp: a folder for its temporary files.
        """
        env = ["env", "-u", "LAB"]
        if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ:
            env += ["-u", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
        own = ["env", f"TMPDIR={self.place}", f"LAB={self.name}", str(SCRIPT), "run", node]
        return [*own, *env, f"TMPDIR={tmp}", *command]


def call(place, name, *words):
    """Call launch/lab, in a session of its own: Ctrl-C must not reach it. Return the result."""
    return subprocess.run(
        [SCRIPT, *words],
        env={**os.environ, "TMPDIR": place, "LAB": name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        check=False,
    )


def state_of(place, name):
    """Return the folder in which launch/lab keeps what it knows of the machines of that name."""
    return f"{place}/distributed-lab-{os.getuid()}-{name}"


def name_of_owner(pid):
    """Return the name of the lab that a living process of this test may have."""
    namespace = re.search(r"\d+", os.readlink("/proc/self/ns/pid"))[0]
    return f"kill_test-{namespace}-{pid}-{foreign_command.read_stat(pid).begin}"


def remove_those_of_the_dead(place):
    """End what runs on machines whose kill_test has been killed, and take them away."""
    front = state_of(place, "")
    for path in pathlib.Path(place).glob("distributed-lab-*"):
        owner = OWNER.fullmatch(str(path).removeprefix(front))
        if not owner or not is_dead(*owner.groups()):
            continue
        with contextlib.suppress(OSError):
            call(place, owner[0], "down")


def is_dead(namespace, pid, begin):
    """Return whether a lab's owner has ended. One in another container is not known: then False."""
    if os.readlink("/proc/self/ns/pid") != f"pid:[{namespace}]":
        return False
    stat = foreign_command.read_stat(int(pid))
    return stat is None or stat.ended or stat.begin != begin
