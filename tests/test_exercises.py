"""Each exercise refuses what is empty or wrong, in the words meant for it, and takes its solution.

They do not depend on what a learner has written: other functions take the place of those in the
file, which are empty, or from exercises/solutions, or from tests/wrong_answers.
"""

import ast
import re
import sys

import pytest
from support import ROOT  # its forkserver has torch loaded

sys.path.insert(0, str(ROOT / "exercises"))
import checker

NAMES = sorted(path.stem for path in (ROOT / "exercises").glob("[0-9]*.py"))


def check(name, world_size, answer):
    exercise = ROOT / f"exercises/{name}.py"
    return checker.verdict(checker.run(exercise, world_size, answer, "forkserver"))


def emptied(name):
    """Return what an exercise has above the divider, with every function of the solution empty."""
    tree = ast.parse((ROOT / f"exercises/{name}.py").read_text().partition("# ---- The check")[0])
    solved = {one.name for one in ast.walk(ast.parse(
        (ROOT / f"exercises/solutions/{name}.py").read_text())) if isinstance(one, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in solved:
            node.body = [node.body[0], *ast.parse("raise NotImplementedError").body]
    return ast.unparse(tree)


def wrong_answers():
    for name in NAMES:
        text = (ROOT / f"tests/wrong_answers/{name}.py").read_text()
        _, *parts = re.split(r"^# ---- (.*?): (.*) ----$", text, flags=re.MULTILINE)
        for wrong, words, code in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            yield pytest.param(name, words, code, id=f"{name}-{wrong}")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_takes_the_solution(name, world_size):
    right, text = check(name, world_size, ROOT / f"exercises/solutions/{name}.py")
    assert right, text


@pytest.mark.parametrize("name", NAMES)
def test_says_what_to_write(name, tmp_path):
    (tmp_path / "empty.py").write_text(emptied(name))
    right, text = check(name, 2, tmp_path / "empty.py")
    assert not right and "is still empty. To do:" in text, text


@pytest.mark.parametrize(("name", "words", "code"), list(wrong_answers()))
def test_refuses_a_wrong_answer(name, words, code, tmp_path):
    (tmp_path / "wrong.py").write_text(code)
    for world_size in (2, 3):
        right, text = check(name, world_size, tmp_path / "wrong.py")
        if not right:
            break
    assert not right, text
    assert re.search(words, f"{world_size} ranks: {text}"), text
