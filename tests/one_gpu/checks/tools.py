"""What tools/check_training.py says of trainings on a GPU, and what it costs."""

import pathlib
import re

from started import PYTHON, ROOT

from one_gpu.check import Skipped, check
from one_gpu.checks.scripts import ELASTIC, TEMPLATE
from one_gpu.printed import digest, synchronisations_in
from one_gpu.shell import torchrun_command

TOOL = ROOT / "tools" / "check_training.py"


@check(90)
def check_training_waits(shell):
    """Which lines of 02 and the template make the CPU wait for the GPU under check_training."""
    settings = "plain" if shell.pretend else "syncs"
    return {
        script: synchronisations_in(output)
        for script, output in trainings(shell, settings, checked=True)
    }


@check(90, alone=True)
def check_training(shell):
    """tools/check_training.py on 02 and the template: its words, and what it costs."""
    found = {}
    for checked in (False, True):
        for script, output in trainings(shell, "plain", checked):
            name = f"{script}, {'checked' if checked else 'alone'}"
            speeds = re.findall(r"(\d+) (?:images|examples)/s", output)
            found[f"{name}: the last speeds"] = ", ".join(speeds[-4:])
            found[f"{name}: sha256"] = digest(output) if "identical" in output else "cut short"
            if checked:
                found[f"{script}: said"] = output.splitlines()[-8:]
    return found


def trainings(shell, settings, checked):
    """Train 02 and the template under settings of inside/run_script.py; checked: with the tool.

    Yields the name of each, and what it printed.
    """
    if checked and not TOOL.exists():
        raise Skipped("there is no tools/check_training.py")
    for script, arguments in ((ELASTIC, (8, 8)), (TEMPLATE, (200, 200))):
        words = torchrun_command(script, *arguments, settings=settings)
        if checked:
            words = [PYTHON, TOOL, "--seconds", 60, "--", *words]
        yield script, shell.run(*words, status=None)
        for left in pathlib.Path(shell.folder).glob("*.*"):
            left.unlink()
