"""Kill your own training script at random moments: does it still end with the same result?

Try this before a long job. The script may be any that torchrun (or python) starts:

    python launch/kill_test.py --rounds 3 --seed 2 -- torchrun --standalone \
        --nproc-per-node=2 --max-restarts=3 template/train.py

    undisturbed: 10.8 s, sha256 844dcbd4594f
    round 1: equal, went on; 1 killed, command started 2 times, 17% of the work done again, 14.1 s
        6.1 s  launcher killed after: [rank 0/2] step 50/60 | loss 2.8370 | rate 2.03e-03 | nor...
               [rank 0/2] resumed from train.pt after step 40, saved on node1
    ...
    3 of 3 rounds ended equal, 3 of these went on; killed: launcher 3, rank 2, worker 1

The command runs once undisturbed. Then come the rounds. In each, SIGKILL hits one to three victims:
a rank (a process of the job), a worker (a child of a rank, such as a DataLoader's), or the launcher
(torchrun). The line below a victim is the next one with "resum" (--resumed): the script "went on".
torchrun starts ranks again. If the command itself fails, it is started again, as Slurm would do.

A round fails if it ends with another result, hangs (--limit), or leaves processes behind; if these
work on when torchrun is dead (--orphans), so that the next start meets them; or if it goes on at a
step that it cannot have reached. Its folder is kept then, and the exit status is 1.

What your script needs: it saves to a relative path, and goes on from there. (Each round has a
folder of its own. Programs and .py files run where they are; other files that the command names
are copied there. Give data by absolute paths.) It prints a checksum of its weights at the end,
"sha256 ..." or what --line matches. Or it leaves a file for torch.load(): with --file snapshot.pt,
all tensors and values in it must be equal; or a text, a log, say: with --file log.csv, too.

Not tested: power cuts, and several machines. Not tried: GPUs.
"""

import argparse
import bisect
import contextlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tqdm import tqdm

KINDS = ("rank", "worker", "launcher")
MARK = r"(?i)(epoch|step|iter(ation)?)\W{0,8}\d+"  # how far the script has come
SHA256 = r"(?i)sha256\W+[0-9a-f]{6,}(, [0-9a-f]{6,})*"
LOG_LINE = r"[IWE]\d{4} \d\d:\d\d:\d\d"  # of torchrun, not of the script
PAUSE = 0.05  # seconds between two looks at the processes
DRAWS = 5  # so often may a round end before its first kill
LIMIT = 3600  # seconds for the undisturbed run


def main():
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that each "finally" runs
    base, keep = tempfile.mkdtemp(prefix="kill_test_"), args.keep
    try:
        print(f"{args.rounds} rounds, drawn with --seed {args.seed}", flush=True)
        reference = play(args, f"{base}/undisturbed", limit=args.limit or LIMIT)
        # Not a child that lives for a moment: a kill would wait for it in vain.
        reference.seen = {kind: (first, last) for kind, (first, last) in reference.seen.items()
                          if last - first > reference.seconds / 10}
        result = result_of_reference(args, reference)
        args.has_ranks = "rank" in reference.seen
        args.round_limit = args.limit or 10 * reference.seconds + 900
        # Marks of the commonest kind: a script may print its epochs, and elsewhere its steps.
        kinds = Counter(kind_of(mark) for mark in reference.marks).most_common(1)
        reference.marks = {mark: seconds for mark, seconds in reference.marks.items()
                           if kind_of(mark) == kinds[0][0]}
        print(f"undisturbed: {reference.seconds:.1f} s, {result}", flush=True)
        runs = []
        for number in tqdm(range(1, args.rounds + 1), disable=None, leave=False, unit="round"):
            run = play_round(args, number, f"{base}/round{number}", reference)
            runs.append(run)
            tqdm.write("\n".join(describe(args, number, run, reference)))
            sys.stdout.flush()
            keep = keep or bool(run.failure)
            if not (run.failure or args.keep):
                shutil.rmtree(run.folder)
        if any(run.failure.startswith("not equal") for run in runs):
            again = play(args, f"{base}/undisturbed_again", limit=args.round_limit)
            print("note: two undisturbed runs differ, too. First seed all that is random"
                  if again.failure or difference(args, reference, again) else
                  "note: two undisturbed runs were equal: the kills make the difference")
        equal = [run for run in runs if not run.failure]
        victims = Counter(kill.kind for run in runs for kill in run.kills)
        print(f"{len(equal)} of {len(runs)} rounds ended equal,"
              f" {sum(run.went_on for run in equal)} of these went on; killed:"
              f" {', '.join(f'{kind} {count}' for kind, count in sorted(victims.items()))}")
        if not any(run.went_on for run in runs):
            print("note: no line says that the script went on: did it begin anew each time? Give"
                  " --resumed REGEX for that line, or let the script run for longer")
        if not reference.marks:
            print('note: no line has "epoch 3" or "step 3": work done again is not seen, and kills'
                  " come by the clock. Give --step REGEX")
        sys.exit(len(equal) < len(runs))
    except KeyboardInterrupt:
        stop("ended by Ctrl-C, with all that it had started", status=130)
    finally:
        if keep:
            print(f"kept: {base}", flush=True)
        else:
            shutil.rmtree(base)


@dataclass
class Kill:
    marks: int  # when: after so many different marks
    seconds: float  # and so many seconds; once done: seconds since the start of the round
    kind: str
    which: float  # from 0 to 1: which one of that kind
    name: str = ""
    offset: int = 0  # how many bytes the command had printed


@dataclass
class Run:
    """The command, run in a folder until it ended well, or failed."""

    folder: str
    kills: list[Kill] = field(default_factory=list)  # those that hit
    starts: int = 0
    seconds: float = 0.0
    failure: str = ""
    went_on: bool = False  # as a line said
    seen: dict = field(default_factory=dict)  # {kind of process: [first, last seconds]}
    saved: float = 0.0  # after so many seconds, there was something to go on from
    marks: dict = field(default_factory=dict)  # {how far it has come: seconds when first printed}

    def lines(self, start=0, end=None):
        """The lines that the script printed, from byte start to byte end."""
        with open(f"{self.folder}/output.txt", "rb") as file:
            file.seek(start)
            text = file.read(-1 if end is None else end - start).decode(errors="replace")
        lines = re.split(r"[\r\n]+", text)  # a progress bar prints \r
        return [line for line in lines if line.strip() and not re.match(LOG_LINE, line)]


def play(args, folder, plan=(), reference=None, limit=math.inf, starts=1):
    """Start the command in a new folder until its status is 0, and kill as planned."""
    run, waiting = Run(folder), sorted(plan, key=lambda kill: (kill.marks, kill.seconds))
    for name in ["work/", *(f"work/{name}" for name in args.copies)]:
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
    for name in args.copies:
        shutil.copy(name, f"{folder}/work/{name}")
    mark = f"KILL_TEST={uuid.uuid4().hex}"  # all that descends from the command inherits it
    # TMPDIR: what killed processes leave in /tmp is removed. It is short: a socket's path in it has
    # 107 bytes at most. Unbuffered: the last line printed is the last that the script has come to.
    tmp = tempfile.mkdtemp(prefix="kt", dir="/tmp" if len(tempfile.gettempdir()) > 60 else None)
    env = {**os.environ, **dict([mark.split("=")]), "PYTHONUNBUFFERED": "1", "TMPDIR": tmp}
    process, begin, read = None, time.monotonic(), 0
    try:
        with open(f"{folder}/output.txt", "ab") as output:
            while not run.failure and (run.starts == 0 or process.returncode != 0):
                run.starts += 1
                process = subprocess.Popen(  # in a session of its own: Ctrl-C must not reach it
                    args.command, cwd=f"{folder}/work", env=env, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
                while process.poll() is None and not run.failure:
                    run.seconds = time.monotonic() - begin
                    read = read_marks(args, run, reference, read)
                    if run.seconds > limit:
                        run.failure = f"hung: no end in {limit:.0f} s"
                    elif not plan:
                        for kind in find_victims(mark, process.pid):
                            run.seen.setdefault(kind, [run.seconds, 0])[1] = run.seconds
                        run.saved = run.saved or has_saved(args, folder) * run.seconds
                    elif (waiting and is_time(run, waiting[0])
                          and strike(args, run, waiting[0], find_victims(mark, process.pid))):
                        run.kills.append(waiting.pop(0))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(PAUSE)
                read = read_marks(args, run, reference, read)
                run.failure = run.failure or wait_for_orphans(args, run, mark, process.returncode)
                if process.returncode and run.starts == starts:
                    run.failure = (run.failure
                                   or f"status {process.returncode} at the last of {starts} starts")
    except OSError as error:
        stop(f"cannot start the command: {error}")
    finally:
        end(mark, process)
        shutil.rmtree(tmp, ignore_errors=True)
    run.seconds = time.monotonic() - begin
    return run


def play_round(args, number, folder, reference):
    """Draw kills and play them, until one has hit; then compare the result."""
    for draw in range(DRAWS):
        shutil.rmtree(folder, ignore_errors=True)  # of a run that no kill has hit
        draws = random.Random(f"{args.seed}/{number}/{draw}")
        plan = draw_kills(args, draws, reference, 0.7**draw)  # each time earlier
        run = play(args, folder, plan, reference, args.round_limit, args.starts)
        if run.failure:
            return run
        earlier = run.lines(0, run.kills[0].offset if run.kills else None)
        if (any(re.search(args.resumed, line) for line in earlier)
                and not any(re.search(args.resumed, line) for line in reference.lines())):
            break
        if run.kills:
            if differs := difference(args, reference, run):
                run.failure = f"not equal: {differs}"
            for _, _, skipped in recoveries(args, run, reference):
                times = [reference.marks[mark] for mark in skipped]
                if len(times) > 2 and times[-1] - times[0] > args.orphans:
                    first, last = (" ".join(f"{word} {number}" for word, number in skipped[i][:-1])
                                   for i in (0, -1))
                    run.failure = f"it went on far beyond the kill: who did {first} to {last}?"
            return run
    run.failure = ("it went on, or ended, before the first kill. Does it go on from a file at an"
                   " absolute path, which all rounds share?")
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
        seconds = first + part * place * (last - first)
        marks = bisect.bisect(times, seconds) - 1
        kills.append(Kill(marks, seconds - times[marks], kind, which))
    return kills


def is_time(run, kill):
    """Return whether the round has come to the moment of a kill, or to the mark after it."""
    times = [0, *run.marks.values()]
    return kill.marks < len(times) and (
        kill.marks + 1 < len(times) or run.seconds >= times[kill.marks] + kill.seconds)


def marks_of(args, lines, reference=None):
    """Yield how far the script has come, by each line: (("epoch", 3), ("loss", 0)), say.

    The last is the next word: "epoch 3 | loss" and "epoch 3 | saved" are two kinds of lines.
    """
    for line in lines:
        mark, rest = {}, ""
        for part in re.finditer(args.step, line):
            word, number, _ = [*re.split(r"(\d+)$", part[0]), "", ""][:3]
            # The first of each word: two ranks may write in one line, and "best after step 2".
            mark.setdefault(re.sub(r"\W", "", word).lower(), int(number or 0))
            rest = re.search(r"[a-z]*\Z|[a-z]+", line[part.end() :].lower())[0]
        if mark and not re.search(args.resumed, line):
            mark = *mark.items(), (rest, 0)
            if reference is None or mark in reference.marks:
                yield mark


def kind_of(mark):
    return next(zip(*mark, strict=True))


def read_marks(args, run, reference, start):
    """Note the marks in what was printed from byte start on. Return to which byte."""
    with open(f"{run.folder}/output.txt", "rb") as file:
        file.seek(start)
        end = start + file.read().rfind(b"\n") + 1
    for mark in marks_of(args, run.lines(start, end), reference):
        run.marks.setdefault(mark, run.seconds)
    return end


def has_saved(args, folder):
    """Return whether the command has left something: one of --file, or any file with content."""
    return any(size and (name in args.file or not args.file)
               for name, (size, _) in files_of(args, folder).items())


def files_of(args, folder):
    """Return {path in its folder: (bytes, time of the last change)} of the command's files."""
    found = {}
    for place, _, names in os.walk(f"{folder}/work"):
        for path in (f"{place}/{name}" for name in names):
            with contextlib.suppress(OSError):  # it has just been moved
                if (name := os.path.relpath(path, f"{folder}/work")) not in args.copies:
                    found[name] = (os.path.getsize(path), os.stat(path).st_mtime_ns)
    return found


def strike(args, run, kill, victims):
    """Send SIGKILL to one of the kind that was drawn. Return whether there was one."""
    # What torchrun itself starts for a moment is none of the script's workers.
    those = [(name, pid) for name, pid in victims[kill.kind]
             if not (args.has_ranks and name == "worker of the command")]
    if not those:
        return False  # not now, between two starts, say
    kill.name, pid = those[int(kill.which * len(those))]
    kill.seconds, kill.offset = run.seconds, os.path.getsize(f"{run.folder}/output.txt")
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return False
    return True


def find_victims(mark, command):
    """Return {kind: [(name, process id), ...]} of the command's processes."""
    processes, found = family(mark), defaultdict(list)
    launchers = {command, *(parent for parent, rank in processes.values() if rank
                            and processes.get(parent, (0, rank))[1] is None)}
    for pid, (parent, rank) in sorted(processes.items()):
        if pid in launchers:
            found["launcher"].append(("launcher", pid))
        elif parent in processes:  # otherwise it is an orphan, about to end
            name = f"rank {rank}" if rank else "the command"
            if rank != processes[parent][1]:  # the launcher has given it this RANK
                found["rank"].append((name, pid))
            else:
                found["worker"].append((f"worker of {name}", pid))
    return found


def family(mark):
    """Return {process id: (that of its parent, RANK or None)} of all that carry the mark.

    torchrun's ranks have sessions of their own, and orphans another parent: the mark finds them.
    """
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().decode(errors="replace").split("\0")
            if mark in variables:
                with open(f"/proc/{pid}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                ranks = [text[5:] for text in variables if text.startswith("RANK=")]
                found[int(pid)] = parent, ranks[0] if ranks else None
    return found


def wait_for_orphans(args, run, mark, status):
    """Wait until all processes have ended. Return a sentence if some do not, or work meanwhile.

    They would write to the files of the next start, or do the work that it is to do.
    """
    def work():
        return [*marks_of(args, run.lines())], files_of(args, run.folder)

    ended, before = time.monotonic(), None
    while left := family(mark):
        seconds, failure = time.monotonic() - ended, ""
        if seconds > args.patience:
            failure = f"left behind after {args.patience} s"
        elif status and seconds > args.orphans:
            before = before or work()
            if work() != before:
                failure = f"went on without the launcher for more than {args.orphans} s"
        if failure:
            commands = []
            for pid in left:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
                    words = map(os.path.basename, file.read().split("\0"))
                    commands.append(f"{pid} ({clip(' '.join(words))})")
            return f"{failure}: {', '.join(commands)}"
        time.sleep(PAUSE)
    return ""


def end(mark, process):
    """Kill what is left, by process ids."""
    while left := family(mark):  # again, as one may have started another
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)
    if process:
        process.wait()


def result_of_reference(args, reference):
    """Return what all rounds must end with, in words. Stop if there is nothing to compare."""
    lines = reference.lines()
    if reference.failure:
        why = [line for line in lines if "rror" in line] or lines or ["nothing"]
        stop(f"the command fails undisturbed ({reference.failure}). It printed:"
             f" {clip(why[-1], 200)}. (It runs in a new folder: give data by absolute paths)")
    if not set(args.victims) & reference.seen.keys():
        stop(f"none of --victims {' '.join(args.victims)} was seen, but only:"
             f" {' '.join(reference.seen) or 'nothing, as it ended at once'}")
    line = args.line and last_match(args.line, lines)
    files = [load(reference, name) for name in args.file]
    if args.line and not line:
        stop(f"it prints nothing that matches {args.line!r}: let it print a checksum of its weights"
             " at the end, or give --line REGEX, or --file with the snapshot that it leaves")
    if wrong := [file for file in files if isinstance(file, str)]:
        stop(f"it {wrong[0]}: give --file as a path in the working directory, of a file that"
             " torch.load(weights_only=True) reads, or compare a printed line by --line")
    return " and ".join(filter(None, (line, *args.file)))


def difference(args, reference, run):
    """Return in what the result of a run differs from the undisturbed one, or ""."""
    if args.line:
        found = last_match(args.line, run.lines())
        if found != last_match(args.line, reference.lines()):
            return clip(found, 40) if found else f"nothing printed matches {args.line!r}"
    for name in args.file:
        if isinstance(file := load(run, name), str):
            return f"it {file}"
        if differs := first_difference(load(reference, name)[0], file[0], name):
            return differs
    return ""


def last_match(regex, lines):
    return next((found[0] for line in reversed(lines) if (found := re.search(regex, line))), None)


def load(run, name):
    """Return [content of the file], the lines of a text, or a sentence if there is none."""
    path = f"{run.folder}/work/{name}"
    try:
        with contextlib.suppress(UnicodeDecodeError), open(path, encoding="utf-8") as file:
            return [file.read().splitlines()]
        import torch  # takes seconds, and texts do without

        return [torch.load(path, weights_only=True, map_location="cpu")]
    except FileNotFoundError:
        return f"left no {name}"
    except Exception as error:  # of many types
        return f"left a {name} that cannot be loaded ({clip(str(error))})"


def first_difference(one, other, key):
    """Return where the second value first differs from the first, and by how much, or ""."""
    if type(one) is type(other) and isinstance(one, (dict, list, tuple)):
        one, other = (dict(value if isinstance(value, dict) else enumerate(value))
                      for value in (one, other))
        if odd := [k for k in [*one, *other] if k not in one or k not in other]:
            return f"{key}[{odd[0]!r}] is {'missing' if odd[0] in one else 'new'}"
        differences = (first_difference(one[k], other[k], f"{key}[{k!r}]") for k in one)
        return next(filter(None, differences), "")
    torch = sys.modules.get("torch")
    if torch and isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) == (other.dtype, other.shape):
            if one.is_floating_point():
                one, other = one.double(), other.double()  # exact; 8 bits know no ==
            differ = (one != other) & ~(one.isnan() & other.isnan())
            if not differ.any():
                return ""
            largest = (one[differ].cdouble() - other[differ].cdouble()).abs().max()
            return f"{key} differs by {largest:.2g}, in {differ.sum()} of {differ.numel()} numbers"
        one, other = (f"{value.dtype} {list(value.shape)}" for value in (one, other))
    same = type(one) is type(other) and (one == other or repr(one) == repr(other))  # nan, say
    return "" if same else f"{key} is {clip(str(other))}, not {clip(str(one))}"


def recoveries(args, run, reference):
    """Yield, for each kill, (the line with which it went on, marks done again, marks skipped)."""
    for number, kill in enumerate(run.kills, 1):
        end = run.kills[number].offset if number < len(run.kills) else None
        earlier = [*marks_of(args, run.lines(0, kill.offset), reference)]
        after = run.lines(kill.offset, end)
        at = next((i for i, line in enumerate(after) if re.search(args.resumed, line)), None)
        later = [*marks_of(args, after[at or 0 :], reference)]
        again, skipped = [], []
        if earlier and later:
            again = [mark for mark in reference.marks
                     if min(later) <= mark <= min(max(earlier), max(later))]
        if earlier and at is not None and (later or not end):
            skipped = [mark for mark in reference.marks
                       if max(earlier) < mark and not (later and mark >= min(later))]
        yield after[at] if at is not None else "", again, skipped


def describe(args, number, run, reference):
    """Return the lines about a round."""
    ways = [*recoveries(args, run, reference)]
    run.went_on = any(line for line, *_ in ways)
    how = run.failure or f"equal, {'went on' if run.went_on else 'not seen to go on'}"
    starts = "once" if run.starts == 1 else f"{run.starts} times"
    again = sum(len(marks) for _, marks, _ in ways) / max(1, len(reference.marks))
    again = f"{again:.0%} of the work done again, " if reference.marks else ""
    yield (f"round {number}: {how}; {len(run.kills)} killed, command started {starts},"
           f" {again}{run.seconds:.1f} s")
    for kill, (line, *_) in zip(run.kills, ways, strict=True):
        last = run.lines(0, kill.offset)[-1:]
        when = f"after: {clip(last[0])}" if last else "before it printed anything"
        yield f"{kill.seconds:7.1f} s  {kill.name} killed {when}"
        yield from (f"{'':11}{clip(text, 85)}" for text in [line] if text)
    if run.failure:
        yield f"{'':11}what it printed: {run.folder}/output.txt"


# ---- Helpers that are no part of the lesson ----


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
    parser = argparse.ArgumentParser(usage="%(prog)s [options] -- torchrun [options] SCRIPT ...",
                                     description=__doc__.partition("\n")[0])
    parser.error = stop
    for name, default, text in (
            ("rounds", 10, "how many"),
            ("kills", 3, "at most so many in a round"),
            ("starts", 8, "start the command at most so often in a round"),
            ("seed", random.randrange(10**6), "of the draws; drawn if not given"),
            ("patience", 30, "seconds in which all must end once the launcher has ended"),
            ("orphans", 2, "seconds in which they may still work, once it has failed"),
            ("limit", None, f"seconds for a run; default: {LIMIT}; a round: 900 and 10 such runs")):
        if name not in ("seed", "limit"):
            text += f"; default: {default}"
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--victims", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    parser.add_argument("--line", type=regex, help="compare the last text printed that matches this"
                        " regular expression (without --file: a sha256)")
    parser.add_argument("--file", action="append", default=[], help="compare this file of"
                        " torch.save(), tensor by tensor, or this text; may be given several times")
    parser.add_argument("--resumed", type=regex, default="(?i)resum",
                        help="a regular expression for the line with which the script goes on")
    parser.add_argument("--step", type=regex, default=MARK, help="a regular expression for what"
                        " numbers the work in a line, up to its number; default: epoch, step, iter")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all rounds")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if not command:
        stop("the command is missing. For example: python launch/kill_test.py --rounds 10 --"
             " torchrun --standalone --nproc-per-node=2 --max-restarts=3 your_script.py")
    if min(n for n in (args.rounds, args.kills, args.starts, args.limit) if n is not None) < 1:
        stop("--rounds, --kills, --starts and --limit must be 1 or more")
    if not os.path.exists("/proc/self/environ"):
        stop("it finds processes by /proc: it needs Linux", status=1)
    args.line = args.line or (None if args.file else SHA256)
    args.copies, args.command = [], []
    for word in command:
        if os.path.isfile(word) and (word.endswith(".py") or os.access(word, os.X_OK)):
            word = os.path.abspath(word)  # not copied: it may import what lies beside it
        elif os.path.isfile(word) and word not in args.file and not word.startswith(("/", "..")):
            args.copies.append(word)  # the command may write to it: each round has its own
        args.command.append(word)
    return args


if __name__ == "__main__":
    main()
