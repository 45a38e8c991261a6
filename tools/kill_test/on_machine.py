"""One machine: its folder, its command, and what it does, in words."""

import os
import shutil

import foreign_command

from .events import Machine


def make_machines(test, folder, count):
    """Return a list of Machines, with an empty working directory each, or one for all.

    test: the KillTest. folder: of the run. count: so many, from the first on.
    """
    options, tmp = test.options, test.new_folder("kt", foreign_command.place())
    machines = []
    for number, node in enumerate(test.lab.nodes[:count]):
        own = "" if options.shared or number == 0 else f"-{node}"
        work = f"{folder}/work{own}"
        os.makedirs(work, exist_ok=True)
        for name in test.copies:
            os.makedirs(os.path.dirname(f"{work}/{name}"), exist_ok=True)
            shutil.copy(name, f"{work}/{name}")
        os.mkdir(f"{tmp}/{number}")
        words = filled(options.command, node, number, len(test.lab.nodes))
        machines.append(Machine(node, words, work, f"{tmp}/{number}"))
    return machines


def state_of(machine):
    """Return in words what a machine does."""
    if machine.cut:
        return "is cut off" if machine.command else "is away"
    if machine.command:
        return f"runs {len(machine.command.processes())} processes"
    return f"has ended (status {machine.status})" if machine.starts else "has not joined"


def filled(command, node, number, count):
    """Return a command with what differs by machine filled in."""
    values = {"{node}": node, "{number}": str(number), "{machines}": str(count)}
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace(name, value)
        words.append(word)
    return words


def restarts_of(words):
    """Return torchrun's --max-restarts in a command."""
    value = option_of(words, "--max-restarts")
    return int(value) if value.isdigit() else 0


def fewest_machines(words):
    """Return on how many machines the command trains at least: of torchrun's --nnodes=1:2, 1."""
    value = option_of(words, "--nnodes").partition(":")[0]
    return max(1, int(value)) if value.isdigit() else 1


def option_of(words, name):
    """Return the value of one of torchrun's options in a command, or ""."""
    for place, word in enumerate(words):
        found, _, value = word.partition("=")
        if found.replace("_", "-") == name:
            return value or "".join(words[place + 1 : place + 2])
    return ""
