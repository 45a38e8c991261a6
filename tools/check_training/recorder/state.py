"""Whether the recorder is on, and what it knows: a process that is forked begins anew."""

import os
import threading
from dataclasses import dataclass


@dataclass
class Switch:
    """Whether anything is noted in this process, and where."""

    on: bool = False
    folder: str = ""  # for the files of records

    @property
    def name_of_process(self):
        """The begin of the names of this process's files: machines may share the folder."""
        return f"{self.folder}/{os.uname().nodename}-{os.getpid()}"

    @property
    def failure(self):
        """The file that says why the recorder of this process has failed."""
        return f"{self.name_of_process}.failed"


switch = Switch()
this_thread = threading.local()  # its attribute "inside": which wrapped functions it is in
_states = []  # what each subject knows


def kept(state):
    """Return the state of a subject, a dataclass whose fields all have a default.

    A process that is forked gets these defaults again: what its parent did, it has not done.
    """
    _states.append(state)
    return state


def watch(folder):
    """Forget everything, and note from now on, in this folder."""
    os.register_at_fork(after_in_child=_begin_anew)
    _begin_anew()
    switch.folder, switch.on = folder, True


def _begin_anew():
    """Forget everything, and note nothing until the process joins a group.

    A worker of a DataLoader, which is forked, never does.
    """
    switch.on = False
    this_thread.inside = set()
    for state in _states:
        state.__init__()  # the defaults, in the same object: others hold it
