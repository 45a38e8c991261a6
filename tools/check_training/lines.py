"""Records as lines of JSON, and where a process stands, as a small file."""

import json
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

from .records import base, data, files, model, optimizer, process, times

CLASS = "is a"  # the key of a record's class; no attribute and no buffer has such a name
CLASSES = {
    name: kind
    for subject in (base, process, model, optimizer, data, files, times)
    for name, kind in vars(subject).items()
    if is_dataclass(kind)
}
FIELDS = {kind: [each.name for each in fields(kind)] for kind in CLASSES.values()}


def written(record):
    """Return a record as a line of JSON, with its end."""
    return json.dumps(record, default=_content) + "\n"


class NotWhole(Exception):
    """A line is only a part of a record."""


def read(line):
    """Return the record of a line of JSON. NotWhole: it is none.

    ValueError: another version of this tool has written it.
    """
    try:
        return json.loads(line, object_hook=_rebuilt)
    except json.JSONDecodeError:
        raise NotWhole from None
    except (KeyError, TypeError):
        raise ValueError("another version of this tool has written them") from None


def _content(record):
    """Return what json shall write in the place of a record, or of a part of one."""
    if type(record) not in FIELDS:  # a number of another library, say
        return str(record)
    content = {name: getattr(record, name) for name in FIELDS[type(record)]}
    return {CLASS: type(record).__name__, **content}


def _rebuilt(content):
    """Return the record for what json has read."""
    return CLASSES[content.pop(CLASS)](**content) if CLASS in content else content


@dataclass(slots=True)
class Standing:
    """What a process is in, in case that it does not come back.

    No record, but a file of its own beside them, which is written over each time.
    """

    SIZE: ClassVar[int] = 200  # bytes of the file

    what: str  # "all_reduce", "forward", "backward", "the loader", "a file"; "": the script's code
    line: str = ""
    failed: bool = False  # it is in it no more: it has raised an error, and nothing came after

    def written(self, time):
        """Return the file's bytes. time: seconds, so that the file changes with each call."""
        text = f"{time:.3f}|{self.what}|{self.line}|{'failed' if self.failed else ''}"
        return text.encode("ascii", "replace")[: self.SIZE].ljust(self.SIZE)

    @classmethod
    def read(cls, content):
        """Return the Standing of a file's bytes. If nothing was written yet, both are ""."""
        _, what, line, failed = [*content.decode("ascii", "replace").split("|"), "", "", ""][:4]
        return cls(what.strip(), line.strip(), failed.strip() == "failed")
