"""Who lives, who was started again, and whether what a victim had started works on."""

import contextlib
import re
from typing import NamedTuple

from . import stale
from .processes import names
from .records import Heir, Life

# So often must a process have written more to be seen to work: "import torch" writes once or twice.
WORKS = 4


def watch(run, options, processes, roles, errors):
    """Note in a Run what a look at its processes shows.

    errors: bytes that the command has written to stderr since its start.
    """
    for where, name in roles.shells.items():
        run.shells.setdefault(where, name)
    for victims in roles.victims.values():
        for victim in victims:
            new = Life(victim.kind, run.seconds, run.seconds)
            life = run.lives.setdefault((victim.kind, victim.pid), new)
            life.last = run.seconds
    ranks = {victim.pid for victim in roles.victims["rank"]}
    new_ranks = ranks - run.ranks
    if new_ranks and not all(kill.restarted for kill in run.kills):
        run.last_of_start = ""
    for pid in new_ranks:
        run.shares_store = stale.shares_store(pid)
    for kill in run.kills:
        if new_ranks:
            kill.note_restart(run.lines)
        if kill.others & processes.keys():
            kill.others_until = run.seconds
        for pid in kill.heirs.keys() & processes.keys():
            watch_heir(run, kill, pid, options.orphans, errors)
            heir = kill.heirs[pid]
            if heir.times >= WORKS and not run.failure:
                run.failure = (
                    f"what the killed {kill.name} had started went on without it for more than"
                    f" {options.orphans} s: {names({pid: processes[pid]})}"
                )
    run.ranks |= ranks


def watch_heir(run, kill, pid, orphans, errors):
    """Note whether a process that a victim had started has written more since the last look.

    orphans: seconds after the kill in which it may.
    """
    heir, now = kill.heirs[pid], written(pid, f"{run.folder}/work")
    if heir is None or run.seconds - kill.seconds <= orphans:
        kill.heirs[pid] = Heir(times=0, size=now.size, most=now.size - errors)
        return
    # Errors are no work: a rank may wait for a dead torchrun's store, and complain. What was
    # written at the last look has been read by now, so all errors in it are known.
    work = heir.size - errors
    if now.in_memory or work > heir.most:
        heir.times += 1
    heir.size, heir.most = now.size, max(heir.most, work)


class Written(NamedTuple):
    """What a process has written."""

    size: int  # bytes, to all files and streams
    in_memory: bool  # whether it has a file of the folder in its memory (mmap): it may write there


def written(pid, folder):
    """Return what a process has Written; nothing if it has ended."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/io") as io,
        open(f"/proc/{pid}/maps") as maps,
    ):
        size = int(re.search(r"wchar: (\d+)", io.read())[1])
        return Written(size, re.search(f" rw-s .*{folder}/", maps.read()) is not None)
    return Written(0, False)
