"""tools/foreign_command reads whole lines, sees all processes of a command, and leaves none."""

import os
import re
import signal
import sys

import pytest
from started import PYTHON, ROOT, read_until, running, wait_until

sys.path.insert(0, str(ROOT / "tools"))
import foreign_command

SCRIPTS = dict(
    re.findall(
        r"^# ---- (.+) ----\n((?:(?!# ----).*\n)+)",
        (ROOT / "tests/killed.txt").read_text(),
        re.MULTILINE,
    )
)
WORDS = "import sys; sys.stdin.read()\nfor i in range(100): print('a', 'b', i, 'c', sep=' ')"


def lines_of(command):
    lines = []
    while command.poll() is None:
        lines += command.read()
    return lines + command.read()


@pytest.mark.parametrize("way", [[PYTHON, "-u"], ["env", "PYTHONUNBUFFERED=1", PYTHON]])
def test_lines_stay_whole(way):
    """Four processes write at once, word by word if nobody minds; also through a pipe."""
    with foreign_command.cleaning_up():
        loop = '{ for i in 1 2 3 4; do "$0" "$@" & done < /dev/null; wait; }'
        for more in "", " | cat":
            command = foreign_command.start(["sh", "-c", loop + more, *way, "-c", WORDS])
            texts = [line.text for line in lines_of(command)]
            assert sorted(texts) == sorted(4 * [f"a b {i} c" for i in range(100)])
            assert command.poll() == 0 and not command.end() and not os.path.exists(command.folder)


def test_all_processes_are_seen_and_ended():
    with foreign_command.cleaning_up():
        command = foreign_command.start([PYTHON, "-c", SCRIPTS["escapes.py"]])
        wait_until(lambda: not command.read(0) and len(command.processes()) == 3, "three processes")
        assert {process.rank for process in command.processes().values()} == {None, "3", "4"}
        os.kill(command.process.pid, signal.SIGKILL)  # its children are adopted
        assert [line.text for line in lines_of(command)] == ["no end"]
        pids = [*command.processes()]
        assert command.poll() == -9 and len(pids) == 2 and command.end() == {}
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("number", foreign_command.SIGNALS)
def test_signals_leave_nothing(tmp_path, number):
    """The second signal comes while the first is being obeyed."""
    words = "-c", SCRIPTS["uses.py"], ROOT / "tools", tmp_path / "mine"
    with running(PYTHON, *words, cwd=tmp_path) as process:
        (tmp_path / "mine").mkdir()
        pid, folder = read_until(process, "kt").split()
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (128 + number, 143)
        assert not os.path.exists(f"/proc/{pid}") and not os.path.exists(folder)
        assert not (tmp_path / "mine").exists()


REPORT = SCRIPTS["report"]


ACTIVATE, OTHER = "activate the one that has it", "/other/bin/torchrun"
NO_TORCH = (
    f'Traceback (most recent call last):\n  File "{OTHER}", line 5, in <module>\n'
    "ModuleNotFoundError: No module named 'torch'\n"
)


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        (REPORT, "ValueError: no data (train.py:7)"),
        (f" 9%|# | 1/9 [00:01]{REPORT}", "ValueError: no data (train.py:7)"),
        (REPORT[REPORT.index("E1127") :], ""),
        ("[rank 0/2] step 1\ntrain.py: error: no such file\n", "train.py: error: no such file"),
        (
            NO_TORCH,
            NO_TORCH.splitlines()[-1] + f" ({OTHER} is of a Python without torch: {ACTIVATE})",
        ),
    ],
)
def test_the_error_of_the_script(printed, error):
    with foreign_command.cleaning_up():
        command = foreign_command.start(["sh", "-c", 'printf "%s" "$1" >&2', "sh", printed])
        lines_of(command)
        assert command.error() == error
