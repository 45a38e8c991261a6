"""Let something happen to a machine, and let it come back."""

import contextlib
import os
import signal

from .events import Event, Machine
from .processes import heirs_of

LONGEST_WAIT = 60  # seconds in which the others are given the time to go on without a machine


def happen(lab, run, planned, roles, processes):
    """Let a PlannedEvent happen, if there is somebody to whom it may. Return the Event, or None.

    roles, processes: {name of a machine: its Roles}, {name of a machine: its processes} now.
    """
    if planned.kind in ("rank", "worker", "launcher"):
        return kill_process(run, planned, roles, processes)
    first, *others = run.machines
    if planned.kind == "first":
        return lose_first(lab, run, planned, roles, first)
    fit = [machine for machine in others if is_in(machine, roles)]
    if planned.kind == "join":
        fit = [machine for machine in others if not machine.starts and not machine.command]
    if not fit:
        return None
    machine = fit[int(planned.which * len(fit))]
    if planned.kind == "join":
        machine.back = run.seconds
        return None  # its start is the event
    come_back_later(run, machine, planned)
    if planned.kind == "machine":
        return die(lab, run, machine)
    if planned.kind == "leave":
        return leave(run, machine, roles)
    cut(lab, machine)
    return new_event(run, "link", f"the link of {machine.name} was cut", machine)


def is_in(machine, roles):
    """Return whether a machine takes part: it has ranks, and nothing has happened to it."""
    return machine.back is None and not machine.leaves and bool(roles[machine.name].victims["rank"])


def kill_process(run, planned, roles, processes):
    """Send SIGKILL to a rank, a worker or torchrun of a machine; return the Event, or None."""
    victims = [
        (machine, victim)
        for machine in run.machines
        for victim in roles[machine.name].victims[planned.kind]
        # The first torchrun has the rendezvous: that is an event of its own.
        if machine.back is None and not (planned.kind == "launcher" and machine is run.machines[0])
    ]
    if not victims:
        return None
    machine, victim = victims[int(planned.which * len(victims))]
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim.pid, signal.SIGKILL)
        if planned.kind == "launcher":
            machine.leaves = True
            come_back_later(run, machine, planned)
        what = "torchrun" if planned.kind == "launcher" else victim.name
        event = new_event(run, planned.kind, f"{what} on {machine.name} was killed", machine)
        event.pid = victim.pid
        event.others = other_ranks(roles, victim.pid) - heirs_of(
            processes[machine.name], victim.pid
        )
        return event
    return None


def other_ranks(roles, pid):
    """Return the process ids of all ranks on all machines but one."""
    return {rank.pid for each in roles.values() for rank in each.victims["rank"]} - {pid}


def lose_first(lab, run, planned, roles, first):
    """Let the first machine go, in the way that was drawn; return the Event, or None."""
    if not is_in(first, roles):
        return None
    run.lost = run.seconds
    if planned.way == "machine":
        event = die(lab, run, first)
    elif planned.way == "leave":
        event = leave(run, first, roles)
    else:
        for victim in roles[first.name].victims["launcher"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
        first.leaves = True
        event = new_event(run, "launcher", f"torchrun on {first.name} was killed", first)
    event.kind = "first"
    event.name += ", and with it the rendezvous"
    return event


def die(lab, run, machine):
    """Let a machine die: its link first, so that nobody is told, then all that runs there."""
    cut(lab, machine)
    lab("kill", machine.name)
    machine.leaves = True
    return new_event(run, "machine", f"{machine.name} died", machine)


def leave(run, machine, roles):
    """Send SIGTERM to the torchrun of a machine, as a cluster does that wants it back."""
    launchers = [victim.pid for victim in roles[machine.name].victims["launcher"]]
    for pid in launchers or [machine.command.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    machine.leaves = True
    return new_event(run, "leave", f"{machine.name} got SIGTERM", machine)


def cut(lab, machine):
    lab("cut", machine.name)
    machine.cut = machine.was_cut = True


def mend(lab, machine):
    lab("mend", machine.name)
    machine.cut = False


def come_back_later(run, machine, planned):
    """Plan when a machine comes back: soon, or once the others have gone on without it."""
    machine.back = run.seconds + planned.away
    if not planned.at_once:
        machine.back += LONGEST_WAIT
        machine.wait_for_others = planned.away


def new_event(run, kind, name, machine=None):
    """Return an Event of this moment. kind, name: its fields."""
    return Event(
        kind=kind,
        name=name,
        pid=0,
        seconds=run.seconds,
        lines=run.lines,
        last_line=run.last_step,
        heirs={},
        others=set(),
        before_a_save=not run.saved,
        machine=machine.name if isinstance(machine, Machine) else "",
    )
