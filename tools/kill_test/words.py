"""What is printed: about the undisturbed run, each round, and all of them."""

import contextlib
import os
import re
import sys
from collections import Counter

try:
    from tqdm import tqdm
except ImportError:  # no bar is drawn then
    tqdm = None

# ---- About the undisturbed run ----


def about_reference(test):
    """Yield what is to be known before the rounds."""
    reference, named_files = test.reference, test.options.named_files
    run = reference.run
    if named_files:
        taken = "taken along, as it fails without" if test.copies else "not taken along"
        yield f"{taken}: {' '.join(named_files)}"
    if re.search(r"Error\b", run.error):
        yield f"the undisturbed run ended well, but printed {clip(run.error, 100)}"
    for where, shell in run.shells.items():
        yield (
            f"{where} stands {clip(shell)}: a signal, or a kill, ends that one alone. Let it end"
            " in: exec ..."
        )
    for line in run.resumed[:1]:
        yield (
            f'the undisturbed run prints "{clip(line.text)}", too: it is no sign that it goes on'
        )
    if not reference.marks:
        few = "too few lines have" if run.marks else "no line has"
        yield (
            f'{few} "epoch 3" or "step 3": kills come by the clock, and work that is done again,'
            " or by nobody, is not seen. Give --step REGEX"
        )
    elif reference.cyclic:
        yield (
            f"{reference.marks[0].text} comes again later: work that is done again is"
            " not seen. Print epoch and step in one line, or give --step REGEX"
        )


# ---- About a round ----


def describe(played, reference):
    """Yield the lines about a Round."""
    run, verdict = played.run, played.verdict
    outcome = verdict.failure or f"equal, {verdict.how}"
    starts = "once" if run.starts == 1 else f"{run.starts} times"
    again = ""
    if reference.marks and not reference.cyclic:  # else it is not seen
        part = sum(kill.again for kill in run.kills) / len(reference.marks)
        again = f"{part:.0%} of the work done again, "
    yield (
        f"round {played.number}: {outcome}; {len(run.kills)} killed, command started {starts},"
        f" {again}{run.seconds:.1f} s"
    )
    indent = " " * 11
    for kill in run.kills:
        when = f"after: {clip(kill.last_line)}" if kill.last_line else "before it printed anything"
        yield f"{kill.seconds:7.1f} s  {kill.name} killed {when}"
        if kill.resumed:
            yield f"{indent}{clip(kill.resumed, 85)}"
    for note in (verdict.note, about_launcher(run), run.stale):
        if note:
            yield f"{indent}note: {note}"
    if verdict.failure:
        if run.error and verdict.failure.startswith("status"):
            yield f"{indent}its error: {clip(run.error, 85)}"
        yield f"{indent}what it printed: {run.folder}/output.txt"


def about_launcher(run):
    """Return what to do about what a killed launcher has left, or ""."""
    killed = any(kill.kind == "launcher" for kill in run.kills)
    if not killed or not run.failure.startswith(("what the killed launcher", "left behind")):
        return ""
    return (
        "ranks that outlive their launcher look at os.getppid() now and then, as start() of"
        " template/survive.py does. --victims rank worker tests the rest"
    )


# ---- About all rounds ----


def summary(options, reference, rounds):
    """Yield the lines about all rounds: what they prove, and what not."""
    kills = [kill for played in rounds for kill in played.run.kills]
    killed = Counter(kill.kind for kill in kills)
    equal = [played for played in rounds if not played.verdict.failure]
    went_on = [played for played in equal if played.verdict.went_on]
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(killed.items()))
    of_these = f", {len(went_on)} of these went on" if equal else ""
    yield f"{len(equal)} of {len(rounds)} rounds ended equal{of_these}; killed: {counts}"
    marks = reference.marks
    hit = {int(kill.place) for kill in kills if kill.place is not None}
    survived = [kill for played in went_on for kill in played.run.kills if is_survived(kill)]
    places = {int(kill.place) for kill in survived if kill.place is not None}
    unproven = [f"no {kind} was killed" for kind in options.victims if not killed[kind]]
    if places and min(places) >= len(marks) - 1 > 0:
        unproven.insert(
            0,
            f"that it resumes its work: where it went on, the kills came after {marks[-1].text}",
        )
    elif places:
        first, last, end = (marks[place].text for place in (min(places), max(places), -1))
        when = f"after {first}" if first == last else f"between {first} and {last}"
        yield f"proven: killed {when} (the last is {end}), it goes on, and ends equal"
    if marks and len(marks) - 1 not in hit:
        unproven.append(f"kills between {marks[-1].text} and the end")
    elif marks and len(marks) - 1 not in places:
        unproven.append(f"that it goes on after a kill between {marks[-1].text} and the end")
    if not any(kill.before_a_save for kill in kills):
        unproven.append("kills before the first save")
    if not any(played.verdict.went_on for played in rounds):
        unproven.append("that it goes on: no line says so (--resumed REGEX), and no step shows it")
    yield f"not proven: {'; '.join([*unproven, 'several machines, power cuts'])}"


def is_survived(kill):
    """Return whether the script went on after a kill, or nobody missed the victim: a worker."""
    return kill.went_on or (kill.kind == "worker" and not kill.restarted)


# ---- How it is printed ----


def say(text):
    """Print above the progress bar, also where nobody looks at a terminal."""
    with tqdm.external_write_mode() if tqdm else contextlib.nullcontext():
        print(text, flush=True)


def with_bar(numbers):
    """Return the numbers of the rounds, with a progress bar, if tqdm is installed."""
    return tqdm(numbers, disable=None, leave=False, unit="round") if tqdm else numbers


def clip(text, width=60):
    """Return a text in one line, of so many characters at most."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def stop(message, status=2):
    """End this process with one line and no traceback: for what the caller can mend."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)
