"""What records of all subjects have."""

from dataclasses import dataclass


@dataclass(slots=True)
class Record:
    """What all records have."""

    time: float


@dataclass(slots=True)
class Print:
    """The fingerprint of a tensor."""

    bits: int
    norm: float  # of the same values; nan or inf if a value is
