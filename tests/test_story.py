"""01, 02 and 03 tell one story: what differs from the script before is marked, and nothing else is.

A mark is a comment line, "# New in 02: what, and why". Above a top-level def, class or constant it
covers the whole of it; inside a function, its paragraph: the lines around it up to a blank one. The
code of all that has no mark stands in the script before, with the same bytes.
"""

import ast
import re

import pytest
from support import ROOT

EARLIER = {"02": "01", "03": "02"}
MARK = r"^ *# New in {}: \S+ \S.*\n"


def parts_of(number):
    """{name: (its text, whether it has a mark above)} of the top-level parts of a script."""
    [path] = ROOT.glob(f"{number}_*.py")
    lines, parts = path.read_text().splitlines(keepends=True), {}
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign):
            first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno).lineno
            above = first - 1
            while lines[above - 1].startswith("#"):
                above -= 1
            name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else node.name
            marked = re.search(MARK.format(number), "".join(lines[above : first - 1]), re.MULTILINE)
            parts[name] = "".join(lines[first - 1 : node.end_lineno]), bool(marked)
    return parts


def code(text):
    """The lines of code in a text; a # with two blanks in front begins a comment."""
    lines = [re.sub(r"(^ *|  )#( .*)?$", "", line).rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


@pytest.mark.parametrize("number", EARLIER)
def test_what_differs_is_marked_and_nothing_else(number):
    before, parts = parts_of(EARLIER[number]), parts_of(number)
    before["main"] = before.get("worker", before["main"])  # mp.spawn calls worker, torchrun main
    mark, marked_parts = re.compile(MARK.format(number), re.MULTILINE), set()
    for name, (text, marked) in parts.items():
        old = before.get(name, ("", False))[0]
        same = re.sub(MARK.format(r"\d\d"), "", text, flags=re.MULTILINE) == re.sub(
            MARK.format(r"\d\d"), "", old, flags=re.MULTILINE)  # fmt: skip
        if marked or mark.search(text):
            marked_parts.add(name)
        assert same != (name in marked_parts), f"{name}: a mark, and no difference, or without one"
        if not same and not marked:
            for paragraph in re.split(r"\n\s*\n", text):
                assert code(paragraph) in code(old) or mark.search(paragraph), (
                    f"{name}: a difference, and no mark:\n{paragraph}")  # fmt: skip
    order = [name for name in parts if name in before]
    assert order == [name for name in before if name in parts]


@pytest.mark.parametrize("number", EARLIER)
def test_what_the_docstring_names_as_new_has_a_mark(number):
    [path] = ROOT.glob(f"{number}_*.py")
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    for name, (text, marked) in parts_of(number).items():
        if re.search(rf"\b{name}\b", docstring.partition("New here")[2]):
            assert marked or f"# New in {number}: " in text, name
