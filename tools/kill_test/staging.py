"""Play a run on several machines: start the command on each, look at all, let events happen."""

import contextlib
import math
import os
import pathlib
import shutil
import time

import foreign_command

from . import stale
from .events import End, Leader, MachinesRun, PrintedBy, World
from .happening import happen, mend, new_event
from .killing import is_time
from .on_machine import make_machines, restarts_of, state_of
from .options import PATIENCE
from .playing import SILENCE
from .processes import roles_of
from .reading import note_lines
from .records import PAUSE
from .watching import watch
from .words import clip, say

LOOK = 0.25  # seconds between two looks at all processes
ORPHANS = 5  # seconds; then what outlives its torchrun is ended, as a cluster does
SPARE = 10  # seconds from the end of a machine without ranks to that of all others
TOGETHER = 2  # seconds: so far apart do ranks end that have trained together
# At its end, torchrun waits five minutes for the others, also for a dead machine. So a run is over
# once the result was printed, and no rank has lived for so many seconds.
QUIET = 12


def play_on_machines(test, folder, plan=(), limit=math.inf, count=None, name="undisturbed"):
    """Start the command on each machine until it has ended well on the first; return a MachinesRun.

    test: the KillTest, with a lab. plan: a list of PlannedEvent. limit: seconds for the run.
    count: start it on so many machines alone. name: "round 3".
    """
    return Stage(test, folder, plan, limit, count or len(test.lab.nodes), name).play()


class Stage:
    """Plays one run. The arguments are those of play_on_machines()."""

    def __init__(self, test, folder, plan, limit, count, name):
        self.test, self.lab, self.limit, self.name = test, test.lab, limit, name
        self.run = MachinesRun(folder, clock=time.time())
        self.waiting = [*plan]  # each PlannedEvent that has not happened yet
        self.disturbed = bool(plan)
        self.begin = time.monotonic()
        self.looked = 0.0  # the moment of the last look
        self.done = None  # the moment at which the command ended well on the first machine
        self.last_rank = 0.0  # the moment at which a rank was last seen
        self.first_line = 0  # the lines that had been printed when ranks were last started
        self.patience = test.options.patience
        self.run.machines += make_machines(test, folder, count)

    def play(self):
        """Play the run to its end; return the MachinesRun."""
        run = self.run
        late = sum(planned.kind == "join" for planned in self.waiting)
        for machine in run.machines[: len(run.machines) - late]:
            self.start(machine)
        while not run.failure and not self.is_over():
            self.read()
            due = bool(self.waiting) and run.lost is None and self.is_time(self.waiting[0])
            if due or run.seconds - self.looked > LOOK:
                self.look(due)
            self.bring_back()
            self.tell_silence()
            if run.seconds > self.limit and not run.failure:
                run.failure = f"hung: no end in {self.limit:.0f} s; {self.where()}"
        self.finish()
        return run

    def is_time(self, planned):
        """Return whether a PlannedEvent is due. Without its last machine, a job may never begin."""
        begins_late = planned.kind == "join" and not self.run.marks
        if begins_late and self.run.seconds > 2 * self.test.reference.run.seconds:
            return True
        return is_time(self.run, planned)

    def is_over(self):
        """Return whether the first machine has ended well, and the others have ended, or hang."""
        run = self.run
        left = [machine for machine in run.machines if machine.command]
        names, patience = " and ".join(machine.name for machine in left), self.patience or PATIENCE
        if self.done is not None and left and run.seconds - self.done > patience:
            run.notes.append(
                f"{names} still ran {patience} s after {run.machines[0].name} had ended"
            )
            return True
        if self.done is None and self.is_quiet(QUIET):
            run.notes.append(
                f"all ranks had ended, but torchrun on {names} waited for the others: ended here"
            )
            return True
        return self.done is not None and not left

    def is_quiet(self, seconds):
        """Return whether ranks have printed the result, and none has lived for so many seconds."""
        run = self.run
        printed = bool(run.results) and run.results[-1].line > self.first_line
        return run.lost is None and printed and run.seconds - self.last_rank > seconds

    # ---- One machine's command ----

    def start(self, machine):
        """Start the command on a machine."""
        if machine.starts == self.test.options.starts:
            self.run.failure = f"the command on {machine.name} was started {machine.starts} times"
            return
        if machine.cut:
            mend(self.lab, machine)
        words = self.lab.on(machine.name, machine.words, machine.tmp)
        machine.command = foreign_command.start(
            words, machine.work, tmp=machine.tmp, namespace=self.lab.namespaces[machine.name]
        )
        machine.starts, machine.started = machine.starts + 1, self.run.seconds
        self.first_line = self.run.lines
        machine.attempts, machine.status, machine.ended, machine.back = 0, None, None, None
        machine.was_cut = machine.leaves = False

    def may_start(self):
        """Return whether the command may be started once more on all machines that have run it."""
        return all(each.starts < self.test.options.starts for each in self.run.machines)

    def read(self):
        """Read what all machines have printed."""
        run = self.run
        running = [machine for machine in run.machines if machine.command]
        for machine in running:
            self.note(machine, machine.command.read(PAUSE / len(running)))
        if not running:
            time.sleep(PAUSE)
        run.seconds = time.monotonic() - self.begin

    def note(self, machine, lines):
        """Note the lines of a machine, a list of foreign_command.Line."""
        run = self.run
        run.seconds = time.monotonic() - self.begin
        known, run.tracebacks = len(run.printed), machine.tracebacks
        note_lines(self.test, run, lines, machine.name)
        for each in run.printed[known:]:
            run.last_step = each.mark.text
            run.printed_by.append(PrintedBy(run.seconds, each.line, machine.name, each.mark))

    def take_away(self, machine):
        """Note how the command on a machine has ended, and end what is left of it."""
        self.note(machine, machine.command.read(0))
        error = machine.command.error()
        machine.status = machine.command.poll()
        machine.command.end()
        machine.command = None
        if error and machine.status:
            self.run.error = error
        return error

    # ---- All machines ----

    def look(self, due):
        """Look at all processes, let an event happen if that is due, and see who has ended."""
        run = self.run
        self.looked = run.seconds
        roles, processes = {}, {}
        for machine in run.machines:
            found = machine.command.processes() if machine.command else {}
            pid = machine.command.process.pid if machine.command else 0
            processes[machine.name] = found
            roles[machine.name] = roles_of(found, pid, has_ranks=True)
            self.note_ranks(machine, roles[machine.name])
            watch(run, self.test.options, found, roles[machine.name], errors=0)
        if due and self.done is None:
            self.let_happen(roles, processes)
        if not run.saved and self.has_saved():
            run.saved = run.seconds
        for machine in run.machines:
            if machine.command and machine.command.poll() is not None:
                self.see_end(machine, processes[machine.name])

    def let_happen(self, roles, processes):
        """Let the next event happen, if there is somebody to whom it may."""
        planned = self.waiting[0]
        late = [machine for machine in self.run.machines if machine.back is not None]
        event = happen(self.lab, self.run, planned, roles, processes)
        if event:
            self.run.kills.append(event)
        if event or any(
            machine.back is not None and machine not in late for machine in self.run.machines
        ):
            del self.waiting[0]

    def note_ranks(self, machine, roles):
        """Note the ranks of a machine that are new, and how long each rank 0 has lived."""
        run = self.run
        new = [rank for rank in roles.victims["rank"] if rank.pid not in run.ranks]
        if roles.victims["rank"]:
            self.last_rank = machine.ranks_until = run.seconds
        if new:
            machine.attempts += 1
            self.first_line = run.lines
            size = foreign_command.environment(new[0].pid).get("WORLD_SIZE", "0")
            run.worlds.append(World(run.seconds, int(size) if size.isdigit() else 0))
        for rank in roles.victims["rank"]:
            if rank.name == "rank 0":
                new_leader = Leader(machine.name, run.seconds, run.seconds)
                run.leaders.setdefault(rank.pid, new_leader).last = run.seconds

    def has_saved(self):
        """Return whether a machine has left something in its working directory."""
        with contextlib.suppress(OSError):  # a file has just been moved
            for machine in self.run.machines:
                for path in pathlib.Path(machine.work).rglob("*"):
                    name = str(path.relative_to(machine.work))
                    if name not in self.test.copies and path.is_file() and path.stat().st_size:
                        return True
        return False

    def see_end(self, machine, processes):
        """See that the command on a machine has ended, and what that means for the others."""
        run, first = self.run, self.run.machines[0]
        machine.ended = run.seconds if machine.ended is None else machine.ended
        since = run.seconds - machine.ended
        if processes and since < ORPHANS:
            return
        # torchrun on a spare machine waits until a place is free, and fails once the others end:
        # that may be seen here before their end is.
        has_ranks = machine.attempts > 0
        if not has_ranks and self.done is None and since < SPARE:
            return
        if processes:
            run.notes.append(
                f"what torchrun on {machine.name} had started still ran {ORPHANS} s after it: ended"
                " here, as a cluster does"
            )
        error = self.take_away(machine)
        by_itself = not machine.leaves
        was_spare = not has_ranks and self.done is not None
        if not self.disturbed and machine.status and not was_spare:
            run.failure = f"status {machine.status} on {machine.name}"
        elif machine is first and machine.status == 0 and by_itself:
            self.done = run.seconds
        elif machine.status and by_itself and self.done is None:
            self.note_end(machine, error)

    def note_end(self, machine, error):
        """Note that a machine's command has failed. It is started again, or all are."""
        run = self.run
        after = run.kills[-1].name if run.kills else ""
        expected = self.why_expected(machine)
        used_up = not expected and machine.attempts > restarts_of(machine.words)
        end = End(run.seconds, machine.name, machine.status, error, after, expected, used_up)
        run.ends.append(end)
        alone = "launcher" not in self.test.reference.seen  # nobody starts a rank again
        if machine is run.machines[0] or alone:
            run.lost = run.seconds if run.lost is None else run.lost
        elif run.lost is None and machine.back is None:
            machine.back = run.seconds + 1
        machine.leaves = True

    def why_expected(self, machine):
        """Return why torchrun could not avoid that it ended on a machine, or ""."""
        run, restarts = self.run, restarts_of(machine.words)
        if run.lost is not None:
            return "the rendezvous was lost"
        if machine.was_cut:
            return "its link had been cut"
        if "launcher" not in self.test.reference.seen:
            return "no launcher starts ranks again"
        if machine.attempts > restarts and not self.gave_up(machine, restarts):
            return f"its {restarts} restarts were used up (--max-restarts)"
        return ""

    def gave_up(self, machine, restarts):
        """Return whether a machine's ranks ended again and again after few events, without a step.

        restarts: so many it had. An event takes one or two of them.
        """
        run = self.run
        events = [event.seconds for event in run.kills if event.seconds >= machine.started]
        if not events or restarts <= 2 * len(events):
            return False
        starts = [world.seconds for world in run.worlds if world.seconds > events[-1]]
        return bool(starts) and not any(each.seconds > starts[0] for each in run.printed_by)

    def bring_back(self):
        """Let machines come back whose time has come; or start all anew."""
        run = self.run
        if run.lost is not None and self.done is None:
            self.end_the_lost()
            return
        for machine in run.machines:
            if self.done is not None and machine.cut and machine.command:
                mend(self.lab, machine)  # so that its ranks see that the others have ended
            if machine.back is None or self.done is not None:
                continue
            event = next(
                (each for each in reversed(run.kills) if each.machine == machine.name), None
            )
            if machine.wait_for_others and event and self.others_went_on(event):
                machine.back = run.seconds + machine.wait_for_others
                machine.wait_for_others = 0.0
            if run.seconds < machine.back or (machine.leaves and machine.command):
                continue
            if machine.cut and machine.command:
                run.kills.append(
                    new_event(run, "mended", f"the link of {machine.name} was mended", machine)
                )
                mend(self.lab, machine)
                machine.back = None
            elif not machine.command and not self.is_quiet(1):
                again = "again" if machine.starts else "later than the others"
                kind = "back" if machine.starts else "join"
                run.kills.append(
                    new_event(run, kind, f"{machine.name} was started {again}", machine)
                )
                self.start(machine)

    def others_went_on(self, event):
        """Return whether a step was printed by ranks that were started after an event."""
        since = max((world.seconds for world in self.run.worlds), default=0.0)
        return since > event.seconds and any(each.seconds > since for each in self.run.printed_by)

    def end_the_lost(self):
        """Once the rendezvous is lost: wait until all have ended, and start all anew."""
        run = self.run
        left = [machine for machine in run.machines if machine.command]
        if left and run.seconds - run.lost > (self.patience or PATIENCE):
            names = " and ".join(machine.name for machine in left)
            run.notes.append(
                f"{names} still ran {run.seconds - run.lost:.0f} s after the rendezvous was lost:"
                " ended here, as a cluster does"
            )
            for machine in left:
                self.take_away(machine)
        elif left:
            return
        if self.may_start():
            run.kills.append(new_event(run, "anew", "all were started anew"))
        run.lost = None
        for machine in run.machines:
            if machine.starts:  # else it has still to join
                self.start(machine)

    def finish(self):
        """End all that is left, and mend all links."""
        run = self.run
        run.seconds = time.monotonic() - self.begin
        run.at_the_end = [
            machine
            for machine in run.machines
            if machine.ranks_until > self.last_rank - TOGETHER and not machine.was_cut
        ]
        for machine in run.machines:
            if machine.command:
                self.take_away(machine)
            if machine.cut:
                mend(self.lab, machine)
        run.starts = run.machines[0].starts
        shutil.rmtree(os.path.dirname(run.machines[0].tmp), ignore_errors=True)
        if run.failure.startswith("hung"):
            run.stale = run.stale or stale.question(run)

    # ---- What is said under way ----

    def tell_silence(self):
        """Say once that nothing has been printed for long."""
        run = self.run
        silence = run.seconds - run.last_printed
        if silence > SILENCE and not run.silence_told:
            run.silence_told = True
            when = f"{self.name} at {run.seconds:.1f} s"
            say(f"{when}: nothing was printed for {silence:.0f} s; {self.where()}")

    def where(self):
        """Return in words since when the job stands still, and where."""
        run = self.run
        event = f" {run.kills[-1].name}, at {run.kills[-1].seconds:.1f} s;" if run.kills else ""
        states = ", ".join(f"{machine.name} {state_of(machine)}" for machine in run.machines)
        return (
            f"no line since {run.last_printed:.1f} s ({clip(run.last_line) or 'the start'});"
            f"{event} {states}"
        )
