"""What --write does: it keeps a report, and shows it as a table in tests/README.md."""

import re

from started import ROOT

from one_gpu.checks import CHECKS
from one_gpu.report import REPORT, Entry, Report, load

PAGE = ROOT / "tests" / "README.md"
KEPT = ROOT / "docs" / "transcripts" / REPORT
BLOCK = re.compile(
    r"(?<=<!-- written by: python tests/one_gpu FOLDER --write -->\n).*?(?=<!-- end -->)",
    re.DOTALL,
)
LONGEST = 200  # characters of a text in the table
SHOWN = 4  # parts of a figure that has several; the table counts the others


def write_page(folders):
    """Keep the reports of these folders as one, and show it on the page.

    Where several have a check, the last that has run it counts. Raises a ValueError if one of them
    comes from a pretended GPU.
    """
    whole = Report()
    for folder in folders:
        report = load(folder / REPORT)
        if not report.machine.gpu:
            raise ValueError(f"{folder / REPORT} comes from a pretended GPU: not written")
        whole.machine = report.machine
        for name, entry in report.checks.items():
            before = whole.checks.get(name)
            if entry.figures is None and before and before.figures is not None:
                continue
            entry.date = entry.date or report.machine.date
            whole.checks[name] = entry
    whole.save(KEPT)
    lines = "\n".join(rows_of(whole))
    PAGE.write_text(BLOCK.sub(lambda _: f"\n{lines}\n\n", PAGE.read_text()))


def rows_of(report):
    """The lines of the page: the machine, and a table with a row for each check."""
    if not report.checks:
        return ["Not run."]
    machine = report.machine
    where = (
        f"On one {machine.gpu} (CUDA {machine.cuda}, NCCL {machine.nccl}), with torch"
        f" {machine.torch}, Python {machine.python} and {machine.cores} cores:"
    )
    lines = [where, "", "| Check | Result | What was seen |", "|---|---|---|"]
    for check in CHECKS.values():
        entry = report.checks.get(check.name, Entry("not run"))
        result = f"{entry.result}, {entry.date}" if entry.date else entry.result
        cells = (check.what.rstrip("."), result, seen(entry) or "-")
        lines.append(f"| {' | '.join(map(in_a_cell, cells))} |")
    return lines


def seen(entry):
    """The figures of a check in words; "" if there are none."""
    figures = (entry.figures or {}).items()
    return "; ".join(f"{name}: {in_words(value)}" for name, value in figures if value != [])


def in_a_cell(text):
    """A text on one line, without what ends a cell of a table."""
    return " ".join(text.replace("|", "/").split())


def in_words(value):
    """A figure, short enough for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        first = ", ".join(f"{name} {in_words(part)}" for name, part in [*value.items()][:SHOWN])
        return f"{first}, and {len(value) - SHOWN} more" if len(value) > SHOWN else first
    if isinstance(value, list):
        return list_in_words(value)
    return str(value)[:LONGEST]


def list_in_words(values):
    """Some numbers are a measurement, with which benchmarks end: a median, the least, the most."""
    if len(values) >= 3 and all(isinstance(value, int | float) for value in values):
        return f"{values[0]} ({values[1]} to {values[2]})"
    if len(values) > 2:
        return f"{len(values)} lines in the report"
    return " / ".join(map(str, values))
