"""Start a foreign command, read what it prints, see all its processes, and end them all.

The tools beside this folder use it. If you take one of them away, copy this folder, too.

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
alone). Commands on machines of launch/lab may run beside each other: a network namespace tells
whose a process is. Not seen is what a server starts in its stead: docker run, systemd-run, ssh.
"""

from .cleanup import SIGNALS, cleaning_up, later
from .command import Command, place, start
from .errors import LAUNCHERS
from .lines import Line
from .processes import Process, Stat, environment, network_namespace, read_stat

__all__ = [
    "LAUNCHERS",
    "SIGNALS",
    "Command",
    "Line",
    "Process",
    "Stat",
    "cleaning_up",
    "environment",
    "later",
    "network_namespace",
    "place",
    "read_stat",
    "start",
]
