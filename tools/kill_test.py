"""Kill your own training script at random moments: does it still end with the same result?

Try this before a long job. The script may be any that torchrun (or python) starts:

    python tools/kill_test.py --rounds 3 --seed 2 -- torchrun --standalone \
        --nproc-per-node=2 --max-restarts=3 template/train.py

    undisturbed: 10.8 s, sha256 844dcbd4594f
    round 1: equal, went on; 1 killed, command started 2 times, 17% of the work done again, 14.1 s
        6.1 s  launcher killed after: [rank 0/2] step 50/60 | loss 2.8370 | rate 2.03e-03 | nor...
               [rank 0/2] resumed from train.pt after step 40, saved on node1
    ...
    3 of 3 rounds ended equal, 3 of these went on; killed: launcher 3, rank 2, worker 1

The command runs once undisturbed. Then come the rounds. In each, SIGKILL hits one to three victims:
a rank (a process of the job), a worker (a child of a rank, such as a DataLoader's), or the launcher
(torchrun). The line below a victim is the next one with "resum" (--resumed), unless the undisturbed
run prints it, too. torchrun starts ranks again. If the command itself fails, it is started again.

A round fails if it ends with another result, if the last start prints none, if a step of the
undisturbed run was done by nobody, if the work is begun anew though half of it was done, if it
hangs (--limit), leaves processes behind, or if what a killed process had started works on
(--orphans), so that the next start meets it. Its folder is kept then, and the exit status is 1.

What your script needs: it saves to a relative path, and goes on from there. (Each round has a
folder of its own. Programs and .py files run where they are. Give data by absolute paths.) It
prints a checksum of its weights at the end, "sha256 ..." or what --line matches, also when it finds
that all is done. Or it leaves a file for torch.load(), or a text: with --file snapshot.pt, all
tensors and values in it must be equal. It prints how far it has come: "step 3".

Not tested: power cuts, and several machines. Not tried: GPUs.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the imports below take their time

import argparse
import bisect
import contextlib
import itertools
import math
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import foreign_command
from tqdm import tqdm

KINDS = ("rank", "worker", "launcher")
# How far the script has come; last: in a progress bar.
MARK = r"(?i)(epoch|step|iter(ation)?)\W{0,8}\d+|\|\s*\d+(?=/\d)"
SHA256 = r"(?i)sha256\W+[0-9a-f]{6,}(, [0-9a-f]{6,})*"
PAUSE = 0.05  # seconds between two looks at the processes
DRAWS = 5  # so often may a round end before its first kill
LIMIT = 3600  # seconds for the undisturbed run
PATIENCE = 30  # seconds; more, where the first step takes more than 15, undisturbed
SILENCE = 60  # seconds without a line after which it is said


def main():
    args = parse_args()
    try:
        with foreign_command.cleaning_up(args.folders):
            sys.exit(test(args))
    except OSError as error:  # no such command, a full disk, a closed terminal
        stop(f"cannot go on: {error}")
    except SystemExit as end:
        if not isinstance(end.code, int) or end.code <= 128:
            raise
        what = "Ctrl-C" if end.code == 130 else signal.Signals(end.code - 128).name
        stop(f"ended by {what}, with all that it had started", end.code)


def test(args):
    """Play the undisturbed run and the rounds, print what they prove, and return the status."""
    base = new_folder(args, "kill_test_")
    say(f"{args.rounds} rounds, drawn with --seed {args.seed}")
    reference = play(args, f"{base}/undisturbed", limit=args.limit or LIMIT)
    if reference.failure and args.names:  # not taken along before: an old run may have left them
        args.copies = args.names
        reference = play(args, f"{base}/with_files", limit=args.limit or LIMIT)
    result = result_of_reference(args, reference)
    args.has_ranks = "rank" in reference.seen
    if args.patience is None:  # a rank that is starting ends once it looks for the launcher
        args.patience = min(300, max(PATIENCE, 2 * next(iter(reference.marks.values()), 0)))
    args.round_limit = args.limit or 10 * reference.seconds + 900
    say(f"undisturbed: {reference.seconds:.1f} s, {result}")
    for text in about_reference(args, reference):
        say(f"note: {text}")
    runs = []
    for number in tqdm(range(1, args.rounds + 1), disable=None, leave=False, unit="round"):
        run = play_round(args, number, f"{base}/round{number}", reference)
        runs.append(run)
        say("\n".join(describe(number, run, reference)))
        if (args.keep or run.failure) and base in args.folders:
            args.folders.remove(base)  # it stays, also after Ctrl-C
        if not (run.failure or args.keep):
            shutil.rmtree(run.folder)
    if any(run.failure.startswith("not equal") for run in runs):
        again = play(args, f"{base}/undisturbed_again", limit=args.round_limit)
        say(
            "note: two undisturbed runs differ, too. First seed all that is random"
            if again.failure or difference(args, reference, again)
            else "note: one more undisturbed"
            " run was equal (as it may be, if the script differs by itself now and then)"
        )
    say("\n".join(summary(args, runs, reference)))
    if base not in args.folders:
        say(f"kept: {base}")
    return any(run.failure for run in runs) or not any(run.proves for run in runs)


@dataclass
class Kill:
    marks: int  # when: after so many different marks
    seconds: float  # and so many seconds; once done: seconds since the start of the round
    kind: str
    which: float  # from 0 to 1: which one of that kind
    soon: float = 0.0  # or, if not 0, so many seconds after the kill before
    name: str = ""
    at: int = 0  # how many lines the command had printed
    last: str = ""  # the last of these
    # {process that it had started: (how often that has written, bytes in all, without errors)}
    heirs: dict = field(default_factory=dict)
    others: set = field(default_factory=set)  # the other ranks
    until: float = 0.0  # so long did one of these live
    restarted: bool = False  # ranks, or the command, have been started since
    place: float | None = None  # which mark of the undisturbed run it had come to
    line: str = ""  # with which it went on
    again: float = 0  # so many marks were printed again


@dataclass
class Run:
    """The command, run in a folder until it ended well, or failed."""

    folder: str
    kills: list[Kill] = field(default_factory=list)  # those that hit
    starts: int = 0
    seconds: float = 0.0
    failure: str = ""
    how: str = ""  # what became of a round that has not failed
    went_on: bool = False
    proves: bool = False
    note: str = ""
    error: str = ""  # the script's own
    lives: dict = field(default_factory=dict)  # {(kind, process id): [first, last seconds]}
    seen: dict = field(default_factory=dict)  # {kind: (first, last seconds)}
    ranks: set = field(default_factory=set)  # process ids of all that there were
    shells: dict = field(default_factory=dict)  # {where: name of one that stands there}
    saved: float = 0.0  # after so many seconds, there was something to go on from
    count: int = 0  # of lines
    last: str = ""
    spoke: float = 0.0  # after so many seconds it printed that one
    silent: bool = False  # for so long that it was said
    marks: dict = field(default_factory=dict)  # {how far it has come: seconds when first printed}
    printed: list = field(default_factory=list)  # [(number of line, mark), ...], all of them
    kind: tuple = ()  # of the undisturbed run: the words of its marks,
    place: dict = field(default_factory=dict)  # {mark: which one it is, from 0},
    cyclic: bool = False  # whether these come again and again,
    finals: dict = field(default_factory=dict)  # and {other words: [what matches, ...]}
    results: list = field(default_factory=list)  # [(number of line, its other words, what matches)]
    resumed: list = field(default_factory=list)  # [(number of line, line that matches --resumed)]
    keeps_lines: bool = False  # a kill may have cost lines that a process had not yet written


def play(args, folder, plan=(), reference=None, limit=math.inf, starts=1):
    """Start the command in a new folder until its status is 0, and kill as planned."""
    run, waiting = Run(folder), [*plan]
    for name in ["work/", *(f"work/{name}" for name in args.copies)]:
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
    for name in args.copies:
        shutil.copy(name, f"{folder}/work/{name}")
    tmp = new_folder(args, "kt", foreign_command.place())  # one for all starts
    begin = time.monotonic()
    while not run.failure:
        run.starts += 1
        command = foreign_command.start(args.command, f"{folder}/work", tmp=tmp)
        looked = ended = 0
        while not run.failure:
            lines = command.read(PAUSE)
            run.seconds = time.monotonic() - begin
            note_lines(args, run, lines, reference)
            if (strikes := waiting and is_time(run, waiting[0])) or run.seconds - looked > PAUSE:
                looked, processes = run.seconds, command.processes()
                roles = roles_of(args, processes, command.process.pid, run)
                watch(args, run, processes, roles, command.errors)
                if strikes and strike(args, run, waiting[0], command, processes, roles):
                    run.kills.append(waiting.pop(0))
                if not plan:
                    run.saved = run.saved or has_saved(args, folder) * run.seconds
                if command.poll() is not None:
                    ended = ended or run.seconds
                    if not processes:
                        break
                    if run.seconds - ended > (patience := args.patience or PATIENCE):
                        run.failure = f"left behind after {patience:.0f} s: {names(processes)}"
            silence = run.seconds - run.spoke
            if silence > max(SILENCE, reference.seconds if reference else 0) and not run.silent:
                run.silent = True
                say(
                    f"{run.seconds:7.1f} s  nothing was printed for {silence:.0f} s, since:"
                    f" {clip(run.last) or 'the start'}"
                )
            if run.seconds > limit:
                run.failure = run.failure or f"hung: no end in {limit:.0f} s"
            if ended and not lines:
                time.sleep(PAUSE)
        note_lines(args, run, command.read(0), reference)
        run.error, status = command.error(), command.poll()
        command.end()
        if not status:
            break
        for kill in run.kills:
            kill.restarted = True
        if run.starts == starts and not run.failure:
            run.failure = f"status {status} at the last of {starts} starts"
    shutil.rmtree(tmp, ignore_errors=True)
    run.seconds = time.monotonic() - begin
    return run


def play_round(args, number, folder, reference):
    """Draw kills and play them, until one has hit; then judge the result."""
    part = 1.0
    for draw in range(DRAWS):
        shutil.rmtree(folder, ignore_errors=True)  # of a run that no kill has hit
        draws = random.Random(f"{args.seed}/{number}/{draw}")
        plan = draw_kills(args, draws, reference, part)
        run = play(args, folder, plan, reference, args.round_limit, args.starts)
        if run.kills or run.failure:
            if not run.failure:
                judge(args, run, reference)
            return run
        part = 0.7 * min(part, run.seconds / reference.seconds)  # each time earlier
    run.failure = (
        "it ended before the first kill, each time: did the undisturbed run take longer,"
        " or leave a snapshot outside its folder, from which all rounds go on?"
    )
    return run


def draw_kills(args, draws, reference, part):
    """Draw who is killed and when: at a moment at which the undisturbed run had such a process.

    The moment is counted from the last mark before it, "epoch 3", say: a round that has to do work
    again comes to it later. So the kills fall over the whole run.
    """
    kinds = [kind for kind in args.victims if kind in reference.seen]
    times = [0, *reference.marks.values()]
    kills = []
    for _ in range(draws.randint(1, args.kills)):
        kind, place, which = draws.choice(kinds), draws.random(), draws.random()
        if draws.random() < 0.2:
            place = 0.9 + place / 10  # the last steps and the last save
        first, last = reference.seen[kind]
        if draws.random() < 0.7:  # while there is something to lose
            first = min(max(first, reference.saved), last)
        seconds = part * (first + place * (last - first))
        marks = bisect.bisect(times, seconds) - 1
        kills.append(Kill(marks, seconds - times[marks], kind, which))
    kills.sort(key=lambda kill: (kill.marks, kill.seconds))
    for kill in kills[1:]:
        if draws.random() < 0.3:  # while it starts again
            kill.soon = draws.random() * (times[1] if len(times) > 1 else reference.seconds / 5)
    return kills


def is_time(run, kill):
    """Return whether the round has come to the moment of a kill, or to the mark after it."""
    if kill.soon and run.kills:
        return run.seconds >= run.kills[-1].seconds + kill.soon
    times = [0, *run.marks.values()]
    return kill.marks < len(times) and (
        kill.marks + 1 < len(times) or run.seconds >= times[kill.marks] + kill.seconds
    )


# ---- What it prints ----


def note_lines(args, run, lines, reference=None):
    """Note how far the script has come, what it says of its result, and that it goes on."""
    with open(f"{run.folder}/output.txt", "a", encoding="utf-8") as file:
        file.writelines(f"{line.text}\n" for line in lines)
    for line in lines:
        text = line.text
        if foreign_command.LAUNCHERS.match(text):
            continue
        run.count, run.last, run.spoke = run.count + 1, text, run.seconds
        if re.search(args.resumed, text):
            run.resumed.append((run.count, text))
        elif (mark := mark_of(args, text)) and (not reference or kind_of(mark) == reference.kind):
            run.printed.append((run.count, mark))
            if not reference or mark in reference.marks:
                run.marks.setdefault(mark, run.seconds)
        if args.line and (found := [match[0] for match in re.finditer(args.line, text)]):
            run.results.append((run.count, masked(re.sub(args.line, "", text)), found))


def masked(text):
    """Return a line without its numbers, but for those of ranks."""
    return re.sub(r"(?i)(rank\W{0,2}\d+)|\d+", lambda match: match[1] or "#", text)


def mark_of(args, line):
    """Return how far the script has come, by a line: (("epoch", 3), ("loss", 0)), say, or ().

    The last is the next word: "epoch 3 | loss" and "epoch 3 | saved" are two kinds of lines.
    """
    mark, rest = {}, ""
    for part in re.finditer(args.step, line):
        word, number, _ = [*re.split(r"(\d+)$", part[0]), "", ""][:3]
        word, number = re.sub(r"\W", "", word).lower(), int(number or 0)
        # Some count what is left: 1/14, where it was 1/40 at first, is 27/40.
        if total := re.match(r"\s*(?:/|of)\s*(\d+)", line[part.end() :]):
            number += args.totals.setdefault(word, int(total[1])) - int(total[1])
        # The first of each word: "best after step 2" may stand behind.
        mark.setdefault(word, number)
        rest = re.search(r"[a-z]*\Z|[a-z]+", line[part.end() :].lower())[0]
    return (*mark.items(), (rest, 0)) if mark else ()


def kind_of(mark):
    return next(zip(*mark, strict=True))


def numbers_of(mark, sign=1):
    return tuple(sign * number for _, number in mark)


# ---- Its processes ----


def roles_of(args, processes, command, run):
    """Return {kind: [(name, process id), ...]} of the command's processes.

    Shells around the launcher or a rank are no victims of their own, and noted.
    """

    def given(pid):  # has the launcher given it this RANK?
        parent = processes.get(processes[pid].parent)
        return processes[pid].rank and processes[pid].rank != getattr(parent, "rank", None)

    roles, ranks = defaultdict(list), [pid for pid in processes if given(pid)]
    launchers = {processes[pid].parent for pid in ranks} & {*processes}
    if not launchers and not getattr(args, "has_ranks", False):
        launchers = {command} & {*processes}
    for pid, process in processes.items():
        of = f"rank {process.rank}" if process.rank else "the command"
        if pid in launchers:
            roles["launcher"].append(("launcher", pid))
        elif pid in ranks:
            roles["rank"].append((of, pid))
            if process.shell and any(child.parent == pid for child in processes.values()):
                run.shells.setdefault("between the launcher and its ranks", process.name)
        elif heirs_of(processes, pid) & launchers:
            run.shells.setdefault("around the launcher", process.name)
        elif process.parent in processes and (process.rank or not ranks):
            # What torchrun itself starts for a moment is none of the script's workers.
            roles["worker"].append((f"worker of {of}", pid))
    return roles


def heirs_of(processes, pid):
    """Return the ids of all that a process has started, and these in turn."""
    children = {child for child, process in processes.items() if process.parent == pid}
    return children.union(*(heirs_of(processes, child) for child in children))


def watch(args, run, processes, roles, errors):
    """Note who lives, and whether what a victim had started works on. errors: bytes, so far."""
    for kind, found in roles.items():
        for _, pid in found:
            run.lives.setdefault((kind, pid), [run.seconds, 0])[1] = run.seconds
    ranks = {pid for _, pid in roles["rank"]}
    for kill in run.kills:
        kill.restarted = kill.restarted or bool(ranks - run.ranks)
        if kill.others & {*processes}:
            kill.until = run.seconds
        for pid in kill.heirs.keys() & {*processes}:
            size, mapped = written(pid, f"{run.folder}/work")
            if not kill.heirs[pid] or run.seconds - kill.seconds <= args.orphans:
                kill.heirs[pid] = 0, size, size - errors
                continue
            # Errors are no work: a rank may wait for a dead torchrun's store, and complain. What
            # was written a look ago has been read by now. "import torch" writes once or twice.
            times, before, most = kill.heirs[pid]
            times += mapped or before - errors > most
            kill.heirs[pid] = times, size, max(most, before - errors)
            if times >= 4 and not run.failure:
                run.failure = (
                    f"what the killed {kill.name} had started went on without it for more than"
                    f" {args.orphans} s: {names({pid: processes[pid]})}"
                )
    run.ranks |= ranks


def written(pid, folder):
    """Return how many bytes a process has written, and whether it has a file in memory (mmap)."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/io") as io,
        open(f"/proc/{pid}/maps") as maps,
    ):
        size = int(re.search(r"wchar: (\d+)", io.read())[1])
        return size, re.search(f" rw-s .*{folder}/", maps.read()) is not None
    return 0, False


def strike(args, run, kill, command, processes, roles):
    """Send SIGKILL to one of the kind that was drawn. Return whether there was one."""
    if not (those := roles[kill.kind]):
        return False  # not now, between two starts, say
    kill.name, pid = those[int(kill.which * len(those))]
    kill.seconds, kill.at, kill.last = run.seconds, run.count, run.last
    heirs = heirs_of(processes, pid)
    # With the launcher all must end, also what has taken another parent: a daemon.
    kill.heirs = dict.fromkeys(heirs if kill.kind != "launcher" else {*processes} - {pid})
    kill.others = {other for _, other in roles["rank"] or roles["worker"]} - {pid}
    lost = [pid, *heirs, *command.feeders(pid, processes)]
    run.keeps_lines |= any(map(command.keeps_lines, lost))
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return False
    return True


def names(processes):
    return ", ".join(f"{pid} ({clip(process.name)})" for pid, process in processes.items())


def has_saved(args, folder):
    """Return whether the command has left something: one of --file, or any file with content."""
    work = pathlib.Path(folder, "work")
    with contextlib.suppress(OSError):  # a file has just been moved
        return any(
            path.is_file() and path.stat().st_size
            for path in work.rglob("*")
            if (name := str(path.relative_to(work))) not in args.copies
            and (not args.file or name in args.file)
        )
    return False


# ---- The verdict ----


def result_of_reference(args, run):
    """Return what all rounds must end with, in words. Stop if there is nothing to compare."""
    if run.failure:
        stop(
            f"the command fails undisturbed ({run.failure}). It printed:"
            f" {clip(run.error or 'nothing', 200)}. (It runs in a new folder: give data by"
            " absolute paths)"
        )
    whole = Counter()  # one rank after the other, perhaps
    for (kind, _), (first, last) in run.lives.items():
        whole[kind] += last - first + PAUSE
        if (whole[kind] if kind == "rank" else last - first) > run.seconds / 10:  # not a moment
            spans = run.seen.get(kind, (first, last))
            run.seen[kind] = min(spans[0], first), max(spans[1], last)
    if not set(args.victims) & run.seen.keys():
        stop(
            f"none of --victims {' '.join(args.victims)} was seen, but only:"
            f" {' '.join(run.seen) or 'nothing, as it ended at once'}"
        )
    # Marks of the commonest kind: a script may print its epochs, and elsewhere its steps.
    kinds = Counter(kind_of(mark) for mark in run.marks).most_common(1)
    run.kind = kinds[0][0] if kinds else ()
    run.marks = {mark: at for mark, at in run.marks.items() if kind_of(mark) == run.kind}
    run.printed = [(at, mark) for at, mark in run.printed if mark in run.marks]
    run.place = {mark: place for place, mark in enumerate(run.marks)}
    # A mark that comes again and again, "step 1" of each epoch, does not say how far it has come.
    seen = [run.place[mark] for _, mark in run.printed]
    run.cyclic = 0 in seen[len(seen) // 2 + 1 :] and len(run.marks) > 2
    end = {mark: at for at, mark in reversed(run.printed)}  # where each was first printed
    finals = [final for final in run.results if final[0] >= max(end.values(), default=math.inf)]
    finals, last = finals or run.results[-1:], run.results[-max(1, len(run.ranks)) :]
    known = {words for _, words, _ in finals if run.marks}
    finals += [
        final
        for final in last
        if final not in finals
        and final[1] not in known
        and re.sub(r"\d", "", final[1]) == re.sub(r"\d", "", last[-1][1])
    ]  # a faster rank's
    run.finals = defaultdict(list)
    for _, words, found in finals:
        run.finals[words].append(found)
    if args.line and not finals:
        stop(
            f"it prints nothing that matches {args.line!r}: let it print a checksum of its weights"
            " at the end, or give --line REGEX, or --file with the snapshot that it leaves"
        )
    if wrong := [file for file in (load(run, name) for name in args.file) if isinstance(file, str)]:
        stop(
            f"it {wrong[0]}: give --file as a path in the working directory, of a file that"
            " torch.load(weights_only=True) reads, or compare a printed line by --line"
        )
    if not run.saved:
        stop(
            "it leaves nothing in its working directory from which it could go on: let it save to"
            " a relative path"
        )
    found = finals and clip(", ".join(text for *_, texts in finals for text in texts), 60)
    return " and ".join(filter(None, (found, *args.file)))


def judge(args, run, reference):
    """Note why a round has failed, or what it proves."""
    marks = [*reference.marks]
    numbers = [numbers_of(mark) for mark in marks]
    sign = -1 if numbers[:1] > numbers[-1:] else 1  # it may count down
    numbers = [numbers_of(mark, sign) for mark in marks]
    known = [(at, mark) for at, mark in run.printed if mark in reference.place]
    places = [(at, reference.place[mark]) for at, mark in known]
    # A script that prints every ten steps from its start on prints others when it goes on.
    if numbers == sorted(numbers) and len(known) < len(run.printed):
        places = [
            (at, reference.place.get(mark, bisect.bisect(numbers, numbers_of(mark, sign)) - 0.5))
            for at, mark in run.printed
        ]
    said = {masked(line) for _, line in reference.resumed}
    run.went_on, anew = False, None
    for number, kill in enumerate(run.kills):
        kill.place = max((place for at, place in places if at <= kill.at), default=None)
        if not kill.restarted:  # nobody missed it: what follows is due to the kill before
            continue
        ahead = next((other for other in run.kills[number + 1 :] if other.restarted), None)
        end = ahead.at if ahead else math.inf
        at, kill.line = next(
            (
                (at, line)
                for at, line in run.resumed
                if kill.at < at <= end and masked(line) not in said
            ),
            (kill.at, ""),
        )
        after = [place for where, place in places if kill.at < where <= end]
        later = [place for where, place in places if at < where <= end]
        if kill.place is not None and later:
            kill.again = max(0, min(kill.place, max(later)) - min(later) + 1)
        if kill.place is None or reference.cyclic:
            run.went_on |= bool(kill.line or after and min(after) > 0 and not reference.cyclic)
        elif after and min(after) <= 0:
            anew = max(kill.place, anew or 0)
        else:
            run.went_on |= bool(after or kill.line) or ahead is None
    if differs := difference(args, reference, run):
        run.failure = differs if differs.startswith("not judged") else f"not equal: {differs}"
    elif gap := undone(run, reference.marks, {place for _, place in places}):
        first, last = (step(marks[place]) for place in gap)
        what = f"nobody was seen to do {first}" + (f" to {last}" if first != last else "")
        if run.keeps_lines:
            run.note = f"{what}; but printed lines were lost in a buffer, as in a pipe: flush them"
        else:
            run.failure = f"{what} (the result is equal)"
    elif anew is not None and anew + 1 >= max(2, len(marks) / 2):
        run.failure = f"it began anew after {step(marks[int(anew)])}: its work was lost"
    again = max((kill.again for kill in run.kills), default=0)
    if anew is None and not (run.note or reference.cyclic) and again > max(2, len(marks) / 2):
        run.note = (
            f"one kill cost {again:.0f} of {len(marks)} steps: does it go on from the"
            " newest of its snapshots?"
        )
    missed = [kill for kill in run.kills if kill.restarted or kill.kind != "worker"]
    run.proves = run.went_on or not missed
    if run.went_on or anew is not None:
        run.how = "went on" if run.went_on else "began anew"
    elif not missed:
        run.how = "nothing had to be started again"
    elif not missed[0].restarted:
        run.how = f"but proves nothing: {missed[0].name} was not seen to start again"
    elif reference.marks and all(kill.place is None for kill in run.kills):
        run.how = "but proves nothing: killed before it had printed a step"
    else:
        run.how = "not seen to go on"


def undone(run, marks, places):
    """Return (first, last) of the steps of which the round shows no trace, or ().

    Unprinted may be a step that was done when the kill came, and what the other ranks did until
    they noticed. marks: those of the undisturbed run, and when it printed them.
    """
    marks, seconds = [*marks], [*marks.values()]
    whole = all(place == int(place) for place in places)
    life = max(
        (kill.until - kill.seconds for kill in run.kills if kill.kind != "launcher"), default=0
    )
    life = max(life, 0)  # of others, after the one that prints may have been killed
    for one, other in itertools.pairwise(sorted({-1, *places, len(seconds)})):
        first, last = math.floor(one) + 1, math.ceil(other) - 1
        if first > last:
            continue
        # A line or two may come late; where nobody lived on, no more.
        if (
            seconds[last] - seconds[first] > 3 * life + 0.2
            or last - first >= 2
            and whole
            and not life
        ):
            return first, last
        if first and one == first - 1 and whole:  # a step that takes long
            begin, mark = run.marks[marks[first - 1]], marks[last + 1 : last + 2]
            end = run.marks[mark[0]] if mark else math.inf
            kills = [
                max(kill.seconds, kill.until) for kill in run.kills if begin <= kill.seconds < end
            ]
            need = seconds[last] - seconds[first - 1]
            if kills and need > 1 and need > 2 * (max(kills) - begin) + 0.5:
                return first, last
    return ()


def difference(args, reference, run):
    """Return in what the result of a run differs from the undisturbed one, or ""."""
    since = 0
    for kill in reversed(run.kills):  # one that nobody missed costs nothing
        if kill.restarted or kill.kind == "launcher" or run.count > kill.at:
            since = kill.at
            break
    for words, expected in reference.finals.items():
        results = [result for result in run.results if result[1] == words]
        if not results and not any(result[1] in reference.finals for result in run.results):
            results = run.results  # its words change from run to run
        texts = [found for at, _, found in results if at > since][-len(expected) :]
        if not texts and results:
            if not any(at > since for at, *_ in run.results):
                return (
                    "not judged: its result came before the last kill, and not again. Print it"
                    " also if all is done, or give --file"
                )
            texts = [found for *_, found in results][-len(expected) :]  # of a rank that lived on
        if sorted(texts) != sorted(expected):
            if not texts and run.shells and run.kills[-1].kind == "launcher":
                return (
                    "no result, and status 0 though the launcher was killed: does a pipeline"
                    " hide its status? Let the shell set -o pipefail"
                )
            return (
                clip(", ".join(text for found in texts for text in found))
                or "it printed no result (--line)"
            )
    for name in args.file:
        if isinstance(file := load(run, name), str):
            return f"it {file}"
        if differs := first_difference(load(reference, name)[0], file[0], name):
            return differs
    return ""


def load(run, name):
    """Return [content of the file], the lines of a text, or a sentence if there is none."""
    path, content = f"{run.folder}/work/{name}", None
    try:
        with contextlib.suppress(UnicodeDecodeError), open(path, encoding="utf-8") as file:
            content = file.read().splitlines()
        if content is None:
            import torch  # takes seconds, and texts do without

            content = torch.load(path, weights_only=True, map_location="cpu")
        empty = isinstance(content, (list, dict, tuple)) and not any(map(str, content))
        return f"left an empty {name}" if empty else [content]
    except FileNotFoundError:
        return f"left no {name}"
    except Exception as error:  # of many types
        return f"left a {name} that cannot be loaded ({clip(str(error))})"


def first_difference(one, other, key):
    """Return where the second value first differs from the first, and by how much, or ""."""
    if type(one) is type(other) and isinstance(one, (dict, list, tuple)):
        one, other = (
            dict(value if isinstance(value, dict) else enumerate(value)) for value in (one, other)
        )
        if odd := [k for k in [*one, *other] if k not in one or k not in other]:
            return f"{key}[{odd[0]!r}] is {'missing' if odd[0] in one else 'new'}"
        differences = (first_difference(one[k], other[k], f"{key}[{k!r}]") for k in one)
        return next(filter(None, differences), "")
    torch = sys.modules.get("torch")
    if torch and isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        try:
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
            return f"{key} has no data (it is on the meta device)" if one.is_meta else ""
        except AssertionError as error:  # it says how many differ, and by how much
            return f"{key}: {clip(str(error), 130)}"
        except Exception as error:  # of many types: a nested tensor, say
            return f"{key} cannot be compared ({clip(str(error))})"
    same = type(one) is type(other) and (one == other or repr(one) == repr(other))  # nan, say
    return "" if same else f"{key} is {clip(str(other))}, not {clip(str(one))}"


# ---- In words ----


def about_reference(args, reference):
    """Yield what is to be known before the rounds."""
    if args.names:
        taken = "taken along, as it fails without" if args.copies else "not taken along"
        yield f"{taken}: {' '.join(args.names)}"
    if re.search(r"Error\b", reference.error):
        yield f"the undisturbed run ended well, but printed {clip(reference.error, 100)}"
    for where, shell in reference.shells.items():
        yield (
            f"{where} stands {clip(shell)}: a signal, or a kill, ends that one alone. Let it end"
            " in: exec ..."
        )
    for _, line in reference.resumed[:1]:
        yield f'the undisturbed run prints "{clip(line)}", too: it is no sign that it goes on'
    if not reference.marks:
        yield (
            'no line has "epoch 3" or "step 3": kills come by the clock, and work that is done'
            " again, or by nobody, is not seen. Give --step REGEX"
        )
    elif reference.cyclic:
        yield (
            f"{step(next(iter(reference.marks)))} comes again later: work that is done again is"
            " not seen. Print epoch and step in one line, or give --step REGEX"
        )


def step(mark):
    return " ".join(f"{word} {number}".strip() for word, number in mark[:-1])


def describe(number, run, reference):
    """Return the lines about a round."""
    how = run.failure or f"equal, {run.how}"
    starts = "once" if run.starts == 1 else f"{run.starts} times"
    again = sum(kill.again for kill in run.kills) / max(1, len(reference.marks))
    again = f"{again:.0%} of the work done again, " if reference.marks else ""
    yield (
        f"round {number}: {how}; {len(run.kills)} killed, command started {starts},"
        f" {again}{run.seconds:.1f} s"
    )
    for kill in run.kills:
        when = f"after: {clip(kill.last)}" if kill.last else "before it printed anything"
        yield f"{kill.seconds:7.1f} s  {kill.name} killed {when}"
        yield from (f"{'':11}{clip(text, 85)}" for text in [kill.line] if text)
    if run.note:
        yield f"{'':11}note: {run.note}"
    if run.failure:
        if run.error and run.failure.startswith("status"):
            yield f"{'':11}its error: {clip(run.error, 85)}"
        yield f"{'':11}what it printed: {run.folder}/output.txt"


def summary(args, runs, reference):
    """Return the lines about all rounds: what they prove, and what not."""
    equal = [run for run in runs if not run.failure]
    killed = Counter(kill.kind for run in runs for kill in run.kills)
    yield (
        f"{len(equal)} of {len(runs)} rounds ended equal, {sum(run.went_on for run in equal)} of"
        f" these went on; killed:"
        f" {', '.join(f'{kind} {count}' for kind, count in sorted(killed.items()))}"
    )
    marks = [*reference.marks]
    places = {
        int(kill.place)
        for run in equal
        if run.went_on
        for kill in run.kills
        if kill.place is not None
    }
    open_ = [f"no {kind} was killed" for kind in args.victims if not killed[kind]]
    if places and min(places) >= len(marks) - 1 > 0:
        open_.insert(0, f"that it resumes its work: all kills came after {step(marks[-1])}")
    elif places:
        yield (
            f"proven: killed after {step(marks[min(places)])}, and up to"
            f" {step(marks[max(places)])} of {step(marks[-1])}, it goes on, and ends equal"
        )
    if marks and len(marks) - 1 not in places:
        open_.append(f"no kill fell between {step(marks[-1])} and the end")
    if not any(run.went_on for run in runs):
        open_.append("that it goes on: no line says so (--resumed REGEX), and no step shows it")
    yield f"not proven: {'; '.join([*open_, 'several machines, power cuts'])}"


# ---- Helpers that are no part of the lesson ----


def new_folder(args, prefix, place=None):
    with foreign_command.later():  # noted before a signal can end this
        args.folders.append(tempfile.mkdtemp(prefix=prefix, dir=place))
    return args.folders[-1]


def say(text):
    """Print above the progress bar, also where nobody looks at a terminal."""
    with tqdm.external_write_mode():
        print(text, flush=True)


def clip(text, width=60):
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def stop(message, status=2):
    """End this process with one line and no traceback: for what the caller can mend."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def regex(text):
    try:
        return re.compile(text).pattern
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def parse_args():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- torchrun [options] SCRIPT ...",
        description=__doc__.partition("\n")[0],
    )
    parser.error = stop
    for name, default, text in (
        ("rounds", 10, "how many"),
        ("kills", 3, "at most so many in a round"),
        ("starts", 8, "start the command at most so often in a round"),
        ("seed", random.randrange(10**6), "of the draws; drawn if not given"),
        ("patience", None, f"seconds for all to end after the launcher; {PATIENCE} or more"),
        ("orphans", 2, "seconds in which what a victim has started may still work"),
        ("limit", None, f"seconds for a run; default: {LIMIT}; a round: 900 and 10 such runs"),
    ):
        if name not in ("seed", "limit", "patience"):
            text += f"; default: {default}"
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--victims", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    parser.add_argument(
        "--line",
        type=regex,
        help="compare the last text printed that matches this"
        " regular expression (without --file: a sha256)",
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        help="compare this file of"
        " torch.save(), tensor by tensor, or this text; may be given several times",
    )
    parser.add_argument(
        "--resumed",
        type=regex,
        default="(?i)resum",
        help="a regular expression for the line with which the script goes on",
    )
    parser.add_argument(
        "--step",
        type=regex,
        default=MARK,
        help="a regular expression for what"
        " numbers the work in a line, up to its number; default: epoch, step, iter",
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of all rounds")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if not command:
        stop(
            "the command is missing. For example: python tools/kill_test.py --rounds 10 --"
            " torchrun --standalone --nproc-per-node=2 --max-restarts=3 your_script.py"
        )
    if min(n for n in (args.rounds, args.kills, args.starts, args.limit) if n is not None) < 1:
        stop("--rounds, --kills, --starts and --limit must be 1 or more")
    args.line = args.line or (None if args.file else SHA256)
    args.names, args.copies, args.folders, args.command, args.totals = [], [], [], [], {}
    for word in command:
        if os.path.isfile(word) and (word.endswith(".py") or os.access(word, os.X_OK)):
            word = os.path.abspath(word)  # it may import what lies beside it
        elif os.path.isfile(word) and word not in args.file and not word.startswith(("/", "..")):
            args.names.append(word)
        args.command.append(word)
    return args


if __name__ == "__main__":
    main()
