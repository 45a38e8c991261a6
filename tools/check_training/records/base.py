"""What records of all subjects have."""

from dataclasses import dataclass
from typing import NewType

# Seconds of the machine's own clock, time.monotonic(). Machines have clocks of their own.
Moment = NewType("Moment", float)


@dataclass(slots=True)
class Record:
    """What all records have."""

    time: Moment


@dataclass(slots=True)
class Print:
    """The fingerprint of a tensor."""

    bits: int
    norm: float  # of the same values; nan or inf if a value is
