"""Each lesson is one sitting, and differs from the one before in its own subject alone."""

import ast
import re
import runpy
import subprocess

import pytest
import torch
from started import ROOT

LESSONS = {path.name[:2]: path for path in sorted(ROOT.glob("0*_*.py"))}
# {lesson: lines and words at most}
LIMITS = {
    "01": (270, 1640),
    "02": (305, 1820),
    "03": (350, 2110),
    "04": (535, 3000),
    "05": (450, 2500),
    "06": (420, 2700),
}
CHANGED = {("01", "02"): 160, ("02", "03"): 145}  # lines of the diff, at most
# Neighbours have the text of all functions in common, but for these, which the lesson is about.
OWN = {"main", "train", "parse_args", "save", "resume", "join"}


@pytest.mark.parametrize("number", LIMITS)
def test_a_lesson_is_one_sitting(number):
    text, (lines, words) = LESSONS[number].read_text(), LIMITS[number]
    assert len(text.splitlines()) <= lines and len(text.split()) <= words
    assert len(ast.get_docstring(ast.parse(text)).splitlines()) <= 25


def test_the_front_page_is_one_page_and_the_template_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 220 and len(text.split()) <= 1800
    for name, lines in ("survive.py", 570), ("train.py", 350), ("README.md", 170):
        text = (ROOT / "template" / name).read_text()
        assert len(text.splitlines()) <= lines, name
    cells = re.findall(r"(?<=\| )[^|\n]+(?= \|)", text)
    assert len(cells) > 90 and max(len(cell.split()) for cell in cells) <= 25


def test_each_file_says_what_comes_next_on_the_path():
    text = (ROOT / "README.md").read_text().partition("\n## The path\n")[2].partition("\n\nB")[0]
    path = [link.removesuffix("README.md") for link in re.findall(r"\]\((\S+?)[)#]", text)]
    after = [*path[1:6], *["template/"] * 3]
    assert [path.count("exercises/"), len(path)] == [2, 9] and "04_collectives.py" in path
    path[2] = "exercises/03_average_gradients.py"
    for file, following in zip(path, after):
        assert file == "exercises/" or f"Next: {following}" in (ROOT / file).read_text(), file


def test_the_front_page_says_how_long_a_lesson_takes():
    """To the divider and to the end; more quickly where lines stand in an earlier lesson, too."""
    text, seen = (ROOT / "README.md").read_text(), set()
    for name, whole in ((path.name, path.read_text()) for path in LESSONS.values()):
        lines = whole.splitlines()
        divider = [line[:6] for line in lines].index("# ----")
        times = [len(line.split()) / (300 if line in seen else 90) for line in lines]
        minutes = f"{sum(times[:divider]):.0f} / {sum(times):.0f}"
        assert f"| [{name}]({name}) | {minutes} |" in text, (name, minutes)
        seen |= {*lines}


@pytest.mark.parametrize("number", ["01", "02", "03"])
def test_the_generated_set_is_the_same_everywhere(number):
    """Whatever was drawn before: ten kinds of images, and others to test."""
    script = runpy.run_path(str(LESSONS[number]))
    train, test, _ = script["load_data"]("no/such/folder")
    images, labels = script["generate_data"](10240)
    for whole, *parts in (images, train[:][0], test[:][0]), (labels, train[:][1], test[:][1]):
        assert torch.equal(torch.cat(parts), whole)
    assert (len(train), len(test), len(labels.unique())) == (8192, 2048, 10)
    assert images.float().mean().item() == pytest.approx(125.5, rel=1e-3)


def functions(number):
    text = LESSONS[number].read_text()
    return {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


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
