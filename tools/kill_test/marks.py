"""How far the script has come, as a line says it: the numbers of its words, and of its bars."""

import re

from .records import Bar, Mark

NUMBER = r"[-+]?\d[\d.]*(?:e[-+]?\d+)?"
GRAPH = "━╸╺█▏▎▍▌▋▊▉"  # of which bars are drawn
# What tells a bar from a line such as "epoch 3 | 10/20 | loss 0.5".
DRAWN = re.compile(rf"[{GRAPH}]|\d%\||\[[\d:]+<|\d(it/s|s/it)")
# What a bar says at its end: counts, times, the speed, and figures, "train_loss: 0.512".
OF_A_BAR = rf"[{GRAPH}\]]|\d+/\d+|\d:\d\d|it/s|s/it|\w+[:=] ?-?\d+\.\d+(?:e-?\d+)?"


def mark_of(text, pattern, totals, reference=None):
    """Return the Mark in a line, how far the script has come; or None.

    pattern: the regular expression --step. totals: {word: the first total that it came with}. A
    word that is new is added. reference: the test's Reference, once there is one.
    """
    numbers, then, bar = {}, "", None
    for part in re.finditer(pattern, text):
        raw, number = re.fullmatch(r"(.*?)(\d*)", part[0], re.DOTALL).groups()
        rest = text[part.end() :]
        word, number = name_of(raw, rest), int(number or 0)
        total = re.match(r"\s*(?:/|of)\s*(\d+)", rest)
        if total and not word and DRAWN.search(text):
            bar = Bar(description(text[: part.start()]), int(total[1]))
            bar, number = as_undisturbed(bar, number, reference)
        elif total:
            # Some count what is left: 1/14, where it was 1/40 at first, is 27/40.
            number += totals.setdefault(word, int(total[1])) - int(total[1])
        # The first of each word: "best after step 2" may stand behind.
        numbers.setdefault(word, number)
        then = re.search(r"[a-z]*\Z|[a-z]+", rest.lower())[0]  # the next word, if there is one
    if not numbers:
        return None
    return Mark((*numbers,), (*numbers.values(),), "" if bar else then, bar)


def name_of(raw, rest):
    """Return the word of a number. raw: what stands in front of the number. rest: what follows.

    "Train: 4 [ 5/18" and "Epoch: [2] [ 5/10]" count epochs and steps. A bar's count has no word.
    """
    word = re.sub(r"\W", "", raw).lower()
    if not word and "[" in raw:
        return "step"
    return "epoch" if word == "train" and re.match(r"\s*\[", rest) else word


def description(text):
    """Return the words in front of a bar, without numbers. text: all in front of its count."""
    front = re.split(rf"\d+%\||[|{GRAPH}]", text)[0]
    return " ".join(re.findall(r"[^\W\d_]+", re.sub(NUMBER, " ", front.lower())))


def as_undisturbed(bar, number, reference):
    """Return the Bar and its number as the undisturbed run has them.

    A bar that the undisturbed run has not drawn may count what is left of the steps.
    """
    main = reference.bar if reference else None
    unknown = main is not None and bar not in reference.run.bars
    if unknown and bar.description == main.description and bar.total < main.total:
        return main, number + main.total - bar.total
    return bar, number


def without_bar(text):
    """Return what stands behind a progress bar that fills the line's front, or all of the line.

    rich breaks a bar's figures into several lines: the last may be "0.930" alone.
    """
    if not DRAWN.search(text):
        return re.sub(r"^\s*([\w/]+:)?\s*-?\d+\.\d+(e-?\d+)?\s*", "", text)
    return re.sub(rf"^.*(?:{OF_A_BAR})", "", text, flags=re.DOTALL)
