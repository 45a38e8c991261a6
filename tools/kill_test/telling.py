"""What is printed about rounds on several machines."""

import os
from collections import Counter

from .equality import trained_by_others
from .words import clip

INDENT = " " * 11
WORDS = {
    "rank": "a rank killed",
    "worker": "a worker killed",
    "launcher": "a torchrun killed",
    "machine": "a machine died",
    "link": "a link cut",
    "leave": "a machine left by SIGTERM",
    "join": "a machine joined later",
    "first": "the first machine lost",
}


def about_machines(test):
    """Yield what runs where."""
    options, run = test.options, test.reference.run
    disks = "one folder in common" if options.shared else "a folder each"
    rate = f", links of {options.rate}" if options.rate else ""
    yield f"{options.machines} machines, {disks}{rate}; all GPUs are hidden from them"
    commands = {machine.name: as_typed(machine.words) for machine in run.machines}
    if len(set(commands.values())) == 1:
        commands = {"on each": next(iter(commands.values()))}
    for where, command in commands.items():
        yield f"{where}: {clip(command, 300)}"


def about_spares(run):
    """Yield which machines had no ranks in a MachinesRun."""
    for machine in run.machines:
        if not machine.attempts:
            yield f"{machine.name} had no ranks: it is a spare, as --nnodes allows no more machines"


def as_typed(words):
    """Return a command in one line, with short paths."""
    here = f"{os.getcwd()}/"
    return " ".join(word.removeprefix(here) for word in words)


def describe_machines(played, reference):
    """Yield the lines about a Round on several machines."""
    run, verdict = played.run, played.verdict
    outcome = verdict.failure or f"{verdict.equality}; {verdict.how}"
    again = sum(event.again for event in run.kills)
    part = again / max(1, len(reference.marks))
    cost = (
        f"{part:.0%} of the work done again, " if reference.marks and not reference.cyclic else ""
    )
    yield f"round {played.number}: {outcome}; {cost}{run.seconds:.1f} s"
    lines = [(end.seconds, describe_end(end)) for end in run.ends]
    lines += [(event.seconds, describe_event(event, reference)) for event in run.kills]
    for _, texts in sorted(lines, key=lambda item: item[0]):
        yield from texts
    for note in [*verdict.notes, run.stale]:
        if note:
            yield f"{INDENT}note: {note}"
    if verdict.failure:
        if run.error and verdict.failure.startswith(("status", "hung")):
            yield f"{INDENT}its error: {clip(run.error, 85)}"
        yield f"{INDENT}what it printed: {run.folder}/output.txt"


def describe_event(event, reference):
    """Return the lines about an Event: what happened, and how it went on."""
    when = f"after {event.last_line}" if event.last_line else "before the first step"
    lines = [f"{event.seconds:7.1f} s  {event.name} {when}"]
    if not event.restarted:
        lines.append(f"{INDENT}nothing was started again for it")
    elif event.next_step is None:
        lines.append(
            f"{INDENT}no rank that was started after it printed a step before the next event"
        )
    else:
        ranks = "1 rank" if event.next_ranks == 1 else f"{event.next_ranks} ranks"
        lost = ""
        if reference.marks and not reference.cyclic:
            lost = f", lost {steps_of(event, reference)}"
        seconds = event.next_step - event.seconds
        resumed = f": {clip(event.resumed, 60)}" if event.resumed else ""
        lines.append(f"{INDENT}{seconds:.1f} s later with {ranks}{lost}{resumed}")
    return lines


def steps_of(event, reference):
    """Return in words how many steps an Event has cost, as the script counts them."""
    first, last = reference.marks[0], reference.marks[-1]
    if len(first.numbers) > 1:
        return f"{event.again:.0f} of {len(reference.marks)} printed steps"
    # It may print each tenth step.
    between = abs(last.numbers[0] - first.numbers[0]) / (len(reference.marks) - 1)
    return f"{event.again * between:.0f} {first.words[0] or 'step'}s"


def describe_end(end):
    """Return the lines about an End."""
    why = f"an end that torchrun cannot avoid: {end.expected}" if end.expected else "why?"
    if end.used_up:
        why = "its restarts were used up, and no step was done"
    what = f"the command on {end.machine} ended, status {end.status}"
    lines = [f"{end.seconds:7.1f} s  {what} ({why})"]
    if end.error and not end.expected:
        lines.append(f"{INDENT}{clip(end.error, 100 - len(INDENT))}")
    return lines


def summary_of_machines(options, rounds, worlds):
    """Yield the lines about all rounds: what they prove, and what not.

    worlds: those of the undisturbed run.
    """
    events = Counter(event.kind for played in rounds for event in played.run.kills)
    idle = [played for played in rounds if not (played.verdict.failure or played.verdict.proves)]
    good = [played for played in rounds if not played.verdict.failure and played.verdict.proves]
    on = [played for played in good if played.verdict.went_on]
    bits = [played for played in good if played.verdict.equality.startswith("equal (")]
    counts = ", ".join(f"{WORDS[kind]} {events[kind]}" for kind in WORDS if events[kind])
    nothing = f"; {len(idle)} proved nothing" if idle else ""
    yield (
        f"{len(good)} of {len(rounds)} rounds were survived, {len(on)} of these went on,"
        f" {len(bits)} ended with equal bits{nothing}; {counts}"
    )
    unproven = [WORDS[kind] for kind in options.victims if not events[kind]]
    if not any(event.before_a_save for played in rounds for event in played.run.kills):
        unproven.append("an event before the first save")
    if worlds and not any(trained_by_others(played.run, worlds[-1].size) for played in rounds):
        unproven.append("steps of fewer ranks")
    never = ["the link of the first machine cut", "a disk lost", "GPUs"]
    yield f"not played: {', '.join([*unproven, *never])}"
