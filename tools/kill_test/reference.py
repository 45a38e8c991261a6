"""What the undisturbed run has shown, to which each round is held."""

import math
import os
import re
from collections import Counter, defaultdict

from .comparing import load
from .options import MACHINE_KINDS, PATIENCE
from .records import PAUSE, Reference, Span
from .words import clip, stop

LONGEST_PATIENCE = 300  # seconds


def read_reference(options, run):
    """Return the Reference that an undisturbed Run gives. Stop if there is nothing to compare."""
    if run.failure:
        stop(
            f"the command fails undisturbed ({run.failure}). It printed:"
            f" {clip(run.error or 'nothing', 200)}. (It runs in a new folder: give data by"
            " absolute paths)"
        )
    seen = kinds_seen(run)
    if not set(options.victims) & {*seen, *MACHINE_KINDS}:
        stop(
            f"none of --victims {' '.join(options.victims)} was seen, but only:"
            f" {' '.join(seen) or 'nothing, as it ended at once'}"
        )
    kind = main_kind(run)
    times = {mark: seconds for mark, seconds in run.marks.items() if mark.kind == kind}
    printed = [each for each in run.printed if each.mark in times]
    finals = final_results(run, printed)
    check_results(options, run, finals)
    final_texts = defaultdict(list)
    for final in finals:
        final_texts[final.words].append(final.texts)
    texts = clip(", ".join(text for final in finals for text in final.texts), 60)
    if len(times) < 2:  # one alone says neither that the script goes on nor that it begins anew
        kind, times = (), {}
    return Reference(
        run=run,
        result=" and ".join(filter(None, (texts, *options.file))),
        seen=seen,
        kind=kind,
        marks=[*times],
        times=[*times.values()],
        beginning=beginning_of([*times]),
        cyclic=is_cyclic([*times], printed),
        finals=final_texts,
        patience=patience_after(options, [*times.values()]),
        round_limit=options.limit or 10 * run.seconds + 900,
    )


def kinds_seen(run):
    """Return {kind: Span}: when there were processes of each kind, but for those of a moment."""
    seen, whole = {}, Counter()
    for life in run.lives.values():
        seconds = life.last - life.first
        whole[life.kind] += seconds + PAUSE
        if life.kind == "rank":
            seconds = whole["rank"]  # one rank after the other, perhaps
        if seconds > run.seconds / 10:
            span = seen.setdefault(life.kind, Span(life.first, life.last))
            span.first, span.last = min(span.first, life.first), max(span.last, life.last)
    return seen


def main_kind(run):
    """Return the kind of the marks that say how far a Run has come; () if there is none.

    It is the commonest kind, counted by different marks: a script may print its epochs, and
    elsewhere its steps. A progress bar must last: those of an evaluation, or of a file that is
    written, come to their end soon, or begin again and again.
    """
    kinds = defaultdict(dict)  # {kind: {mark: its moment}}
    for mark, seconds in run.marks.items():
        kinds[mark.kind][mark] = seconds
    spans = {kind: max(times.values()) - min(times.values()) for kind, times in kinds.items()}
    longest = max(spans.values(), default=0)
    lasting = [kind for kind in kinds if spans[kind] >= longest / 2 and len(kinds[kind]) > 1]
    onward = [kind for kind in lasting if not comes_again(run, kinds[kind])]
    best = {*onward} or {*lasting}
    for kind in [*kinds]:
        is_bar = kind[-1] is not None
        if best and is_bar and kind not in best:
            del kinds[kind]
    return max(kinds, key=lambda kind: len(kinds[kind]), default=())


def comes_again(run, times):
    """Return whether marks of a kind are cyclic. times: {mark: its first moment}."""
    return is_cyclic([*times], [each for each in run.printed if each.mark in times])


def beginning_of(marks):
    """Return up to which place in the marks a step is one with which work begins from the start.

    A bar, which is drawn by the clock, need not show the first count of another run.
    """
    return 1 if marks and marks[0].bar and len(marks) > 4 else 0


def is_cyclic(marks, printed):
    """Return whether the first mark comes again in the second half of what was printed.

    Such a mark, "step 1" of each epoch, does not say how far the script has come.
    """
    second_half = [each.mark for each in printed[len(printed) // 2 :]]
    if len(marks) <= 2:
        return False
    if marks[0].bar:
        first = marks[beginning_of(marks)].numbers
        return any(mark.numbers <= first for mark in second_half)
    return marks[0] in second_half


def final_results(run, printed):
    """Return the results with which the run ended, a list of Result.

    printed: its steps, a list of PrintedMark.
    """
    first_lines = {}  # {mark: the line with which it was first printed}
    for each in printed:
        first_lines.setdefault(each.mark, each.line)
    last_step = max(first_lines.values(), default=math.inf)
    finals = [result for result in run.results if result.line >= last_step] or run.results[-1:]
    known = {final.words for final in finals} if run.marks else set()
    # A faster rank may have printed its own before the last step of another.
    last = run.results[-max(1, len(run.ranks)) :]
    for result in last:
        if result in finals or result.words in known:
            continue
        if without_digits(result.words) == without_digits(last[-1].words):
            finals.append(result)
    return finals


def without_digits(text):
    return re.sub(r"\d", "", text)


def check_results(options, run, finals):
    """Stop unless there is a result of each kind that was asked for, and a saved state."""
    if options.line and not finals:
        stop(
            f"it prints nothing that matches {options.line!r}: let it print a checksum of its"
            " weights at the end, or give --line REGEX, or --file with the snapshot that it leaves"
        )
    for name in options.file:
        fault = load(run, name).fault
        others = [
            machine.name
            for machine in getattr(run, "machines", [])[1:]
            if os.path.exists(f"{machine.work}/{name}")
        ]
        if fault == f"left no {name}" and others:
            stop(
                f"{run.machines[0].name} has no {name} at the end, but {others[0]} has: --file"
                " means a file of the first machine. Let a rank there save it, or use --shared"
            )
        if fault:
            stop(
                f"it {fault}: give --file as a path in the working directory, of a file that"
                " torch.load(weights_only=True) reads, or compare a printed line by --line"
            )
    if not run.saved:
        stop(
            "it leaves nothing in its working directory from which it could go on: let it save to"
            " a relative path"
        )


def patience_after(options, times):
    """Return for how many seconds processes may live on after the launcher.

    A rank that is starting ends once it looks for the launcher. times: of the steps.
    """
    if options.patience is not None:
        return options.patience or PATIENCE
    first_step = times[0] if times else 0
    return min(LONGEST_PATIENCE, max(PATIENCE, 2 * first_step))
