"""Do the tests notice when a statement of a script is wrong? A tool, and no test itself.

    python tests/mutants.py 02 --count 40 --seed 1
    python tests/mutants.py template/train --count 40

It draws changes of one script, each of one place: a statement or a decorator deleted, True for
False, a comparison turned round, + for -, "or" for "and", a keyword argument dropped. Each is made
in a copy of the repository, where the plain tests of the script run, but not those that compare
texts. Prints what was noticed and what LIVED (also tests that do not end in --timeout seconds).
Of a rule of check_training, all cases are judged anew, by records that are made once.
A function that stands word for word in 01, 02 or 03 is changed there, too, and its tests there run.
Not drawn: imports, texts, and the deletion of a name's only assignment.
"""

import argparse
import ast
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # one thread: it can be forked
    "FORK_LIMIT": "40",
}  # seconds, after which a test fails

import pytest
import torch._dynamo  # noqa: F401
import torchvision.datasets  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parent.parent
TURNED = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.Or: ast.And,
}
TURNED |= {new: old for old, new in TURNED.items() if new is not ast.Mult}
RULES = ROOT / "tools/check_training/rules"
CASES_OF_RULES = "tests/test_check_training.py"
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.If)


def changes(node, bound_once):
    """Yield (what it is, node to replace, its replacement or None) for every change of one node."""
    if isinstance(node, SIMPLE):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not text and node not in bound_once:
            yield "deleted", node, None
    for decorator in getattr(node, "decorator_list", []):
        yield "decorator deleted", decorator, None
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "turned", node, ast.Constant(not node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "turned", node, node.operand
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in TURNED:
        yield "turned", node, type(node)(**vars(node) | {"op": TURNED[type(node.op)]()})
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], TURNED[type(op)](), *node.ops[i + 1 :]]
            yield "turned", node, ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg not in ("help", "description"):
                others = [other for other in node.keywords if other is not keyword]
                yield f"without {keyword.arg}=", node, ast.Call(node.func, node.args, others)


def mutants(text):
    """Return [(line number, description, changed text)], all that can be drawn from a script."""
    tree, lines, found = ast.parse(text), text.splitlines(keepends=True), []
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    bound_once = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.Module):
            names = Counter(
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    stored = [
                        n.id
                        for t in node.targets
                        for n in ast.walk(t)
                        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                    ]
                    if stored and all(names[name] == 1 for name in stored):
                        bound_once.add(node)
    for parent in ast.walk(tree):
        for what, node, new in changes(parent, bound_once):
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            replacement = "pass" if new is None else f"({ast.unparse(new)})"
            if isinstance(new, ast.AugAssign):
                replacement = ast.unparse(new)
            if what == "decorator deleted":
                start, replacement = start - 1, ""  # with its @
            changed = text[:start] + replacement + text[stop:]
            ast.parse(changed)
            old = re.sub(r"\s+", " ", text[start:stop])
            old = old if len(old) < 70 else f"{old[:67]}..."
            shown = f"{what}: {old}" + (f" -> {replacement[:70]}" if what == "turned" else "")
            found.append((node.lineno, shown, changed))
    return sorted(found, key=lambda mutant: mutant[:2])


def run_tests(folder, arguments, output):
    """In a forked process, which has torch loaded: run pytest in folder, its output to a file."""
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    real, fork = multiprocessing.get_context, multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method: fork if method == "forkserver" else real(method)
    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def tests_of(scripts):
    """Return the words for pytest that choose the tests of some scripts."""
    if RULES in scripts[0].parents:
        return [
            "-m",
            "long or not long",
            "-k",
            "mistake_is or right_script or rule_says",
            CASES_OF_RULES,
        ]
    names, shared, own = [], [], []  # shared: those that test several scripts, by name
    for script in scripts:
        if script.parent == ROOT:
            names.append(script.name[:2])
            if names[-1] in ("01", "02", "03"):
                shared += [
                    "tests/test_02_torchrun_elastic.py",
                    "tests/test_jobs.py",
                    "tests/test_swap.py",
                    "tests/test_lessons.py::test_the_generated_set_is_the_same_everywhere",
                ]
        elif script.parent.name == "template":
            names.append("template")
            own += ["tests/test_template.py", "tests/test_faults.py"]
            shared.append("tests/test_swap.py")
        else:
            names.append(script.stem)
            shared += ["tests/test_recipes.py"]
        own += [f"tests/{path.name}" for path in sorted(ROOT.glob(f"tests/test_{script.stem}*.py"))]
    if names[0] != "05":
        shared.append("tests/test_pretended_gpus.py")
    everywhere = " or ".join(pathlib.Path(path.partition("::")[0]).name for path in shared)
    chosen = f"not ({everywhere}) or {' or '.join(names)}" if shared else "test"
    return ["-k", f"({chosen}) and not cost_a_rank", *dict.fromkeys(own + shared)]  # hangs, forked


def also(script, changed):
    """Return {another script: its text with the same change}, if one has the same function."""
    text = script.read_text()
    for before, after in zip(ast.parse(text).body, ast.parse(changed).body, strict=False):
        before, after = ast.get_source_segment(text, before), ast.get_source_segment(changed, after)
        for other in sorted(ROOT.glob("0[123]_*.py")):
            if before != after and other != script and f"\n{before}\n" in other.read_text():
                return {other: other.read_text().replace(before, after)}
    return {}


def noticed_by(original, script, changed, timeout):
    """Return the name of the test that noticed the change, or None; and why it is none."""
    skipped, deadline = [], time.monotonic() + timeout
    arguments = ["-q", "-x", "-s", "-m", "not long", "-n0", "--tb=short", "-p", "no:cacheprovider"]
    files = {script: changed, **also(script, changed)}
    arguments += tests_of(list(files))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder, output = pathlib.Path(temporary, "copy"), pathlib.Path(temporary, "output")
        shutil.copytree(original, folder)
        for path, new in files.items():
            (folder / path.relative_to(ROOT)).write_text(new)
        while True:
            process = multiprocessing.get_context("fork").Process(
                target=run_tests, args=(folder, arguments + skipped, output)
            )
            process.start()
            process.join(max(1, deadline - time.monotonic()))
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
                return None, "not ended in time"
            text = output.read_text()
            failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
            if failed is None:
                assert process.exitcode == 0, text
                return None, ""
            if "AssertionError: 0 times in " not in text:
                return failed[1].removeprefix("tests/"), ""
            skipped.append(f"--deselect={failed[1]}")  # it only missed the text it changes itself


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", help="how its path begins: 01, or template/train")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one mutant")
    args = parser.parse_args()
    [script] = ROOT.glob(f"{args.script}*.py")
    drawn = found = mutants(script.read_text())
    if args.count < len(found):
        drawn = sorted(random.Random(args.seed).sample(found, args.count))
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:  # so that you can go on with your work
        original = pathlib.Path(folder, "original")
        os.environ.setdefault("KEPT_RECORDS", f"{folder}/records")
        shutil.copytree(
            ROOT, original, ignore=shutil.ignore_patterns(".git", ".venv", "data", "__pycache__")
        )
        alarm = noticed_by(original, script, script.read_text(), 2 * args.timeout)
        assert alarm == (None, ""), f"without any change: {alarm}"
        for line, shown, changed in drawn:
            test, remark = noticed_by(original, script, changed, args.timeout)
            noticed += test is not None
            result = f"noticed by {test}" if test else f"LIVED {remark}"
            print(f"{line:4} {result} | {shown}", flush=True)
    print(f"{script.name}: {noticed} of {len(drawn)} noticed; {len(found)} could be drawn")


if __name__ == "__main__":
    main()
