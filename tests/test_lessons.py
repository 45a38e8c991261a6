"""Each lesson is one sitting, and differs from the one before in its own subject alone."""

import ast
import re
import subprocess

import pytest
from support import ROOT

LESSONS = {path.name[:2]: path for path in sorted(ROOT.glob("0*_*.py"))}
# {lesson: lines, words, the line by which its processes have met, and by which the lesson ends}
LIMITS = {"01": (285, 1800, 85, 200), "02": (300, 1800, 85, 215), "03": (340, 2100, 95, 250)}
CHANGED = {("01", "02"): 190, ("02", "03"): 150}  # lines of the diff, at most
# What two neighbours have in common is the same to the byte; but for these, as they differ by what
# the lesson is about.
OWN = {"main", "train", "parse_args", "save"}
DIVIDER = "# ---- The lesson ends here."


@pytest.mark.parametrize("number", LIMITS)
def test_a_lesson_is_one_sitting(number):
    text, (lines, words, met, end) = LESSONS[number].read_text(), LIMITS[number]
    assert len(text.splitlines()) <= lines and len(text.split()) <= words
    assert len(ast.get_docstring(ast.parse(text)).splitlines()) <= 25
    assert text.partition("init_process_group(\n")[0].count("\n") < met
    assert text.count(DIVIDER) == text.count("\n# ---- ") == 1
    assert text.partition(DIVIDER)[0].count("\n") < end


def test_the_front_page_is_one_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 220 and len(text.split()) <= 1800


@pytest.mark.parametrize("number", LESSONS)
def test_the_front_page_says_how_long_a_lesson_takes(number):
    path, text = LESSONS[number], (ROOT / "README.md").read_text()
    minutes = round(len(path.read_text().split()) / 130)  # words a minute
    assert f"| [{path.name}]({path.name}) {minutes} min |" in text


def functions(number):
    text = LESSONS[number].read_text()
    return {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_the_difference_is_the_lesson(before, after):
    diff = ["git", "diff", "--no-index", "--numstat", LESSONS[before], LESSONS[after]]
    shown = subprocess.run(diff, capture_output=True, text=True, check=False).stdout
    added, deleted, _ = shown.split("\t", 2)
    assert int(added) + int(deleted) <= CHANGED[before, after]
    old, new = functions(before), functions(after)
    assert len(old.keys() & new.keys() - OWN) >= 9
    assert [name for name in old.keys() & new.keys() - OWN if old[name] != new[name]] == []
    assert [name for name in new if name in old] == [name for name in old if name in new]


@pytest.mark.parametrize("number", LIMITS)
def test_what_the_docstring_names_as_new_is_there(number):
    docstring = ast.get_docstring(ast.parse(LESSONS[number].read_text()))
    new = re.search(r"New here.*?\.", docstring, re.DOTALL)[0]
    named = {name for names in re.findall(r"\(([\w, ]+)\)|(\w+_\w+)", new) for part in names
             for name in part.split(", ") if part}  # fmt: skip
    assert number == "01" or named and named <= functions(number).keys()
