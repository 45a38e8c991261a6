"""The tools stay in a form that a newcomer can change, and nothing is noted that no rule reads."""

import ast
import dataclasses
import shutil
import sys

import pytest
import shown
from started import ACTIVE, PYTHON, ROOT, run

sys.path.insert(0, str(ROOT / "tools"))
from check_training import lines

TOOLS = ROOT / "tools"
FILES = sorted(TOOLS.glob("**/*.py"))
CHECK = TOOLS / "check_training"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TOOLS)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            assert node.end_lineno - node.lineno < 50, node.name


def test_a_command_is_a_page():
    for path in TOOLS.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path.name


def names(paths):
    """{names of attributes that are read, names of keywords in calls} in some files."""
    read, given = set(), {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Call):
                made = {getattr(each, "id", getattr(each, "attr", None)) for each in node.args[:1]}
                made.add(getattr(node.func, "id", getattr(node.func, "attr", None)))
                for kind in made - {None}:
                    given.setdefault(kind, set()).update(each.arg for each in node.keywords)
    return read, given


def test_what_is_noted_is_read_and_what_is_read_is_noted():
    """Each class of records is made by the recorder, and each of its fields is read by a rule."""
    recorder = [path for path in FILES if CHECK / "recorder" in path.parents]
    others = [
        path for path in FILES if path not in recorder and CHECK / "records" not in path.parents
    ]
    read, _ = names([path for path in others if path.is_relative_to(CHECK)])
    _, given = names(recorder)
    kinds = {name: kind for name, kind in lines.CLASSES.items() if name != "Record"}
    assert len(kinds) > 25
    assert kinds.keys() - given.keys() == set(), "the recorder makes none"
    for name, kind in kinds.items():
        fields = {field.name for field in dataclasses.fields(kind)} - {"time"}
        assert fields - read == set(), f"no rule reads these fields of {name}"


def test_the_page_shows_what_is_there():
    """How to add a rule: by one that is there, with its mistake and its right twin."""
    for name, file in (
        ("adding a rule: the mistake", "tests/mistakes/check_training.py"),
        ("adding a rule: the rule", "tools/check_training/rules/models.py"),
    ):
        lines_shown = [line.strip() for line in shown.block(name).splitlines()]
        text = "\n".join(line.strip() for line in (ROOT / file).read_text().splitlines())
        assert len(lines_shown) > 2 and "\n".join(lines_shown) in text, name


@pytest.mark.long
def test_the_folder_works_alone(tmp_path):
    """Copied to another place, each tool does what it does here."""
    shutil.copytree(TOOLS, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__"))
    job = ["--", *["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]]
    script = ROOT / "docs/many_processes.py"
    options = {"cwd": tmp_path, "env": ACTIVE, "timeout": 600}
    checked = run(PYTHON, "copied/check_training.py", *job, script, **options)
    assert checked.status == 0 and "\nnothing found\n" in checked.output, checked.output
    rounds = "--rounds", 1, "--victims", "rank", "--file", "snapshot.pt"
    job = [*rounds, *job, ROOT / "02_torchrun_elastic.py", 6, 1]
    killed = run(PYTHON, "copied/kill_test.py", *job, **options)
    assert "1 of 1 rounds ended equal" in killed.output, killed.output
    alone = run(PYTHON, "copied/check_machines.py", "localhost", **options)
    assert alone.error().startswith("one process has no other to find"), alone.output
