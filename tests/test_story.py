"""01, 02 and 03 tell one story: what differs from the script before is marked, and nothing else is.

A mark is a comment line, "# New in 02: what, and why". Directly above a top-level def, class or
constant (above its decorators) it covers the whole of it; inside a function, its paragraph: the
lines around it up to a blank one. What has no mark is byte for byte as in the script before, whose
own marks do not count in this. The functions below return lists of problems, line by line.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from difflib import SequenceMatcher

import pytest
from support import ROOT

SCRIPTS = {path.name[:2]: path.read_text() for path in sorted(ROOT.glob("0[1236]_*.py"))}
EARLIER = {"02": "01", "03": "02"}
STANDS_FOR = {"02": {"main": "worker"}}  # mp.spawn calls worker, torchrun calls main
FIRST_DIVIDER = {"01": 200, "02": 214, "03": 344}
MARK = re.compile(r"# New in (\d\d): \S+( \S+)+")


@dataclass
class Part:
    """A top-level function, class or constant: its lines first to last, numbered from 1."""

    name: str
    first: int
    last: int
    marked: bool = False  # as a whole
    marks: tuple = ()  # the lines of the marks inside


class Script:
    """A source text, its lines, its comments, and its parts by their names, with their marks."""

    def __init__(self, source, number):
        self.number, self.lines, self.problems = number, source.splitlines(), []
        self.tree = ast.parse(source)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        self.comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
        self.parts = {part.name: part for part in map(self.part, self.tree.body) if part}
        for line in self.find_marks():
            self.place(line)

    def part(self, node):
        """The Part of a node of the tree; None for an import, say."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return Part(node.name, first, node.end_lineno)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            [target, *_] = node.targets if isinstance(node, ast.Assign) else [node.target]
            return Part(ast.unparse(target), node.lineno, node.end_lineno)
        return None

    def alone(self, line):
        """Whether that line holds a comment and nothing else."""
        return line in self.comments and self.lines[line - 1].lstrip().startswith("#")

    def find_marks(self):
        """The lines of this script's marks; those of the scripts before it count for nothing."""
        found = []
        for line, token in self.comments.items():
            mark = MARK.match(token.string)
            if re.search(r"New in 0\d", token.string) and not (mark and self.alone(line)):
                self.problems.append(f"line {line}: no mark, alone and saying what and why")
            elif mark and mark[1] > self.number:
                self.problems.append(f"line {line}: a mark of a later script")
            elif mark and mark[1] == self.number:
                found.append(line)
        return found

    def place(self, line):
        """Note to which part a mark belongs."""
        for part in self.parts.values():
            if part.first <= line <= part.last:
                part.marks += (line,)
                return
        below = line
        while self.alone(below):
            below += 1
        for part in self.parts.values():
            if part.first == below:
                part.marked = True
                return
        self.problems.append(f"line {line}: a mark above nothing")

    def has_old_mark(self, line):
        mark = self.alone(line) and MARK.match(self.comments[line].string)
        return bool(mark) and mark[1] < self.number

    def text(self, part, without=()):
        """The lines of a part, but for those of marks of the scripts named."""
        wanted = []
        for line in range(part.first, part.last + 1):
            mark = MARK.match(self.comments[line].string) if self.alone(line) else None
            if not (mark and mark[1] in without):
                wanted.append(self.lines[line - 1])
        return "\n".join(wanted)

    def code(self, part):
        """[(line, text without its comment, length of its comments)] of the lines with code."""
        found, length = [], 0
        for line in range(part.first, part.last + 1):
            comment, text = self.comments.get(line), self.lines[line - 1]
            if comment:
                text = text[: comment.start[1]]
                length += 0 if MARK.match(comment.string) else len(comment.string)
            if text.strip():
                found.append((line, text.rstrip(), length))
                length = 0
        return found

    def paragraph(self, part, line):
        """The lines around a line, up to blank ones, inside a part."""
        first = last = line
        while first > part.first and self.lines[first - 2].strip():
            first -= 1
        while last < part.last and self.lines[last].strip():
            last += 1
        return set(range(first, last + 1))


def mark_problems(source, earlier, number, stands_for=None):
    """Differences without a mark, marks without a difference; earlier: the script before."""
    before, script = Script(earlier, EARLIER[number]), Script(source, number)
    problems = script.problems
    for part in script.parts.values():
        old = before.parts.get((stands_for or {}).get(part.name, part.name))
        if old is None:
            if not part.marked:
                problems.append(f"{part.name} is new and has no mark above it")
        elif script.text(part, {before.number, number}) == before.text(old, {before.number}):
            if part.marked or part.marks:
                problems.append(f"{part.name} has a mark and is as in {before.number}")
        elif part.marks and not part.marked:
            problems += inner_problems(script, part, before, old)
        elif not part.marked:
            problems.append(f"{part.name} differs from {before.number} and has no mark")
    return problems


def inner_problems(script, part, before, old):
    """The same inside a function that holds marks, by its paragraphs; and longer comments."""
    paragraphs = {line: script.paragraph(part, line) for line in part.marks}
    covered = set().union(*paragraphs.values())
    new_code, old_code = script.code(part), before.code(old)
    new_texts, old_texts = ([text for _, text, _ in code] for code in (new_code, old_code))
    numbers = [line for line, *_ in new_code]
    problems, changed = [], set()
    diff = SequenceMatcher(None, old_texts, new_texts, autojunk=False)
    for kind, i1, i2, j1, j2 in diff.get_opcodes():
        if kind == "equal":
            for (_, _, was), (line, _, now) in zip(old_code[i1:i2], new_code[j1:j2], strict=True):
                if line not in covered and now > was:
                    problems.append(f"line {line}: a longer comment in {part.name}, without a mark")
        elif kind == "delete":  # a neighbour must be marked
            neighbours = {numbers[j] for j in (j1 - 1, j1) if 0 <= j < len(numbers)}
            changed |= neighbours
            if not neighbours & covered:
                problems.append(f"line {max(neighbours)}: lines of {before.number} are missing in"
                                f" {part.name}, without a mark")  # fmt: skip
        else:
            lines = set(numbers[j1:j2])
            if kind == "insert":  # which of two like lines is the new one, no diff can know
                lines = next((slid for slid in slides(new_texts, numbers, j1, j2)
                              if slid <= covered), lines)  # fmt: skip
            changed |= lines
            if kind == "replace" and 0 < i1 and 0 < j1:  # the end of what is above may be gone
                above, gone = old_code[i1 - 1][0], old_code[i1][0]
                changed |= {numbers[j1 - 1]} if gone in before.paragraph(old, above) else set()
            problems += [f"line {line}: a difference in {part.name}, without a mark"
                         for line in sorted(lines - covered)]  # fmt: skip
    problems += [f"line {line}: a mark in {part.name}, and nothing differs there"
                 for line, paragraph in paragraphs.items() if not paragraph & changed]  # fmt: skip
    return problems


def slides(texts, numbers, begin, end):
    """The lines of an insertion begin..end, wherever it can stand with the same result."""
    for step in (1, -1):
        b, e = begin, end
        while True:
            yield set(numbers[b:e])
            enter, leave = (e, b) if step == 1 else (b - 1, e - 1)
            if not 0 <= enter < len(texts) or texts[enter] != texts[leave]:
                break
            b, e = b + step, e + step


def order_problems(source, earlier):
    """Names that two scripts share stand in the same order."""
    names, before = (list(Script(text, "99").parts) for text in (source, earlier))
    ours = [name for name in names if name in before]
    theirs = [name for name in before if name in names]
    return [f"{a} stands where {b} stood" for a, b in zip(ours, theirs, strict=True) if a != b][:1]


def new_here_problems(source, number):
    """From "New here" on, the docstring's paragraph names what holds marks, and nothing else."""
    script = Script(source, number)
    docstring = ast.get_docstring(script.tree) or ""
    found = re.findall(r"^New here.*?(?=\n\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        return [f"{len(found)} lines of the docstring begin with New here"]
    named = set(re.findall(r"\w+", found[0])) & set(script.parts)
    marked = {part.name for part in script.parts.values() if part.marked or part.marks}
    return [f"New here does not name {name}, which has a mark" for name in sorted(marked - named)] \
        + [f"New here names {name}, which has no mark" for name in sorted(named - marked)]


def layout_problems(source, first_divider):
    """Where what stands in a script: the story first."""
    script, problems = Script(source, "99"), []
    starts = [node.lineno for node in ast.walk(script.tree) if isinstance(node, ast.Call)
              and ast.unparse(node.func).endswith("init_process_group")]  # fmt: skip
    if min(starts, default=10**6) > 110:
        problems.append("no init_process_group in the first 110 lines")
    dividers = [n for n, line in enumerate(script.lines, 1) if line.startswith("# ---- ")]
    if len(dividers) != 2:
        problems.append(f"{len(dividers)} dividers, not 2")
    if min(dividers, default=10**6) >= first_divider:
        problems.append(f"the first divider does not stand before line {first_divider}")
    functions = [node.name for node in script.tree.body if isinstance(node, ast.FunctionDef)]
    if functions[:1] != ["main"] or functions[-1:] != ["parse_args"]:
        problems.append(f"functions from {functions[:1]} to {functions[-1:]}: main, ... parse_args")
    return problems


def steps(source, ways=1):
    """{"1": words up to the full stop} of the comments "# Step 1: words."; or ValueError.

    A script that shows two ways may have a step twice, with the same words.
    """
    script, found = Script(source, "99"), {}
    for line, token in script.comments.items():
        if not token.string.startswith("# Step "):
            continue
        text = token.string[2:]
        while "." not in text and script.alone(line + 1):
            line += 1
            text += " " + script.comments[line].string.lstrip("# ")
        step = re.match(r"Step (\d)(.*?)\.(\s|$)", text)
        if not step or step[1] in found and (ways == 1 or found[step[1]] != step[2]):
            raise ValueError(f"line {line}: not one sentence, or a second time: {text!r}")
        found[step[1]] = step[2]
    if sorted(found) != list("123456"):
        raise ValueError(f"steps {sorted(found)}, not 1 to 6")
    return found


def unused_imports(source):
    tree, names = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return sorted(names - {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})


# ---- The scripts ----


@pytest.mark.parametrize("number", EARLIER)
def test_what_differs_is_marked_and_nothing_else(number):
    earlier = SCRIPTS[EARLIER[number]]
    problems = mark_problems(SCRIPTS[number], earlier, number, STANDS_FOR.get(number))
    problems += order_problems(SCRIPTS[number], earlier)
    problems += new_here_problems(SCRIPTS[number], number)
    assert not problems, "\n".join(problems)
    assert any(part.marked or part.marks for part in Script(SCRIPTS[number], number).parts.values())


@pytest.mark.parametrize("number", FIRST_DIVIDER)
def test_the_story_comes_first(number):
    problems = layout_problems(SCRIPTS[number], FIRST_DIVIDER[number])
    assert not problems, "\n".join(problems)
    assert unused_imports(SCRIPTS[number]) == []


@pytest.mark.parametrize("number", ["02", "03", "06"])
def test_the_six_steps_have_the_same_words(number):
    assert steps(SCRIPTS[number], ways=2 if number == "06" else 1) == steps(SCRIPTS["01"])


def test_03_has_no_check():
    assert "--check" not in SCRIPTS["03"]


# ---- Made-up scripts, to see each problem found ----

BEFORE = '''"""One."""

SEED = 0


def worker(rank):
    start(rank)

    train()


def train():
    model = Net()  # a long comment on the model
    step(model)

    save(model)
    log("done")
    log("end")


def save(model):
    write(model)
'''
AFTER = '''"""Two.

New here: the environment (main), snapshots (resume, train), LIMIT.
"""

SEED = 0
# New in 02: a limit, as a rank may never come
LIMIT = 3


# New in 02: torchrun calls main in each process
@record
def main():
    start(os.environ["RANK"])

    train()


def train():
    model = Net()  # a comment
    step(model)

    # New in 02: go on where the job was
    resume(model)
    save(model)
    log("done")
    log("end")


# New in 02: read what the job before it saved
def resume(model):
    read(model)


def save(model):
    write(model)
'''
MAIN = {"main": "worker"}


def changed(*changes, text=AFTER):
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_a_good_story_has_no_problems():
    assert mark_problems(AFTER, BEFORE, "02", MAIN) == []
    assert order_problems(AFTER, BEFORE) == []
    assert new_here_problems(AFTER, "02") == []


GO_ON = "    # New in 02: go on where the job was\n    resume(model)\n"


@pytest.mark.parametrize(("change", "problem"), [
    # Unmarked differences
    (("SEED = 0", "SEED = 1"), "SEED differs from 01 and has no mark"),
    (("    write(model)", "    write(model, 1)"), "save differs from 01 and has no mark"),
    (("    write(model)", "    write(model)  # now"), "save differs from 01 and has no mark"),
    (("# New in 02: a limit, as a rank may never come\n", ""), "LIMIT is new and has no mark"),
    (("# New in 02: read what the job before it saved\n", "# why\n"), "resume is new and has no"),
    (("# New in 02: torchrun calls main in each process\n", ""), "main differs from 01 and has no"),
    (("    step(model)", "    step(model, 1)"), "line 21: a difference in train, without a mark"),
    (("    model = Net()  # a comment\n", ""), "line 20: lines of 01 are missing"),
    ((GO_ON, "    resume(model)\n"), "train differs from 01 and has no mark"),
    (("  # a comment", "  # a comment longer than that of 01"), "line 20: a longer comment"),
    (("    step(model)\n", "    # why\n    step(model)\n"), "line 22: a longer comment"),
    # Marks without a difference, in the wrong place, or that say nothing
    (("    resume(model)\n", ""), "line 23: a mark in train, and nothing differs there"),
    (("    model = Net()", "    # New in 02: nothing at all\n    model = Net()"),
     "line 20: a mark in train, and nothing differs there"),
    (("def save", "# New in 02: nothing at all\ndef save"), "save has a mark and is as in 01"),
    (("def save", "# New in 02: far away\n\n\ndef save"), "line 35: a mark above nothing"),
    (("    read(model)", "    read(model)  # New in 02: beside it"), "line 32: no mark, alone"),
    (("# New in 02: read what the job before it saved", "# New in 02:"), "line 30: no mark, alone"),
    (("# New in 02: read what", "# New in 03: read what"), "line 30: a mark of a later script"),
])  # fmt: skip
def test_problems_with_marks(change, problem):
    found = mark_problems(changed(change), BEFORE, "02", MAIN)
    assert any(problem in one for one in found), found


def test_an_insertion_beside_a_like_line_may_be_either():
    """Of two equal lines one is in a marked paragraph: it is the new one."""
    end, twice = '    log("end")\n', "    # New in 02: said twice, to be heard\n"
    after = changed((GO_ON, ""), (end, f"{end}\n{twice}{end}"))
    assert mark_problems(after, BEFORE, "02", MAIN) == []
    after = changed((GO_ON, ""), (end, f"{end}{twice}\n{end}"))
    assert mark_problems(after, BEFORE, "02", MAIN) == []


def test_a_missing_line_beside_a_mark():
    """A line that is gone stands nowhere: the mark is beside where it was."""
    mark = "    # New in 02: no save\n"
    after = changed((GO_ON + "    save(model)\n", mark))
    assert mark_problems(after, BEFORE, "02", MAIN) == []
    after = changed((GO_ON + "    save(model)\n", ""))
    assert mark_problems(after, BEFORE, "02", MAIN) == [
        "train differs from 01 and has no mark"]  # fmt: skip


def test_marks_of_the_script_before_count_for_nothing():
    """03 has 02's marks no more, or still: both are as before."""
    third = re.sub("# New in 02: .*\n *", "", AFTER).replace("    \n", "\n")
    for source in (third, AFTER):
        assert mark_problems(source, AFTER, "03") == []
    own = third.replace("    read(model)", "    # New in 03: from all machines\n    read(model, 2)")
    assert mark_problems(own, AFTER, "03") == []
    assert mark_problems(own.replace("write(", "writes("), AFTER, "03") == [
        "save differs from 02 and has no mark"]  # fmt: skip


def test_order():
    after = changed(("SEED = 0\n", ""), ("    write(model)\n", "    write(model)\n\n\nSEED = 0\n"))
    assert order_problems(after, BEFORE) == ["train stands where SEED stood"]


@pytest.mark.parametrize(("change", "problem"), [
    (("(main)", ""), "New here does not name main, which has a mark"),
    (("(resume, train)", "(train)"), "New here does not name resume, which has a mark"),
    ((", LIMIT.", "."), "New here does not name LIMIT, which has a mark"),
    (("snapshots", "to save"), "New here names save, which has no mark"),
    (("New here:", "News:"), "0 lines of the docstring begin with New here"),
])  # fmt: skip
def test_problems_with_new_here(change, problem):
    assert problem in new_here_problems(changed(change), "02")


LAYOUT = '''"""Three."""
import torch.distributed as dist


def main():
    # Step 1: read who I am. Torchrun says so.
    # Step 2: choose the
    # device.
    dist.init_process_group()
    # Step 3: share the data.
    # Step 4: wrap the model.
    # Step 5: train. It takes long.
    # Step 6: leave together.


# ---- What any training needs ----


# ---- No part of the lesson ----


def parse_args():
    pass
'''


def test_a_good_layout():
    assert layout_problems(LAYOUT, 18) == [] and unused_imports(LAYOUT) == []
    assert steps(LAYOUT)["2"] == ": choose the device" and steps(LAYOUT)["5"] == ": train"


@pytest.mark.parametrize(("change", "problem"), [
    (("import torch", "\n" * 110 + "import torch"), "no init_process_group in the first 110 lines"),
    (("    dist.init_process_group()", '    "init_process_group()"'), "no init_process_group in"),
    (("# ---- What any training needs ----", ""), "1 dividers, not 2"),
    (("def main", "\n\n\ndef main"), "the first divider does not stand before line 18"),
    (("def main", "def worker"), "functions from ['worker'] to ['parse_args']"),
    (("def parse_args", "def parse"), "functions from ['main'] to ['parse']"),
])  # fmt: skip
def test_problems_with_the_layout(change, problem):
    found = layout_problems(changed(change, text=LAYOUT), 18)
    assert any(one.startswith(problem) for one in found), found


@pytest.mark.parametrize(("old", "new"), [
    ("# Step 4: wrap the model.", "# wrap the model."),
    ("# Step 4: wrap the model.", "# Step 3: wrap the model."),
    ("# Step 6: leave together.", "# Step 6: leave together"),
    ("# Step 6: leave together.", "# Step 7: leave together."),
])  # fmt: skip
def test_steps_that_are_unclear(old, new):
    with pytest.raises(ValueError):
        steps(changed((old, new), text=LAYOUT))


def test_other_words_and_unused_imports_are_seen():
    assert steps(changed(("wrap the model", "wrap it"), text=LAYOUT)) != steps(LAYOUT)
    assert unused_imports("import os, torch.nn as nn\nfrom a import b as c\nos.x") == ["c", "nn"]
