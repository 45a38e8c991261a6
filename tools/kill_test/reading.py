"""What the command prints: how far it has come, what it says of its result, that it goes on."""

import re

import foreign_command

from . import stale
from .marks import mark_of, without_bar
from .records import PrintedLine, PrintedMark, Result

RANK = r"\[(?:rank|default) ?\d+(?:/\d+)?\]:? ?|"  # in front of a line; or nothing
# A progress bar, which has no end of a line, may stand in front of it.
TRACEBACK = re.compile(rf"({RANK})Traceback \(most recent call last\):?\s*$")


def note_lines(test, run, lines, machine=""):
    """Note in a Run the lines that have come, a list of foreign_command.Line.

    test: the KillTest. As soon as it has a reference, other marks than its steps are left out.
    machine: the name of the one that printed them, if there are several.
    """
    front = f"{machine}: " if machine else ""
    with open(f"{run.folder}/output.txt", "a", encoding="utf-8") as file:
        file.writelines(f"{front}{line.text}\n" for line in lines)
    for line in lines:
        stale.note_line(run, line.text)
        if is_of_traceback(run, line):
            run.last_printed = run.seconds
        elif not foreign_command.LAUNCHERS.match(line.text):
            note_line(test, run, line.text)


def is_of_traceback(run, line):
    """Return whether a foreign_command.Line is one of a traceback's.

    It has lines of the script's source: "train(resume_from_checkpoint=last)" is no sign that the
    script resumes. torch writes the rank before each line of its own.
    """
    if line.stream != "stderr":
        return False
    if begin := TRACEBACK.search(line.text):
        run.tracebacks.add(begin[1])
        return True
    who, text = re.fullmatch(f"({RANK})(.*)", line.text).groups()
    if who not in run.tracebacks:
        return False
    if not text[:1].isspace():  # its last line, "ValueError: no data"; else it was cut short
        run.tracebacks.remove(who)
        return re.match(r"[\w.]+(:|$)", text) is not None
    return True


def note_line(test, run, text):
    """Note in a Run one line that is no launcher's."""
    options = test.options
    run.lines, run.last_printed = run.lines + 1, run.seconds
    run.last_line = run.last_of_start = text
    if re.search(options.resumed, text):
        run.resumed.append(PrintedLine(run.lines, text))
    elif mark := mark_of(text, options.step, test.totals, test.reference):
        note_mark(test.reference, run, mark)
    if options.line:
        texts = [match[0] for match in re.finditer(options.line, text)]
        if texts:
            words = masked(without_bar(re.sub(options.line, "", text))).strip()
            run.results.append(Result(run.lines, words, texts))


def note_mark(reference, run, mark):
    """Note in a Run how far the script has come. reference: a Reference, or None as yet."""
    if mark.bar:
        run.bars.add(mark.bar)
    if mark.begins:
        return
    if reference is None:
        run.printed.append(PrintedMark(run.lines, mark))
        run.marks.setdefault(mark, run.seconds)
    elif mark.kind == reference.kind:
        run.printed.append(PrintedMark(run.lines, mark))
        if reference.bar and not reference.cyclic:
            note_passed(reference, run, mark)
        elif mark in reference.place:
            run.marks.setdefault(mark, run.seconds)


def note_passed(reference, run, mark):
    """Note in a Run the counts that its bar has passed: others than the undisturbed run showed."""
    for passed in reference.marks[len(run.marks) :]:
        if passed.numbers > mark.numbers:
            break
        run.marks.setdefault(passed, run.seconds)


def masked(text):
    """Return a line without its numbers, but for those of ranks."""
    return re.sub(r"(?i)(rank\W{0,2}\d+)|\d+", lambda match: match[1] or "#", text)
