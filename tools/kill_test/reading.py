"""What the command prints: how far it has come, what it says of its result, that it goes on."""

import re

import foreign_command

from .records import Mark, PrintedLine, PrintedMark, Result


def note_lines(test, run, lines):
    """Note in a Run the lines that have come, a list of foreign_command.Line.

    test: the KillTest. As soon as it has a reference, other marks than its steps are left out.
    """
    with open(f"{run.folder}/output.txt", "a", encoding="utf-8") as file:
        file.writelines(f"{line.text}\n" for line in lines)
    for line in lines:
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
    who, text = re.fullmatch(r"(\[(?:rank|default) ?\d+(?:/\d+)?\]:? ?|)(.*)", line.text).groups()
    if text.startswith("Traceback (most recent call last)"):
        run.tracebacks.add(who)
        return True
    if who not in run.tracebacks:
        return False
    if not text[:1].isspace():  # its last line, "ValueError: no data"; else it was cut short
        run.tracebacks.remove(who)
        return re.match(r"[\w.]+(:|$)", text) is not None
    return True


def note_line(test, run, text):
    """Note in a Run one line that is no launcher's."""
    options, reference = test.options, test.reference
    run.lines, run.last_line, run.last_printed = run.lines + 1, text, run.seconds
    if re.search(options.resumed, text):
        run.resumed.append(PrintedLine(run.lines, text))
    else:
        mark = mark_of(text, options.step, test.totals)
        if mark and (reference is None or mark.kind == reference.kind):
            run.printed.append(PrintedMark(run.lines, mark))
            if reference is None or mark in reference.place:
                run.marks.setdefault(mark, run.seconds)
    if options.line:
        texts = [match[0] for match in re.finditer(options.line, text)]
        if texts:
            words = masked(re.sub(options.line, "", text))
            run.results.append(Result(run.lines, words, texts))


def masked(text):
    """Return a line without its numbers, but for those of ranks."""
    return re.sub(r"(?i)(rank\W{0,2}\d+)|\d+", lambda match: match[1] or "#", text)


def mark_of(text, pattern, totals):
    """Return the Mark in a line, how far the script has come; or None.

    pattern: the regular expression --step. totals: {word: the first total that it came with}. A
    word that is new is added.
    """
    numbers, then = {}, ""
    for part in re.finditer(pattern, text):
        word, number = re.fullmatch(r"(.*?)(\d*)", part[0], re.DOTALL).groups()
        word, number = re.sub(r"\W", "", word).lower(), int(number or 0)
        rest = text[part.end() :]
        # Some count what is left: 1/14, where it was 1/40 at first, is 27/40.
        if found := re.match(r"\s*(?:/|of)\s*(\d+)", rest):
            total = int(found[1])
            number += totals.setdefault(word, total) - total
        # The first of each word: "best after step 2" may stand behind.
        numbers.setdefault(word, number)
        then = re.search(r"[a-z]*\Z|[a-z]+", rest.lower())[0]  # the next word, if there is one
    return Mark((*numbers,), (*numbers.values(),), then) if numbers else None
