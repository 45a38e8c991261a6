"""The processes of the command, and their roles."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from .words import clip


class Victim(NamedTuple):
    """A process that may be killed."""

    kind: str  # of KINDS
    name: str  # "worker of rank 1"
    pid: int


@dataclass
class Roles:
    """Who is what among the living processes of the command."""

    victims: dict = field(default_factory=lambda: defaultdict(list))  # {kind: [Victim, ...]}
    # {where: name} of shells around the launcher or a rank. They are no victims of their own.
    shells: dict[str, str] = field(default_factory=dict)

    def add(self, kind, name, pid):
        self.victims[kind].append(Victim(kind, name, pid))


def roles_of(processes, command, has_ranks):
    """Return the Roles of the processes, {process id: foreign_command.Process}.

    command: the process id of the command itself. has_ranks: whether the undisturbed run had
    processes with a RANK. If it had none, the command is the launcher.
    """
    ranks = [pid for pid in processes if was_given_rank(processes, pid)]
    launchers = {processes[pid].parent for pid in ranks} & processes.keys()
    if not launchers and not has_ranks:
        launchers = {command} & processes.keys()
    roles = Roles()
    for pid, process in processes.items():
        name = f"rank {process.rank}" if process.rank else "the command"
        if pid in launchers:
            roles.add("launcher", "launcher", pid)
        elif pid in ranks:
            roles.add("rank", name, pid)
            if process.shell and children_of(processes, pid):
                roles.shells.setdefault("between the launcher and its ranks", process.name)
        elif heirs_of(processes, pid) & launchers:
            roles.shells.setdefault("around the launcher", process.name)
        elif process.parent in processes and (process.rank or not ranks):
            # What torchrun itself starts for a moment is none of the script's workers.
            roles.add("worker", f"worker of {name}", pid)
    return roles


def was_given_rank(processes, pid):
    """Return whether a process has a RANK that its parent has not: the launcher has given it."""
    process = processes[pid]
    parent = processes.get(process.parent)
    inherited = parent.rank if parent else None
    return bool(process.rank) and process.rank != inherited


def children_of(processes, pid):
    """Return the ids of all that a process has started."""
    return {child for child, process in processes.items() if process.parent == pid}


def heirs_of(processes, pid):
    """Return the ids of all that a process has started, and these in turn."""
    children = children_of(processes, pid)
    return children.union(*(heirs_of(processes, child) for child in children))


def names(processes):
    """Return the processes in words: "17 (sleep 600), 18 (python train.py)"."""
    return ", ".join(f"{pid} ({clip(process.name)})" for pid, process in processes.items())
