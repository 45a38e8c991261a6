"""What a check is."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Something that one GPU can show."""

    name: str  # as --only, --list and the report have it
    what: str  # what it looks at, in a sentence: the docstring of its function
    seconds: int  # how long it may take
    alone: bool  # it measures time, so nothing else runs meanwhile
    # Takes a Shell; returns figures, {what was measured: a number, a text, or a list or dict of
    # these}; an AssertionError says why the check fails, and Skipped why it cannot run here.
    function: Callable


class Skipped(Exception):
    """Why a check cannot run here."""


def check(seconds, alone=False):
    """Make a function a Check of its name; its docstring says what it looks at."""

    def register(function):
        return Check(
            name=function.__name__.replace("_", "-"),
            what=" ".join(function.__doc__.split()),
            seconds=seconds,
            alone=alone,
            function=function,
        )

    return register
