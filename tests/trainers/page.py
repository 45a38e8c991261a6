"""The tables of tools/trainers.md, from the results of the runs (results.json)."""

import re


def page(text, rows, trainers):
    """Return a page with its tables written anew.

    text: the page as it is. rows: what results.json holds. trainers: those of catalogue.py.
    """
    known = {trainer.name: trainer for trainer in trainers}
    rows = sorted(rows, key=lambda row: list(known).index(row["trainer"]))
    for name, lines in ("right", right(rows, known)), ("mistakes", mistakes(rows, known)):
        start, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        before, rest = text.split(start)
        text = before + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    return text


def right(rows, known):
    """Yield the lines of the table of right scripts: one for each script, and one more for each way
    to start it of which something else is said."""
    yield "| Script | check_training says | kill_test says | Why |"
    yield "|---|---|---|---|"
    tried = [row for row in rows if not row["mistake"] and "with" in row]
    for row in tried:
        said = sentences(row["said"], "nothing found")
        same = [
            other["way"]
            for other in tried
            if (other["trainer"], sentences(other["said"], "nothing found"))
            == (row["trainer"], said)
        ]
        if row["way"] != same[0]:
            continue  # it stands in the row of another way
        trainer = known[row["trainer"]]
        script = f"[{trainer.title}](../tests/trainers/{trainer.script})"
        ways = [way for way in same if way]
        name = script + (f", also with {', '.join(ways)}" if ways else "")
        killed = verdict(row) or "not tried"
        yield cells(name, said, killed, trainer.why if "kill" in row else "")
    packages = {}
    for row in rows:
        packages |= row["versions"]
    yield f"\nWith {', '.join(f'{name} {v}' for name, v in sorted(packages.items()))}."


def mistakes(rows, known):
    """Yield the lines of the table of mistakes: a row for each trainer, a column for each level."""
    yield "| Trainer | found | question | nothing |"
    yield "|---|---|---|---|"
    for trainer in known.values():
        wrong = {"found": [], "asked": [], "nothing": []}
        for row in rows:
            if row["trainer"] == trainer.name and row["mistake"] and "with" in row:
                more = [each["level"] for each in row["said"] if not expected(each, trainer)]
                level = min(more, key=["found", "asked"].index, default="nothing")
                wrong[level].append(row["wrong"])
        if any(wrong.values()):
            yield cells(trainer.title, *(";<br>".join(each) or "-" for each in wrong.values()))


def expected(each, trainer):
    """Is this said of the right script, too?"""
    return any(re.search(pattern, each["what"]) for pattern in trainer.says)


def sentences(said, nothing):
    """Return what check_training said, each sentence with its level, and most without its place."""
    words = {"found": "found", "asked": "question"}
    return (
        "<br>".join(f"{words[each['level']]}: {without_places(each['what'])}" for each in said)
        or nothing
    )


def without_places(sentence):
    """Return it without the lines of the script, and without places in brackets: they say little
    to somebody who has another script."""
    sentence = re.sub(r" of \w+, from [\w.]+\.py:\d+", "", sentence)
    return re.sub(r" \([\w.]+\.py:\d+\)", "", sentence)


def verdict(row):
    """Return kill_test's total, and what it says of the rounds that were not as they should."""
    lines = row.get("kill", {}).get("lines", [])
    total = [line.partition(";")[0] for line in lines if re.match(r"\d+ of \d+ rounds", line)]
    others = set()
    for line in lines:
        if match := re.match(r"round \d+: (?!equal, went on)([^;:]*)", line):
            others.add(match[1])
    return "<br>".join(total + sorted(others))


def cells(*texts):
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
