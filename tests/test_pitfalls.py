"""pitfalls/ as a whole: mistake and cure side by side, and the commands of the docstrings."""

import ast
import re
import shlex
import shutil

import pytest
from support import ACTIVE, ROOT, run

PITFALLS = sorted(ROOT.glob("pitfalls/*.py"))


def commands(path):
    """The commands in the docstring of a pitfall: the mistake, then the cure."""
    docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    mistake, cure = re.findall(r"^    ((?:python|torchrun) .*)", docstring, re.MULTILINE)
    assert cure == f"{mistake} --fixed", path.name
    return mistake, cure


COMMANDS = {path.stem: commands(path) for path in PITFALLS}
# test_repository.py runs the commands without --fixed, apart from those of pitfalls that start
# their processes themselves. The others of these have a test in test_pitfalls_processes.py.
LAUNCHED = [command for _, command in COMMANDS.values()]
LAUNCHED += [COMMANDS[name][0] for name in ("fixed_port", "rank_never_arrives")]


@pytest.mark.parametrize("path", PITFALLS, ids=lambda path: path.stem)
def test_mistake_and_cure_stand_side_by_side(path):
    source = path.read_text()
    blocks = {  # with the comments on the lines, before and behind them
        name: block for block, name in
        re.findall(r"^(def (\w+)\(.*?)(?=^def |^class |\Z)", source, re.DOTALL | re.MULTILINE)
    }
    names = list(blocks)
    shown = names[names.index("broken") : names.index("fixed") + 1]
    assert shown in (["broken", "fixed"], ["broken", "broken_too", "fixed"])
    broken, fixed = (ast.parse(blocks[name]).body[0] for name in ("broken", "fixed"))
    assert ast.unparse(broken.args) == ast.unparse(fixed.args)
    assert ast.unparse(broken.body) != ast.unparse(fixed.body)
    for name in shown:
        block = blocks[name]
        comments = " ".join(re.findall("#.*", block))
        own, other = ("cure", "mistake") if name == "fixed" else ("mistake", "cure")
        assert own in comments and other not in comments, block
        assert not re.search(r"\bif .*(fixed|cure)\b", re.sub("#.*", "", block)), block


@pytest.mark.long
@pytest.mark.parametrize("command", LAUNCHED)
def test_a_launch_in_real_processes(tmp_path, command):
    """They also end: forked ones do not, and skip what can abort there."""
    shutil.copytree(ROOT / "pitfalls", tmp_path / "pitfalls")
    result = run(*shlex.split(command), cwd=tmp_path, env=ACTIVE, timeout=400)
    assert result.status == 0, result.output
    outcome = "cured" if command.endswith(" --fixed") else "symptom"
    assert re.search(rf"^(\[rank 0/\d\] )?{outcome}: .+", result.output, re.MULTILINE)
    assert "terminate called" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["pitfalls"], "files left behind"
