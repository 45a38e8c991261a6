"""What the documents show: blocks of commands, what commands printed, and links.

A block of sh, bash, python or diff has a comment above it, <!-- block: NAME -->, and a name of its
own. bash: single commands, each of which is run by itself. sh: one piece, run as a whole. diff: of
two files in docs/.

docs/transcripts/: a file holds a command and what its ranks printed. A block names it in a comment
above, and has all or some of its lines. --write-transcripts writes files and blocks anew.
"""

import re
import tempfile
from collections import Counter

from started import ROOT

README = ROOT / "README.md"
LAUNCH = ROOT / "launch/README.md"
PITFALLS = ROOT / "pitfalls/README.md"
JOB = ROOT / "docs/how_a_job_starts.md"
DOCUMENTS = [
    README,
    *sorted(
        {
            *ROOT.glob("*.md"),
            *ROOT.glob("[!.]*/README.md"),
            *ROOT.glob("template/*/README.md"),
            ROOT / "template/machines.md",
            *ROOT.glob("tools/*.md"),
            *ROOT.glob("docs/*.md"),
        }
        - {README}
    ),
]
LAB_STORY = "the four blocks of launch/README.md on two machines, one after the other"
KILL_TEST = (
    "python tools/kill_test.py --rounds 3 --seed 2 -- torchrun --standalone"
    " --nproc-per-node=2 --max-restarts=3 template/train.py"
)
KILL_TEST_MACHINES = "the block of tools/README.md about several machines, with all its rounds"
CHECK_TRAINING = (
    "python tools/check_training.py --picture steps.svg -- torchrun --standalone"
    " --nproc-per-node=2 train.py"
)
EXERCISE = "python exercises/03_average_gradients.py, with a sum, and with --solution"
FOLDER = ROOT / "docs/transcripts"
PICTURES = ROOT / "docs/pictures"
FENCE = re.compile(
    r"(?:^ *<!-- block: ([^\n]+) -->\n)?^( *)```([^\n]*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL
)
BLOCK = re.compile(
    r"<!-- from docs/transcripts/(\w+\.txt) -->\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL
)
OFFICIAL = (
    "https://docs.pytorch.org/",
    "https://pytorch.org/get-started/",
    "https://github.com/pytorch/",
    "https://github.com/python/",
    "https://arxiv.org/abs/",
)


def named_blocks():
    """{name: (document, language, text)} of all blocks but those of text; ValueError if unclear."""
    found = {}
    for document in DOCUMENTS:
        for name, _, language, text in FENCE.findall(document.read_text()):
            if language not in ("bash", "sh", "python", "diff", "text"):
                raise ValueError(f"{document.name}: a block of the language {language!r}:\n{text}")
            if language != "text":
                if not name or name in found:
                    raise ValueError(f"{document.name}: a block needs a name of its own:\n{text}")
                found[name] = document, language, text
    return found


def block(name):
    """The text of the block of that name."""
    return named_blocks()[name][2]


def masked(lines):
    """Lines of ranks, sorted, with numbers (several in a row as one) and column widths masked."""
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


def of_ranks(result):
    """The lines of the ranks in what a run has printed."""
    return [line for line in result.output.splitlines() if line.startswith("[rank ")]


def missing(name, result, exact="^$"):
    """The lines of a transcript that a run has not printed as often: whatever their numbers, or,
    if they match exact, with the same ones."""

    def counted(lines):
        return Counter(masked(lines) + [line for line in lines if re.search(exact, line)])

    return counted(read(FOLDER / name)[1]) - counted(of_ranks(result))


def write(path, command, lines):
    """Write a transcript, and show its new lines wherever a document showed the old ones."""
    path.write_text("\n".join([f"$ {command}", *lines, ""]))
    rest = iter(lines)  # one for all blocks: each goes on where the one before has ended

    def new_block(found):
        name, old = found[1], found[2].splitlines()
        if name != path.name:
            return found[0]
        # All lines, in the order in which they came this time, or those like the old ones.
        new = (
            lines
            if len(old) == len(lines)
            else [next(line for line in rest if masked([line]) == masked([shown])) for shown in old]
        )
        return "\n".join([f"<!-- from docs/transcripts/{name} -->", "```text", *new, "```"])

    for document in DOCUMENTS:
        old = document.read_text()
        if (new := BLOCK.sub(new_block, old)) != old:
            document.write_text(new)


def without_code(document):
    """The text of a document without its blocks of code, where # begins a comment."""
    return FENCE.sub("", document.read_text())


def anchors(document):
    """The anchors of its titles, as GitHub makes them: a title that comes again gets a number."""
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


def leads_somewhere(document, link):
    """To a file of the collection, with its anchor if it has one; or to a page of OFFICIAL."""
    if "://" in link:
        return link.startswith(OFFICIAL)
    path, _, anchor = link.partition("#")
    target = (document.parent / path if path else document).resolve()
    inside = target.exists() and target.is_relative_to(ROOT)
    return inside and (not anchor or target.suffix == ".md" and anchor in anchors(target))
