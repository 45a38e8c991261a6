"""recipes/ as a whole: each runs as its docstring shows it, also on one rank more, and can fail."""

import ast
import re

import pytest
from shown import masked
from support import PYTHON, ROOT, fork, fork_ranks, pretend_one_gpu, run, variant

RECIPES = sorted(ROOT.glob("recipes/*.py"))
NAMES = [path.stem for path in RECIPES]
# What a recipe leaves in the reader's folder because its docstring says so.
LEFT = {"train_by_steps": {"train_by_steps.pt", "train_by_steps.pt.lock"}}
# They start processes anew, which takes ten seconds and more. In plain pytest, their own tests run
# them in forked processes.
SLOW = {"dry_run_1024_ranks", "go_on_without"}


def docstring(name):
    return ast.get_docstring(ast.parse((ROOT / f"recipes/{name}.py").read_text()), clean=False)


def ranks(name):
    """How many ranks the command in the docstring starts; 0 for plain python."""
    [number] = re.findall(
        rf"^    (?:torchrun --standalone --nproc-per-node=(\d)|python) recipes/{name}\.py$",
        docstring(name), re.MULTILINE)  # fmt: skip
    return int(number or 0)


def launch(name, cwd, more=0):
    """Run a recipe as its command does, on so many ranks more."""
    if ranks(name):
        return fork_ranks(f"recipes/{name}.py", cwd=cwd, world_size=ranks(name) + more)
    return run(PYTHON, ROOT / f"recipes/{name}.py", cwd=cwd)


def shown_output(name):
    """The lines that the docstring shows, apart from "..."."""
    return re.findall(r"^    (\[rank \d+/\d+\] .+)$", docstring(name), re.MULTILINE)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in NAMES
])  # fmt: skip
def test_prints_what_its_docstring_shows(tmp_path, name):
    result = launch(name, tmp_path)
    assert result.status == 0, result.output
    printed = [masked([line]) for line in result.output.splitlines()]
    assert shown_output(name), "no output in the docstring"
    for line in shown_output(name):
        assert masked([line]) in printed, (line, result.output)
    # On a single core, PyTorch warns of a DataLoader with two workers.
    lines = [line for line in result.output.splitlines() if "suggested max number" not in line]
    assert not [line for line in lines if len(line) > 100 or "Warning" in line]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == LEFT.get(name, set()), "files left in the reader's folder"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if ranks(name)])
def test_runs_on_another_number_of_ranks(tmp_path, name):
    result = launch(name, tmp_path, more=1)
    assert result.status == 0, result.output


@pytest.mark.parametrize("name", NAMES)
def test_bad_calls_end_in_one_line(tmp_path, name):
    script = f"recipes/{name}.py"
    calls = [(fork(script, "--nonsense", cwd=tmp_path), "unrecognized arguments")]
    if ranks(name):
        calls += [
            (fork(script, cwd=tmp_path), f"--nproc-per-node={ranks(name)}"),
            (fork_ranks(script, cwd=tmp_path, before=pretend_one_gpu), "there are 1"),
        ]
    for result, message in calls:
        assert result.status == 2, result.output
        assert message in result.error() and "Traceback" not in result.output


@pytest.mark.parametrize("name", NAMES)
def test_the_question_comes_first_and_the_answer_can_be_copied(name):
    first, _, rest = docstring(name).partition("\n")
    assert first.endswith("?") and len(first) <= 97, first
    answer = re.search(r"\A\n((?:    .*\n)+)", rest)
    assert answer and 1 <= answer[1].count("\n") <= 8, "no answer below the question"


def test_the_table_of_the_recipes_is_what_they_show():
    """A row for each: its question; and no figure that its own output does not have."""
    table = re.findall(r"^\| (.+\?) \| (.+) \| \[(\w+)\]\((\w+)\.py\) \| (.+) \| (.*) \|$",
                       (ROOT / "recipes/README.md").read_text(), re.MULTILINE)  # fmt: skip
    assert sorted(name for _, _, name, _, _, _ in table) == NAMES
    for question, answer, name, file, right, wrong in table:
        assert docstring(name).startswith(f"{question}\n") and file == name and answer
        shown = " ".join(shown_output(name))
        cells = f"{right} {wrong}".replace("sha256", "")
        for figure in re.findall(r"\d[\d.]*(?:e[+-]\d+)?%?", cells):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", shown), (name, figure)


# ---- accumulate ----


def accumulated(result):
    """{way: (bytes, gradient off by)}"""
    pattern = r"(.+?) +(\d+) bytes sent, gradient off by (\S+)"
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return {m[1]: (int(m[2]), float(m[3])) for m in found if m}


def test_accumulate(tmp_path):
    result = fork_ranks("recipes/accumulate.py", cwd=tmp_path)
    found = accumulated(result)
    weights = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    assert [count for count, _ in found.values()] == [4 * weights, weights, 4 * weights, weights]
    right, wrong = list(found.values())[:3], found["flag set in between"]
    assert all(off < 1e-6 for _, off in right) and wrong[1] > 0.1


@pytest.mark.parametrize(("old", "new"), [
    ("i < len(micro_batches) - 1 else contextlib.nullcontext():\n            loss = mse",
     "i < 0 else contextlib.nullcontext():\n            loss = mse"),  # no exchange is spared
    ("(loss / len(micro_batches)).backward()  # the mean", "loss.backward()  # the mean"),
])  # fmt: skip
def test_accumulate_can_fail(tmp_path, old, new):
    script = variant(tmp_path, "recipes/accumulate.py", {old: new})
    result = fork_ranks(script, cwd=tmp_path)
    assert result.status == 1
    assert "no_sync around both passes does not do what this file says" in result.output
