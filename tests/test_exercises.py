"""Each exercise refuses what is empty or wrong, in the words meant for it, and takes its solution.

The tests do not depend on what a learner has written: other functions take their place. They
are empty, or those of exercises/solutions, tests/wrong_answers, or tests/right_answers.
"""

import ast
import re
import shutil
import signal
import sys

import pytest
import shown
from forked import forkserver  # has torch loaded
from started import PYTHON, ROOT, assert_nothing_left, read_until, run, running

sys.path.insert(0, str(ROOT / "exercises"))
import checker

NAMES = sorted(path.stem for path in (ROOT / "exercises").glob("[0-9]*.py"))
SLOW = {"05_buckets", "11_resume", "18_checkpoint_shards"}


def check(name, world_size, answer):
    file = ROOT / f"exercises/{name}.py"
    return checker.verdict(checker.run(file, world_size, answer, forkserver))


def emptied(name):
    """Return an exercise in which every function of the solution is empty."""
    tree = ast.parse((ROOT / f"exercises/{name}.py").read_text())
    solved = {
        one.name
        for one in ast.walk(ast.parse((ROOT / f"exercises/solutions/{name}.py").read_text()))
        if isinstance(one, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in solved:
            node.body = [node.body[0], *ast.parse("raise NotImplementedError").body]
    return ast.unparse(tree)


def answers(folder):
    """Those of each exercise. What stands above the first one in a file belongs to each of them."""
    for name in NAMES:
        text = (ROOT / f"tests/{folder}/{name}.py").read_text()
        common, *parts = re.split(r"^# ---- (.*?)(?:: (.*))? ----$", text, flags=re.MULTILINE)
        found = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        for number, (title, words, code) in enumerate(found):
            marks = [pytest.mark.long] * (number > 0)  # one of each is quick enough
            yield pytest.param(name, words, common + code, id=f"{name}-{title}", marks=marks)


def write_into(file, code):
    """Put code after what a learner has written, which it replaces."""
    before, main, check = file.read_text().partition("\n\nif __name__")
    file.write_text(f"{before}\n\n{code}\n{main}{check}")


@pytest.mark.long
def test_the_page_shows_what_the_command_prints(tmp_path, request):
    """A learner writes into the file, which says what is wrong; then he looks at the solution."""
    name = "03_average_gradients"
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    wrong = next(one.values[2] for one in answers("wrong_answers") if one.id == f"{name}-summed")
    write_into(tmp_path / f"exercises/{name}.py", wrong)
    file = f"exercises/{name}.py"
    first, then = (run(PYTHON, file, *more, cwd=tmp_path) for more in ((), ("--solution",)))
    assert (first.status, then.status) == (1, 0), first.output + then.output
    lines, path = (first.output + then.output).splitlines(), shown.FOLDER / "exercise.txt"
    if request.config.getoption("--write-transcripts"):
        shown.write(path, shown.EXERCISE, lines)
    assert shown.masked(lines) == shown.masked(shown.read(path)[1])


@pytest.mark.long
def test_all_in_their_order(tmp_path):
    """On 2 ranks, too. It goes on at the first not solved; what changed is checked again."""
    result = run(PYTHON, ROOT / "exercises/all.py", "--solution", cwd=tmp_path, timeout=900).ok()
    assert re.findall(r"^== (\w+)\.py$", result.output, re.MULTILINE) == NAMES
    assert result.output.endswith(f"{len(NAMES)} of {len(NAMES)} solved\n")
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    first, second = (tmp_path / f"exercises/{name}.py" for name in NAMES[:2])
    write_into(first, (ROOT / f"exercises/solutions/{NAMES[0]}.py").read_text())
    write_into(second, emptied(NAMES[1]))
    command = PYTHON, "exercises/all.py", "--hint"
    result = run(*command, cwd=tmp_path)
    assert result.status == 1 and " is still empty. To do:" in result.output, result.output
    assert f"1 of {len(NAMES)} solved. Next: exercises/{NAMES[1]}.py" in result.output
    assert f"== {NAMES[0]}.py: solved\n" in run(*command, cwd=tmp_path).output
    write_into(first, emptied(NAMES[0]))
    result = run(*command, cwd=tmp_path)
    assert f"0 of {len(NAMES)} solved. Next: exercises/{NAMES[0]}.py" in result.output


@pytest.fixture
def beginner(tmp_path):
    """A copy of the exercises; write(code) puts code into the first one that exchanges anything."""
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    file = tmp_path / "exercises/03_average_gradients.py"
    return lambda code: write_into(file, f"def average_gradients(model):\n    {code}")


@pytest.mark.long
def test_checks_again_when_the_file_is_saved_and_ends_by_ctrl_c(tmp_path):
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    first = tmp_path / f"exercises/{NAMES[0]}.py"
    write_into(first, emptied(NAMES[0]))
    with running(PYTHON, "exercises/all.py", "--watch", cwd=tmp_path) as process:
        read_until(process, "^-- checked again when you save")
        write_into(first, (ROOT / f"exercises/solutions/{NAMES[0]}.py").read_text())
        output = read_until(process, f"^== {NAMES[1]}")
        process.send_signal(signal.SIGINT)
        output += process.communicate(timeout=30)[0]
        assert process.returncode == 130 and "Traceback" not in output, output


@pytest.mark.long
def test_what_is_saved_during_the_check_is_not_what_was_checked(beginner, tmp_path):
    file = "exercises/03_average_gradients.py"
    code = (ROOT / file.replace("/", "/solutions/")).read_text() + "average_gradients(model)\n"
    code += f"dist.get_world_size() < 3 or open({str(tmp_path / file)!r}, 'a').write('wrong')"
    beginner(code.replace("\n", "\n    "))
    result = run(PYTHON, file, cwd=tmp_path)
    assert result.status == 1 and "3 ranks: right" in result.output, result.output


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_rank_outlives_the_command(number, beginner, tmp_path):
    beginner("print('begun', flush=True); import os, time; os.fork(); time.sleep(99)")
    with running(PYTHON, "exercises/03_average_gradients.py", cwd=tmp_path) as process:
        read_until(process, "begun")
        process.send_signal(number)
        assert_nothing_left(process)


@pytest.mark.long
def test_shows_what_is_printed_and_says_that_print_is_the_tool(beginner, tmp_path):
    beginner("breakpoint(); print(dist.get_rank(), end=' is here')")
    file = tmp_path / "exercises/03_average_gradients.py"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as some editors do
    output = run(PYTHON, "exercises/03_average_gradients.py", cwd=tmp_path).output
    assert "[rank 1/2] 1 is here" in output and "[rank 0/2] breakpoint() has no" in output
    assert "is still the rank's own" in output, output


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("__import__('time').sleep(99)", r"rank 0 sleeps in line 2: .*\n.*\n.*no other rank"),
        (
            "if dist.get_rank() == 0: dist.barrier()\n    while True: pass",
            "rank 0 waits in line 2: .*\n.*rank 1 computes in line 3: while.*\n.*no other rank",
        ),
        (
            "dist.recv(torch.zeros(1), 1 - dist.get_rank())",
            "rank 1 waits in line 2: .*\n.*a send waits for",
        ),
        ("raise SystemExit(3)", r"line 2, in average_gradients: .*\n.*SystemExit: 3"),
        ("x = = 1", r"wrong.py, line 2: x = = 1\n +SyntaxError: invalid syntax"),
    ],
)
def test_tells_waiting_from_working(code, words, tmp_path, monkeypatch):
    monkeypatch.setattr(checker, "LIMIT", 3)
    (tmp_path / "wrong.py").write_text(f"def average_gradients(model):\n    {code}")
    right, text = check("03_average_gradients", 2, tmp_path / "wrong.py")
    assert not right and re.search(words, text), text


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, world_size, marks=[pytest.mark.long] * (name in SLOW or world_size > 3))
        for name in NAMES
        for world_size in (3, 4)
    ],
)
def test_takes_the_solution(name, world_size):
    right, text = check(name, world_size, ROOT / f"exercises/solutions/{name}.py")
    assert right, text


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])]
)
def test_says_what_to_write(name, tmp_path):
    (tmp_path / "empty.py").write_text(emptied(name))
    right, text = check(name, 2, tmp_path / "empty.py")
    assert not right and "is still empty. To do:" in text, text


@pytest.mark.parametrize(("name", "words", "code"), list(answers("wrong_answers")))
def test_refuses_a_wrong_answer(name, words, code, tmp_path):
    (tmp_path / "wrong.py").write_text(code)
    for world_size in checker.WORLD_SIZES.get(f"{name}.py", (2, 3)):
        right, text = check(name, world_size, tmp_path / "wrong.py")
        if not right:
            break
    assert not right, text
    assert re.search(words, f"{world_size} ranks: {text}"), text


@pytest.mark.long
@pytest.mark.parametrize(("name", "_", "code"), list(answers("right_answers")))
def test_takes_a_right_answer_in_another_style(name, _, code, tmp_path):
    (tmp_path / "right.py").write_text(code)
    for world_size in checker.WORLD_SIZES.get(f"{name}.py", (2, 3)):
        right, text = check(name, world_size, tmp_path / "right.py")
        assert right, text
