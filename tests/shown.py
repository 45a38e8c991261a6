"""What the documents show: blocks of commands, found by their names, and what commands printed.

A block of sh, bash, python or diff has a comment above it, <!-- block: NAME -->, and a name of its
own. bash: single commands, each of which is run by itself. sh: one piece, run as a whole. diff: two
scripts, the one before it and the one after.

docs/transcripts/: what commands of the documents printed, and the blocks that show it. A file holds
a command and the lines of its ranks. pytest -m long --write-transcripts writes all files anew, and
the blocks with them. A block names its file in a comment above it, and shows the whole, or some of
its lines, in their order.

Links: each leads to a file, and its anchor to a title there, or to a page on the list below.
"""

import os
import re
import tempfile

from support import ROOT

README = ROOT / "README.md"
LAUNCH = ROOT / "launch/README.md"
PITFALLS = ROOT / "pitfalls/README.md"
JOB = ROOT / "docs/how_a_job_starts.md"
DOCUMENTS = [README, *sorted({*ROOT.glob("[!.]*/README.md"), *ROOT.glob("docs/*.md")})]
LAB_STORY = "the four blocks of launch/README.md on two machines, one after the other"
KILL_TEST = ("python launch/kill_test.py --rounds 3 --seed 24506 -- torchrun --standalone"
             " --nproc-per-node=2 --max-restarts=3 02_torchrun_elastic.py 6 1")
FOLDER = ROOT / "docs/transcripts"
BLOCK = re.compile(
    r"<!-- from docs/transcripts/(\w+\.txt) -->\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
OFFICIAL = ("https://docs.pytorch.org/", "https://pytorch.org/get-started/",
            "https://github.com/pytorch/", "https://github.com/python/",
            "https://arxiv.org/abs/")  # fmt: skip


def named_blocks(documents=None):
    """{name: (document, language, text)} of all blocks but those of text; ValueError if unclear."""
    found = {}
    for document in documents or DOCUMENTS:
        lines, number = document.read_text().splitlines(), 0
        while number < len(lines):
            if fence := re.match(r" *```(.*)$", lines[number]):
                where, language, start = f"{document.name}:{number + 1}", fence[1], number + 1
                number = lines.index(lines[number].partition("```")[0] + "```", start)
                name = re.fullmatch(r" *<!-- block: (.+) -->", lines[start - 2])
                if language not in ("bash", "sh", "python", "diff", "text"):
                    raise ValueError(f"{where}: a block of {language or 'no language'}")
                if language != "text":
                    if not name or name[1] in found:
                        raise ValueError(f"{where}: a block needs a name of its own")
                    text = "".join(f"{line}\n" for line in lines[start:number])
                    found[name[1]] = document, language, text
            number += 1
    return found


def block(name):
    """The text of the block of that name."""
    return named_blocks()[name][2]


def masked(lines):
    """Lines of the ranks, sorted, with numbers and the width of their columns masked.

    Several numbers in a row count as one: how many tasks a process did, say, differs by chance.
    """
    masks = {
        r"\|[0-9a-j.]+\|": "|DRAWING|",  # first: a stretch of it can look like a checksum
        r"\S+(?=( +\d+){3} +(cpu|cuda:\d+) +\d+$)": "MACHINE",
        r"(?<=RUN_ID=)\S+": "JOB",
        r"\b[0-9a-f]{12}\b": "#",
        rf"({re.escape(tempfile.gettempdir())}|/tmp)/\w+": "FOLDER",
        r" *(\d+\.)?\d+(e[+-]\d+)?": "#",
        "#+": "#",
        " +": " ",
        r"(?<=did#:)#? *$": "",  # a process may do none
    }
    for pattern, mask in masks.items():
        lines = [re.sub(pattern, mask, line) for line in lines]
    return sorted(lines)


def read(path):
    """The command and the lines in a transcript."""
    command, *lines = path.read_text().splitlines()
    return command.removeprefix("$ "), lines


def write(path, command, lines):
    """Write a transcript, and show its new lines wherever a document showed the old ones."""
    path.write_text("\n".join([f"$ {command}", *lines, ""]))
    rest = iter(lines)  # one for all blocks: each goes on where the one before has ended

    def new_block(found):
        name, old = found[1], found[2].splitlines()
        if name != path.name:
            return found[0]
        # All lines, in the order in which they came this time, or those that look like the old.
        new = lines if len(old) == len(lines) else [next_like(line, rest) for line in old]
        return "\n".join([f"<!-- from docs/transcripts/{name} -->", "```text", *new, "```"])

    for document in DOCUMENTS:
        old = document.read_text()
        if (new := BLOCK.sub(new_block, old)) != old:
            document.write_text(new)


def next_like(old, lines):
    """The next of lines that is the old one but for its numbers."""
    return next(line for line in lines if masked([line]) == masked([old]))


def without_code(document):
    """The text of a document without its blocks of code, where # begins a comment."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(document):
    """The anchors of its titles, as GitHub makes them.

    Lower case, no punctuation, spaces become hyphens; a title that comes again gets a number.
    """
    found = []
    for title in re.findall(r"^#+ (.*)", without_code(document), re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        again = found.count(anchor)
        found.append(f"{anchor}-{again}" if again else anchor)
    return found


def links(document):
    """The targets of all links and pictures of a document."""
    return re.findall(r"\]\(([^)]+)\)", without_code(document))


def link_problems(document):
    """The links of a document that lead nowhere, or to a page elsewhere that is not OFFICIAL."""
    problems = []
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if "://" in link:
            good = link.startswith(OFFICIAL)
        elif not (target.exists() and os.path.realpath(target).startswith(f"{ROOT}/")):
            good = False
        else:
            good = not anchor or target.suffix == ".md" and anchor in anchors(target)
        problems += [] if good else [f"{document.name}: {link}"]
    return problems
