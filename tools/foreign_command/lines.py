"""The lines that a command prints, and the streams of bytes from which they are cut."""

import re
import time
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST = 2**20  # bytes of a line: a longer one comes in pieces
KEPT = 2**12  # bytes of it that wait for the next piece
COLOUR = re.compile(rb"\x1b\[[0-9;?]*[@-~]")  # and other sequences that move a terminal's cursor


class Line(NamedTuple):
    """A line that the command printed."""

    seconds: float  # since its start, when it was read
    text: str  # without its end (a progress bar's is "\\r"), without colours
    stream: str  # "stdout" or "stderr"

    @property
    def rank(self):
        """The rank that the line names at its beginning, "[rank 1/2]" or "[rank1]:", or None."""
        found = re.match(r"\[(?:rank|default) ?(\d+)(?:/\d+)?\]", self.text)
        return int(found[1]) if found else None


@dataclass
class Stream:
    """The stdout or the stderr of a command, as this process reads it."""

    name: str  # "stdout" or "stderr"
    begin: float  # when the command was started, by time.monotonic()
    pending: bytearray = field(default_factory=bytearray)  # what has come of the next line

    def add(self, data):
        """Add the bytes that have come; return a list of Line, those that are whole now."""
        self.pending += data
        last_end = max(self.pending.rfind(end, -len(data)) for end in (b"\n", b"\r"))
        count = last_end + 1
        if count == 0 and len(self.pending) > LONGEST:
            count = len(self.pending) - KEPT
        whole = bytes(self.pending[:count])
        del self.pending[:count]
        seconds = time.monotonic() - self.begin
        text = COLOUR.sub(b"", whole).decode(errors="replace")
        return [
            Line(seconds, line, self.name) for line in re.split(r"[\r\n]+", text) if line.strip()
        ]

    def finish(self):
        """Return the last line, if it has no end: nothing more comes."""
        return self.add(b"\n")
