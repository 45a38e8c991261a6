"""Play a run: start the command, look at it, kill as planned, end it. Play a round of the test."""

import contextlib
import math
import os
import pathlib
import random
import shutil
import time

import foreign_command

from . import stale
from .drawing import LATE_DRAWS, LATE_ROUND, draw_kills, draw_late_kill
from .judging import judge
from .killing import is_time, strike
from .options import PATIENCE
from .processes import names, roles_of
from .reading import note_lines
from .records import PAUSE, Round, Run, Verdict
from .watching import watch
from .words import clip, say

DRAWS = 5  # so often may a round end before its first kill
SILENCE = 60  # seconds without a line after which it is said


def play_round(test, number, folder):
    """Draw kills and play them, until one has hit; then judge the result. Return a Round."""
    reference, options = test.reference, test.options
    part = 1.0
    for draw in range(DRAWS):
        shutil.rmtree(folder, ignore_errors=True)  # of a run that no kill has hit
        draws = random.Random(f"{options.seed}/{number}/{draw}")
        plan = []
        if number % LATE_ROUND == 0 and draw < LATE_DRAWS:
            plan = draw_late_kill(options, draws, reference, part)
        plan = plan or draw_kills(options, draws, reference, part)
        name = f"round {number}"
        run = play(test, folder, plan, reference.round_limit, options.starts, name)
        if run.failure:
            return Round(number, run, Verdict(failure=run.failure))
        if run.kills:
            return Round(number, run, judge(options, reference, run))
        part = 0.7 * min(part, run.seconds / reference.run.seconds)  # each time earlier
    failure = (
        "it ended before the first kill, each time: did the undisturbed run take longer,"
        " or leave a snapshot outside its folder, from which all rounds go on?"
    )
    return Round(number, run, Verdict(failure))


def play(test, folder, plan=(), limit=math.inf, starts=1, name="undisturbed"):
    """Start the command in a new folder until its status is 0, and kill as planned. Return the Run.

    test: the KillTest. Without a reference, this is the undisturbed run. name: "round 3".
    plan: a list of PlannedKill. limit: seconds for the run. starts: at most so many.
    """
    return Player(test, folder, plan, limit, starts, name).play()


class Player:
    """Plays one run. The arguments are those of play()."""

    def __init__(self, test, folder, plan, limit, starts, name):
        self.test, self.plan, self.limit, self.starts = test, plan, limit, starts
        self.name = name
        self.run = Run(folder)
        self.waiting = [*plan]  # each PlannedKill that has not hit yet
        self.begin = time.monotonic()
        self.ended = None  # the moment at which the command was seen to have ended; None: it runs
        # Seconds for all processes to end after the command:
        self.patience = test.options.patience or PATIENCE
        # Seconds without a line after which that is said:
        self.silence = SILENCE
        if test.reference:
            self.patience = test.reference.patience
        if plan:
            self.silence = max(SILENCE, test.reference.run.seconds)

    def play(self):
        """Play the run to its end; return the Run."""
        run = self.run
        self.fill_folder()
        tmp = self.test.new_folder("kt", foreign_command.place())  # one for all starts
        self.begin = time.monotonic()
        while not run.failure:
            run.starts += 1
            status = self.play_start(tmp)
            if not status:
                break
            for kill in run.kills:
                kill.note_restart(run.lines)
            if run.starts == self.starts and not run.failure:
                run.failure = f"status {status} at the last of {self.starts} starts"
        shutil.rmtree(tmp, ignore_errors=True)
        run.seconds = self.now()
        if run.failure.startswith("hung"):
            run.stale = run.stale or stale.question(run)
        return run

    def now(self):
        """Return the seconds since the start of the run."""
        return time.monotonic() - self.begin

    def fill_folder(self):
        """Make the working directory, and copy the files into it that the command needs."""
        work = f"{self.run.folder}/work"
        os.makedirs(work, exist_ok=True)
        for name in self.test.copies:
            os.makedirs(os.path.dirname(f"{work}/{name}"), exist_ok=True)
        for name in self.test.copies:
            shutil.copy(name, f"{work}/{name}")

    def play_start(self, tmp):
        """Start the command once, and end all of it. Return its status; None: it was ended.

        tmp: a folder for its temporary files.
        """
        run = self.run
        command = foreign_command.start(self.test.options.command, f"{run.folder}/work", tmp=tmp)
        self.ended, looked, run.last_of_start = None, 0.0, ""
        while not run.failure:
            lines = command.read(PAUSE)
            run.seconds = self.now()
            note_lines(self.test, run, lines)
            due = bool(self.waiting) and is_time(run, self.waiting[0])
            if due or run.seconds - looked > PAUSE:
                looked = run.seconds
                living = self.look(command, due)
                if self.ended is not None and not living:
                    break
            self.tell_silence()
            if run.seconds > self.limit and not run.failure:
                run.failure = f"hung: no end in {self.limit:.0f} s"
            if self.ended is not None and not lines:
                time.sleep(PAUSE)
        note_lines(self.test, run, command.read(0))
        run.error, status = command.error(), command.poll()
        command.end()
        if status == 0 and run.kills and run.kills[-1].pid == command.process.pid:
            run.kills.pop()  # it had ended by itself, a moment before
        return status

    def look(self, command, due):
        """Look at the command's processes, kill one if that is due, and return them.

        After the command has ended, some may live on for a while, but not for longer than
        self.patience.
        """
        run, options, reference = self.run, self.test.options, self.test.reference
        processes = command.processes()
        has_ranks = reference is not None and "rank" in reference.seen
        roles = roles_of(processes, command.process.pid, has_ranks)
        watch(run, options, processes, roles, command.errors)
        if due and (kill := strike(run, self.waiting[0], command, processes, roles)):
            run.kills.append(kill)
            del self.waiting[0]
        if not run.saved and self.has_saved():
            run.saved = run.seconds
        if command.poll() is not None:
            if self.ended is None:
                self.ended = run.seconds
            if processes and run.seconds - self.ended > self.patience:
                run.failure = f"left behind after {self.patience:.0f} s: {names(processes)}"
        return processes

    def has_saved(self):
        """Return whether the command has left something: one of --file, or a file with content."""
        work = pathlib.Path(self.run.folder, "work")
        wanted = self.test.options.file
        with contextlib.suppress(OSError):  # a file has just been moved
            for path in work.rglob("*"):
                name = str(path.relative_to(work))
                if name in self.test.copies:
                    continue
                if wanted and not any(path.is_relative_to(work / file) for file in wanted):
                    continue
                if path.is_file() and path.stat().st_size:
                    return True
        return False

    def tell_silence(self):
        """Say once that nothing has been printed for long."""
        run = self.run
        silence = run.seconds - run.last_printed
        if silence > self.silence and not run.silence_told:
            run.silence_told = True
            say(
                f"{self.name} at {run.seconds:.1f} s: nothing was printed for {silence:.0f} s,"
                f" since: {clip(run.last_line) or 'the start'}"
            )
            if doubt := run.stale or stale.question(run):
                say(f"{' ' * 11}note: {doubt}")
