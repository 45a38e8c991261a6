"""The moment of a kill, and the kill itself."""

import os
import signal

from .processes import heirs_of
from .records import Kill


def is_time(run, kill):
    """Return whether the run has come to the moment of a PlannedKill, or to the mark after it."""
    if kill.soon and run.kills:
        return run.seconds >= run.kills[-1].seconds + kill.soon
    times = [0, *run.marks.values()]
    if kill.marks >= len(times):
        return False
    at_the_next_mark = kill.marks + 1 < len(times)
    return at_the_next_mark or run.seconds >= times[kill.marks] + kill.seconds


def strike(run, planned, command, processes, roles):
    """Send SIGKILL to one of the kind that was drawn. Return the Kill, or None if there was none.

    There is none between two starts, say. command: a foreign_command.Command. processes, roles:
    what it runs now.
    """
    victims = roles.victims[planned.kind]
    if not victims:
        return None
    victim = victims[int(planned.which * len(victims))]
    heirs = heirs_of(processes, victim.pid)
    lost = [victim.pid, *heirs, *command.feeders(victim.pid, processes)]
    keeps_lines = any(command.keeps_lines(pid) for pid in lost)
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return None
    run.keeps_lines |= keeps_lines
    # With the launcher all must end, also what has taken another parent: a daemon.
    must_end = processes.keys() - {victim.pid} if victim.kind == "launcher" else heirs
    others = roles.victims["rank"] or roles.victims["worker"]
    return Kill(
        kind=victim.kind,
        name=victim.name,
        pid=victim.pid,
        seconds=run.seconds,
        lines=run.lines,
        last_line=run.last_of_start,
        heirs=dict.fromkeys(must_end),
        others={other.pid for other in others} - {victim.pid},
        before_a_save=not run.saved,
    )
