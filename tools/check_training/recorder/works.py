"""What calls with async_op=True return, a Work: notes Forgotten.

A Work is followed by a weak reference, until somebody asks it, or it is gone.
"""

import weakref
from dataclasses import dataclass, field

from torch.distributed import distributed_c10d as c10d

from ..records.process import Forgotten
from .hooks import before
from .notebook import note
from .script_lines import TORCH, innermost_files, kind_of
from .state import kept

# Whoever calls one of these may know from it when the call has ended.
QUESTIONS = [
    "wait",
    "is_completed",
    "is_success",
    "exception",
    "synchronize",
    "block_current_stream",
    "result",
    "get_future",
    "get_future_result",
]
MOST = 100  # that are noted
WAITING = 50  # at most so many are gone, and wait for a call without async_op to be noted


@dataclass(slots=True)
class AsyncCall:
    """A call with async_op=True."""

    name: str
    line: str


@dataclass
class Works:
    """The Work objects that nobody has asked."""

    followed: dict[int, weakref.ref] = field(default_factory=dict)  # {id of each: it}
    # The calls whose Work is gone, and which are not noted yet.
    forgotten: list[AsyncCall] = field(default_factory=list)
    noted: int = 0


state = kept(Works())


def follow(work, name, line):
    """Follow what a call of the script has returned, if it is a Work.

    torch's own calls may hand it on to C++, which waits (Join, for one).
    """
    if type(work) is not c10d.Work or state.noted >= MOST:
        return
    if kind_of(innermost_files(1)[0]) == TORCH:
        return
    key, call = id(work), AsyncCall(name, line)

    def gone(_):
        if state.followed.pop(key, None) is not None:
            state.forgotten.append(call)

    state.followed[key] = weakref.ref(work, gone)


def asked(args, kwargs):
    """Follow a Work no more: somebody asks it."""
    state.followed.pop(id(args[0]), None)


for _name in QUESTIONS:
    before(c10d.Work, _name)(asked)


def note_forgotten(next_call="", is_async=False):
    """Note the Work objects that are gone.

    next_call: as in Forgotten. is_async: nobody waits for it, either. A barrier that ends a row of
    such calls waits for all of them.
    """
    if is_async and len(state.forgotten) < WAITING:
        return
    forgotten, state.forgotten = state.forgotten, []
    for call in forgotten:
        state.noted += 1
        note(Forgotten, name=call.name, line=call.line, next_call=next_call)
