"""Which of a command's lines is the script's own error?"""

import os
import re

# Lines of torchrun (its log, its table of failures) and frames of its own stack.
LAUNCHERS = re.compile(
    r"[IWEF]\d{4} [\d:.]+ \d+ \S*(torch/|elastic/|api\.py|run\.py|launch\.py)|[=*-]{20,}|"
    r"\S+ FAILED$|(Root Cause|Failures).*:$| *<NO_OTHER_FAILURES>|\[\d+\]:$| +(time|host|rank|"
    r"exitcode|error_file|traceback) *: |torch\.distributed\.elastic\.|"
    r"torch\.multiprocessing\.spawn\.ProcessRaisedException|-- Process \d+ terminated"
)
# A rank that says so has been left by another one, which had the error.
CONSEQUENCE = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|timed? ?out|"
    r"Dist(Backend|Network|Store)Error|KeyboardInterrupt|SignalException"
)
NAMES_AN_ERROR = re.compile(r"(?i)\berror\b|Err(or|no)\b")
CRASH = re.compile(r"Signal \d+ \(SIG(SEGV|ABRT|BUS|FPE|ILL)")  # torchrun's words about a rank
RANK_IN_FRONT = re.compile(r"^\[(rank|default) ?\d+(/\d+)?\]:? ?")
FRAME = re.compile(r' +File "(.+)", line (\d+)')
NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
LIBRARY = re.compile(r"/(site-packages|lib/python[\d.]+)/|^<")  # a file that is not the script's


def own_error(lines):
    """Return the script's own error among these lines, in one line, or "".

    lines: a list of Line, the last that a command has printed.
    """
    tracebacks, others = split_tracebacks(lines)
    errors = tracebacks or [line.text for line in others if NAMES_AN_ERROR.search(line.text)]
    causes = [text for text in errors if not CONSEQUENCE.search(text)]
    crashes = [line.text for line in lines if CRASH.search(line.text)]
    of_stderr = [line.text for line in others if line.stream == "stderr"]
    said_last = (of_stderr or [line.text for line in others])[-1:]
    candidates = causes or errors or crashes or said_last
    return candidates[0].strip() if candidates else ""


def split_tracebacks(lines):
    """Return (a text for each traceback, all other lines), both without those of the launcher.

    The text is the last line of the traceback and the place in the script: "ValueError: no data
    (train.py:7)". No text has the rank in front.
    """
    tracebacks, others = [], []
    inside, where, path = False, "", ""
    for line in lines:
        text = RANK_IN_FRONT.sub("", line.text)
        frame = FRAME.match(text)
        if text.rstrip().endswith("Traceback (most recent call last):"):  # a bar may be in front
            inside, where = True, ""
        elif not inside:
            if not LAUNCHERS.match(text):
                others.append(line._replace(text=text))
        elif frame:
            if not LIBRARY.search(frame[1]):
                path, where = frame[1], f" ({os.path.basename(frame[1])}:{frame[2]})"
        elif re.match(r"\S", text):  # the last line of the traceback
            inside = False
            if text == NO_TORCH and os.path.basename(path) == "torchrun":
                where = f" ({path} is of a Python without torch: activate the one that has it)"
            if not LAUNCHERS.match(text):
                tracebacks.append(text + where)
    return tracebacks, others
